"""The exact top k of a token: one program a token."""

# Candidate c = slot * I + j. Keys lie in chunks of 8 rows of COLUMNS: candidates 8 q to 8 q + 7 are column q, so that a
# thread that loads a column has 8 candidates in a row, and a warp that loads a row reads 128 bytes. Pointers are said
# not to be contiguous: then every tensor of a chunk gets this layout, and sums along rows need no exchange.

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import let_next_start, wait_for_earlier

ROWS = tl.constexpr(8)
MOST_COLUMNS = 1024
_ABOVE_BITS = tl.constexpr(17)  # of a packed (bin, number of candidates above it): up to 2^16 candidates
_ABOVE_MASK = tl.constexpr((1 << 17) - 1)
_NO_KEY = tl.constexpr(0x7FFFFFFF)  # larger than any


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
def place_of_key(candidate, COLUMNS: tl.constexpr):
    """Where the key of a candidate lies."""
    column = candidate // ROWS
    return (column // COLUMNS * ROWS + candidate % ROWS) * COLUMNS + column % COLUMNS


@triton.jit
def select_kernel(
    keys,  # (N, KEYS) int32, from score_kernel
    histogram,  # (N, COARSE + FINE) int32, from score_kernel: candidates by upper bits of their key, see count_key
    ids,  # (N, K) int
    weights,  # (N, K) any float
    rows,  # (N, k) int64, written: row e * I + j in the low half, w_e as float32 in the high; row -1 for no expert
    skipped,  # (N, K, I) float32: w_e p_j; zeros are written for the kept ones
    experts,
    slots,
    k,
    channels: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The k largest keys, in the order of the candidates; ties go to the lower one.

    The histogram gives the bin of the k-th largest, first coarse, then fine. A fine bin has one member or two, which
    are taken from the largest down until the k-th is reached.
    """
    token = tl.program_id(0)
    candidates = slots * channels
    first_rows = _rows_of_chunk(ids + token * slots, weights + token * slots, 0, experts, slots, channels, COLUMNS)
    keys += token.to(tl.int64) * KEYS
    histogram += token.to(tl.int64) * (COARSE + FINE)
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    first = _load_chunk(keys, 0, candidates, COLUMNS)
    threshold, above = _border(histogram, k, FINE_SHIFT, COARSE_SHIFT, COARSE, FINE)
    left, room = k - above, 0
    while left > 0:
        threshold = _largest_below(keys, first, threshold, candidates, CHUNKS, COLUMNS)
        room = left
        equal = 1
        if left > 1:
            equal = _count(keys, first, threshold, candidates, CHUNKS, COLUMNS)
        left -= equal

    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    larger_before, equal_before = 0, 0
    for chunk in tl.static_range(CHUNKS):
        key, row_and_weight = first, first_rows
        if chunk > 0:
            key = _load_chunk(keys, chunk, candidates, COLUMNS)
            row_and_weight = _rows_of_chunk(
                ids + token * slots, weights + token * slots, chunk, experts, slots, channels, COLUMNS
            )
        # Two counts in one, and each below 2^16.
        flags = (key > threshold).to(tl.uint32) | ((key == threshold).to(tl.uint32) << 16)
        of_column = tl.sum(flags, axis=1)
        upto_column = tl.cumsum(of_column, axis=0)
        before = (upto_column - of_column)[:, None] + tl.cumsum(flags, axis=1) - flags
        larger = larger_before + (before & 0xFFFF).to(tl.int32)
        equals = equal_before + (before >> 16).to(tl.int32)
        keep = (key > threshold) | ((key == threshold) & (equals < room))
        candidate = (chunk * COLUMNS + column) * ROWS + row
        tl.store(rows + token * k + larger + tl.minimum(equals, room), row_and_weight, mask=keep)
        of_candidate = tl.max_contiguous(skipped + token.to(tl.int64) * candidates + candidate, [1, 1])
        tl.store(of_candidate, tl.zeros_like(key).to(tl.float32), mask=keep)
        if chunk + 1 < CHUNKS:
            total = tl.sum(of_column, axis=0)
            larger_before += (total & 0xFFFF).to(tl.int32)
            equal_before += (total >> 16).to(tl.int32)


@triton.jit
def _largest_below(keys, first, bound, candidates, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    largest = tl.full((COLUMNS,), -1, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        key = first if chunk == 0 else _load_chunk(keys, chunk, candidates, COLUMNS)
        largest = tl.maximum(largest, tl.max(tl.where(key < bound, key, -1), axis=1))
    return tl.max(largest, axis=0)


@triton.jit
def _count(keys, first, wanted, candidates, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    number = tl.zeros((COLUMNS,), tl.int32)
    for chunk in tl.static_range(CHUNKS):
        key = first if chunk == 0 else _load_chunk(keys, chunk, candidates, COLUMNS)
        number += tl.sum((key == wanted).to(tl.int32), axis=1)
    return tl.sum(number, axis=0)


@triton.jit
def _load_chunk(keys, chunk, candidates, COLUMNS: tl.constexpr):
    """(COLUMNS, 8) int32; -1 behind the last candidate."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    key = tl.load(tl.max_contiguous(keys + (chunk * ROWS + row) * COLUMNS + column, [1, 1]))
    return tl.where((chunk * COLUMNS + column) * ROWS + row < candidates, key, -1)


@triton.jit
def _rows_of_chunk(ids, weights, chunk, experts, slots, channels: tl.constexpr, COLUMNS: tl.constexpr):
    """What `rows` says of the candidates of a chunk, (COLUMNS, 8) int64."""
    row, column = tl.arange(0, ROWS)[None, :], tl.arange(0, COLUMNS)[:, None]
    candidate = (chunk * COLUMNS + column) * ROWS + row
    slot = tl.minimum(candidate // channels, slots - 1)
    expert = tl.load(ids + slot).to(tl.int64)
    served = (expert >= 0) & (expert < experts)
    row_of = tl.where(served, expert.to(tl.int32) * channels + candidate % channels, -1).to(tl.uint32).to(tl.int64)
    weight = tl.load(weights + slot).to(tl.float32)
    return row_of | (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _border(
    histogram,
    k,
    FINE_SHIFT: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
):
    """A bound that the k-th largest lies below, with less than k candidates on or above it, and their number.

    It is the upper end of the k-th's fine bin. Keys whose upper bits alone differ share a fine bin: where the coarse
    bin of the k-th is touched by that, its upper end serves.
    """
    fine_bins: tl.constexpr = 1 << (COARSE_SHIFT - FINE_SHIFT)
    falling = tl.arange(0, COARSE)
    coarse, above = _bin_of(tl.load(histogram + (COARSE - 1) - falling), k, COARSE)
    falling = tl.arange(0, fine_bins)
    fine = tl.load(histogram + COARSE + coarse * fine_bins % FINE + (fine_bins - 1) - falling)
    shared = tl.sum(fine, axis=0) != tl.load(histogram + coarse)
    within, above_within = _bin_of(fine, k - above, fine_bins)
    within, above_within = tl.where(shared, fine_bins - 1, within), tl.where(shared, 0, above_within)
    next_bin = coarse * fine_bins + within + 1
    bound = tl.where(next_bin < COARSE * fine_bins, next_bin << FINE_SHIFT, _NO_KEY)
    return bound, above + above_within


@triton.jit
def _bin_of(counts, k, BINS: tl.constexpr):
    """The bin that the k-th largest lies in, and how many lie in larger bins; `counts` by falling bin."""
    i = tl.arange(0, BINS)
    so_far = tl.cumsum(counts, axis=0)
    last = tl.max(tl.where(so_far < k, ((i + 1) << _ABOVE_BITS) | so_far, 0), axis=0)
    return BINS - 1 - (last >> _ABOVE_BITS), last & _ABOVE_MASK
