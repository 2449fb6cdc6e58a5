"""The exact top k of a token: one program a (chunk of its candidates, token), and no word between them."""

# Candidate c = slot * I + j.

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import let_next_start, wait_for_earlier

_ABOVE_BITS = tl.constexpr(17)  # of a packed (bin, number of candidates above it): up to 2^16 candidates
_ABOVE_MASK = tl.constexpr((1 << 17) - 1)
_NOWHERE = tl.constexpr(0x7FFFFFFF)  # behind any candidate, and any number of them


@triton.jit
def score_key(score):
    """An integer that rises with a score >= 0; never 0, which is for a slot without expert."""
    return tl.maximum(score, 0.0).to(tl.int32, bitcast=True) + 1


@triton.jit
def count_key(
    histogram, key, mask, COARSE_SHIFT: tl.constexpr, FINE_SHIFT: tl.constexpr, COARSE: tl.constexpr, FINE: tl.constexpr
):
    """Count a candidate in its coarse bin, and in the fine bin that it shares with keys of other upper bits.

    Not in a fine one where its score is 0: these are many, and would share their bin with some of all others.
    """
    tl.atomic_add(histogram + (key >> COARSE_SHIFT), 1, mask=mask, sem="relaxed")
    tl.atomic_add(histogram + COARSE + (key >> FINE_SHIFT) % FINE, 1, mask=mask & (key > 1), sem="relaxed")


@triton.jit
def select_kernel(
    keys,  # (N, K, I) int32, from score_kernel
    histogram,  # (N, COARSE + FINE) int32, from score_kernel: candidates by upper bits of their key, see count_key
    ids,  # (N, K) int
    weights,  # (N, K) any float
    rows,  # (N, chunks, LIST) int64, written: row e * I + j in the low half, w_e as float32 in the high; -1 behind them
    counts,  # (N, chunks) int32, written: kept ones of the chunk
    estimates,  # (N, K, I) float32: w_e p_j; zeros are written for the kept ones
    experts,
    slots,
    k,
    channels: tl.constexpr,
    CHUNK: tl.constexpr,
    LIST: tl.constexpr,
    PADDING: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SHARED: tl.constexpr,  # whether a token has round(k n / K) channels, of n experts here
    SLOTS_UP: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The candidates of a chunk that belong to the token's k largest, in order."""
    chunk, chunks, token = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    candidates = slots * channels
    candidate = chunk * CHUNK + tl.arange(0, CHUNK)
    exists = candidate < candidates
    slot = token * slots + tl.minimum(candidate // channels, slots - 1)
    expert = tl.load(ids + slot).to(tl.int64)
    served = exists & (expert >= 0) & (expert < experts)
    row = (tl.where(served, expert, 0).to(tl.int32) * channels + candidate % channels).to(tl.int64)
    weight = tl.load(weights + slot).to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    if SHARED:
        of_token = tl.arange(0, SLOTS_UP)
        here = tl.load(ids + token * slots + of_token, mask=of_token < slots, other=-1)
        n = tl.sum(((here >= 0) & (here < experts)).to(tl.int32), axis=0)
        k = (2 * k * n + slots) // (2 * slots)
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    keys += token * candidates
    key = tl.load(keys + candidate, mask=served, other=0)
    kept = _among_largest(
        key, chunk * CHUNK, keys, histogram + token * (COARSE + FINE), k, candidates,
        AT_ONCE, COARSE_SHIFT, FINE_SHIFT, COARSE, FINE,
    )  # fmt: skip
    upto = tl.cumsum(kept.to(tl.int32), axis=0)
    rows += (token * chunks + chunk) * LIST
    tl.store(rows + upto - 1, row | (weight << 32), mask=kept)
    number = tl.sum(kept.to(tl.int32), axis=0)
    tl.store(rows + number + tl.arange(0, PADDING), tl.full((PADDING,), -1, tl.int64))
    tl.store(counts + token * chunks + chunk, number)
    tl.store(estimates + token * candidates + candidate, tl.zeros((CHUNK,), tl.float32), mask=kept)


@triton.jit
def _among_largest(
    key,  # (CHUNK,) int32: keys of candidates in a row, 0 where there is none or no expert serves it
    start,  # the first of them
    keys,  # (candidates,) int32: those of all candidates of the token
    histogram,  # (COARSE + FINE,) int32: of `keys`, see count_key
    k,
    candidates,
    AT_ONCE: tl.constexpr,  # keys that are looked at side by side
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
):
    """(CHUNK,) bool: which of them belong to the k largest of all, ties to the lower candidate. A key of 0 never does.

    The histogram tells the bin that the k-th largest lies in. What lies above is kept. A bin has few
    members, and their ranks are counted, where not all of the bin is kept: those of equals at once.
    """
    bin_of_key, border, whole = _border(key, histogram, k, COARSE_SHIFT, FINE_SHIFT, COARSE, FINE)
    member = (bin_of_key == border) & (key > 0)
    kept = ((bin_of_key > border) | (member & whole)).to(tl.int32)
    open_key = tl.where(member & (whole == 0), key, -1)
    largest = tl.max(open_key, axis=0)
    while largest > 0:
        equal = (open_key == largest).to(tl.int32)
        upto = _count_ahead(keys, largest, start, candidates, AT_ONCE) + tl.cumsum(equal, axis=0)
        kept = tl.where((equal != 0) & (upto <= k), 1, kept)
        # Where not all of these are kept, no smaller one is.
        open_key = tl.where((equal != 0) | (tl.max(upto, axis=0) >= k), -1, open_key)
        largest = tl.max(open_key, axis=0)
    return kept != 0


@triton.jit
def _border(
    key,
    histogram,
    k,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
):
    """The bin of each key, that of the k-th largest, and whether all of that one belong to the k largest.

    Keys whose upper bits alone differ share a fine bin: where the coarse bin of the k-th is touched by that, it serves,
    and where it holds scores of 0, which have no fine bin.
    """
    fine_bins: tl.constexpr = 1 << (COARSE_SHIFT - FINE_SHIFT)
    counts = tl.load(histogram + (COARSE - 1) - tl.arange(0, COARSE))
    coarse, above, upto, _ = _bin_of(counts, k, COARSE)
    counts = tl.load(histogram + COARSE + coarse * fine_bins % FINE + (fine_bins - 1) - tl.arange(0, fine_bins))
    fine, _, upto_fine, total = _bin_of(counts, k - above, fine_bins)
    if (total != upto - above) | (coarse == 0):
        return key >> COARSE_SHIFT, coarse, upto == k
    return key >> FINE_SHIFT, coarse * fine_bins + fine, upto_fine == k - above


@triton.jit
def _bin_of(counts, k, BINS: tl.constexpr):
    """The bin of the k-th largest; how many lie in larger ones, in those and it, in all. `counts` by falling bin."""
    i = tl.arange(0, BINS)
    so_far = tl.cumsum(counts, axis=0)
    before = so_far < k
    last, upto, total = tl.reduce(
        (tl.where(before, ((i + 1) << _ABOVE_BITS) | so_far, 0), tl.where(before, _NOWHERE, so_far), so_far),
        axis=0,
        combine_fn=_max_min_max,
    )
    return BINS - 1 - (last >> _ABOVE_BITS), last & _ABOVE_MASK, upto, total


@triton.jit
def _max_min_max(a, b, c, other_a, other_b, other_c):
    return tl.maximum(a, other_a), tl.minimum(b, other_b), tl.maximum(c, other_c)


@triton.jit
def _count_ahead(keys, key, start, candidates, AT_ONCE: tl.constexpr):
    """How many candidates come before those of this key from `start` on: larger, or equal and lower."""
    ahead = 0
    for first in range(0, candidates, AT_ONCE):
        other = first + tl.arange(0, AT_ONCE)
        found = tl.load(keys + other, mask=other < candidates, other=-1)
        ahead += tl.sum(((found > key) | ((found == key) & (other < start))).to(tl.int32), axis=0)
    return ahead
