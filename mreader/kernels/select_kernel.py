"""The exact top k of a token: one program a (chunk of its candidates, token), and no word between them.

Each warp looks for the border by itself. Tensors are (lanes,), a number for each of the lanes of all warps, and tuples
of these: there is but one layout that they can have. What is found for a warp is the same in its lanes.
"""

# Candidate c = slot * I + j; of a chunk, (warp * words + word) * 32 + lane.

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import (
    CACHED,
    ballot,
    count_bits,
    count_equals,
    is_less,
    let_next_start,
    load_together,
    wait_for_earlier_after,
)

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

    Not in a fine one where its score is 0: these are many, and would share their bin with some of all others. Coarse
    bins are few, and additions to one place wait for each other: a warp adds up first what it counts in one bin. No two
    of its lanes may hold the same candidate.
    """
    bin = key >> COARSE_SHIFT
    number = count_equals(tl.where(mask, bin, -1))
    tl.atomic_add(histogram + bin, number, mask=mask & (number > 0), sem="relaxed")
    fine = COARSE + (key >> FINE_SHIFT & (FINE - 1))
    tl.atomic_add(histogram + fine, 1, mask=mask & (key > 1), sem="relaxed")


@triton.jit
def select_kernel(
    keys,  # (N, K, I) int32, from score_kernel
    histogram,  # (N, COARSE + FINE) int32, from score_kernel: candidates by upper bits of their key, see count_key
    ids,  # (N, K) int
    weights,  # (N, K) any float
    rows,  # (N, listed) int64, -1 before; written: row e * I + j in the low half, w_e as float32 in the high
    estimates,  # (N, K, I) float32: w_e p_j; zeros are written for the kept ones
    experts,
    slots,
    k,
    listed,
    never,  # -1
    channels: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,  # keys that a lane looks at side by side, a multiple of 4
    SHARED: tl.constexpr,  # whether a token has round(k n / K) channels, of n experts here
    SLOTS_UP: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    FINE: tl.constexpr,
    WARPS: tl.constexpr,  # of the program; CHUNK // 32 or less
    DEPENDENT: tl.constexpr,
):
    """List the candidates of a chunk that belong to the token's k largest.

    First come, in order, those above the border's bin, where that is not kept whole; then the bin's own, by rank.
    """
    WORDS: tl.constexpr = CHUNK // WARPS // 32
    # Keys that a lane loads at once: 16 bytes, where every token's begin at a multiple of them.
    EACH: tl.constexpr = min(CHUNK // 32, 4 if channels % 4 == 0 else 1)
    token = tl.program_id(1).to(tl.int64)
    candidates = slots * channels
    start = tl.program_id(0) * CHUNK
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    own = start + warp * (32 * WORDS) + lane
    entry, known = (), 0
    for word in tl.static_range(WORDS):
        row, weight = _entry(own + word * 32, ids + token * slots, weights + token * slots, experts, slots, channels)
        entry = entry + ((row.to(tl.int64) & 0xFFFFFFFF) | (weight.to(tl.int64) << 32),)
        known |= row ^ weight
    if SHARED:
        k = share_of_token(k, ids + token * slots, experts, slots, SLOTS_UP)
    keys += token * candidates
    estimates += token * candidates + own
    histogram += token * (COARSE + FINE)
    rows += token * listed
    coarse_bins = histogram + lane * (COARSE // 32)
    fine_bins = histogram + COARSE + lane * ((1 << (COARSE_SHIFT - FINE_SHIFT)) // 32)
    in_chunk, is_earlier = _look_at_chunk(keys, start, candidates, lane, warp, CHUNK, WARPS, EACH)
    known |= _bits((coarse_bins,) + in_chunk)
    wait_for_earlier_after(known & 0x7FFFFFFF, never, DEPENDENT)
    let_next_start(DEPENDENT)
    # Keys are asked for with the coarse bins, and these looked at when all are there: else the compiler would put the
    # keys off until the fine bins have come. Nothing is added.
    coarse = _load_bins(coarse_bins, COARSE)
    of_chunk, key = (), ()
    for part in tl.static_range(len(in_chunk)):
        of_chunk = of_chunk + load_together(in_chunk[part], EACH)
    for word in tl.static_range(WORDS):
        key = key + (tl.load(keys + own + word * 32, mask=own + word * 32 < candidates, other=0),)
    earlier = _load_keys(keys, thread, 0, tl.minimum(start, candidates - EACH), AT_ONCE, EACH)
    skipped = candidates - tl.maximum(k, 1) + (_or(earlier + of_chunk + key) & (never + 1))
    low, high = _border(coarse, skipped, histogram, fine_bins, lane, COARSE_SHIFT, FINE_SHIFT, FINE)
    lowest = tl.where(k > 0, 1, _NO_KEY)
    low, high = tl.maximum(low, lowest), tl.maximum(high, lowest)
    kept, open_key = (), ()
    for word in tl.static_range(WORDS):
        kept = kept + (key[word] >= high,)
        open_key = open_key + (tl.where((key[word] >= low) & (key[word] < high), key[word], 0),)
    ahead = _count_ahead(earlier, thread, 0, start, candidates, high - 1, _NO_KEY, EACH)
    for first in range(AT_ONCE * 32 * WARPS, start, AT_ONCE * 32 * WARPS):
        more = _load_keys(keys, thread, first, tl.minimum(start, candidates - EACH), AT_ONCE, EACH)
        ahead += _count_ahead(more, thread, first, start, candidates, high - 1, _NO_KEY, EACH)
    ahead, largest = tl.reduce((ahead, _largest_below(_NO_KEY, open_key)), 0, _add_and_max)
    place = _places(kept, ahead + _count_in_chunk(of_chunk, is_earlier, high), lane)
    _write_list(rows, estimates, entry, kept, place)
    # Few chunks hold some of a bin that is not kept whole.
    if largest > 0:
        _list_by_rank(
            rows,
            estimates,
            entry,
            open_key,
            largest,
            keys,
            of_chunk,
            is_earlier,
            k,
            start,
            candidates,
            never,
            thread,
            AT_ONCE,
        )


@triton.jit
def share_of_token(k, ids, experts, slots, SLOTS_UP: tl.constexpr):
    """round(k n / K), n of the K experts being here."""
    slot = tl.arange(0, SLOTS_UP)
    here = tl.load(ids + slot, mask=slot < slots, other=-1, cache_modifier=".cg")
    n = tl.sum(((here >= 0) & (here < experts)).to(tl.int32), axis=0)
    return (2 * k * n + slots) // (2 * slots)


@triton.jit
def _entry(candidate, ids, weights, experts, slots, channels: tl.constexpr):
    """Row e * I + j, and the weight's bits."""
    slot = tl.minimum(candidate // channels, slots - 1)
    expert = tl.load(ids + slot, cache_modifier=".cg").to(tl.int64)
    served = (expert >= 0) & (expert < experts)
    row = tl.where(served, expert, 0).to(tl.int32) * channels + candidate % channels
    return row, tl.load(weights + slot, cache_modifier=".cg").to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _look_at_chunk(keys, start, candidates, lane, warp, CHUNK: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr):
    """Two tuples of (lanes,): pointers to EACH keys of the chunk; 1 where these are an earlier warp's, else 0.

    Every warp looks at all keys of the chunk.
    """
    pointers, is_earlier = (), ()
    for part in tl.static_range(CHUNK // (32 * EACH)):
        place = (part * 32 + lane) * EACH
        pointers = pointers + (keys + tl.minimum(start + place, candidates - EACH),)
        earlier = (place < warp * (CHUNK // WARPS)) & (start + place < candidates)
        is_earlier = is_earlier + (earlier.to(tl.int32),)
    return pointers, is_earlier


@triton.jit
def _count_in_chunk(of_chunk, is_earlier, least):
    """(lanes,) int32: keys of the chunk's earlier warps from `least` on."""
    EACH: tl.constexpr = len(of_chunk) // len(is_earlier)
    count = 0
    for part in tl.static_range(len(is_earlier)):
        of_part = 0
        for i in tl.static_range(EACH):
            of_part += is_less(least - 1, of_chunk[part * EACH + i])
        count += of_part * is_earlier[part]
    return _sum_of_warp(count)


@triton.jit
def _write_list(rows, estimates, entry, kept, place):
    """The kept ones' entries at their places, and zeros for their estimates.

    estimates:          (lanes,) pointers, to a lane's first candidate
    entry, kept, place: as many tensors (lanes,) as a warp has words: int64, bool, int32
    """
    for word in tl.static_range(len(kept)):
        tl.store(rows + place[word], entry[word], mask=kept[word])
        tl.store(estimates + word * 32, tl.zeros_like(place[word]).to(tl.float32), mask=kept[word])


@triton.jit
def _list_by_rank(
    rows,
    estimates,
    entry,  # as many tensors (lanes,) int64 as a warp has words
    open_key,  # as many int32: keys of the bin that is not kept whole, 0 elsewhere
    largest,  # of these
    keys,  # (candidates,) int32: those of all candidates of the token
    of_chunk,
    is_earlier,
    k,
    start,  # of the chunk
    candidates,
    never,  # -1
    thread,
    AT_ONCE: tl.constexpr,
):
    """List those of the open ones whose rank is below k, at their rank. They are few; equals are ranked at once."""
    EACH: tl.constexpr = len(of_chunk) // len(is_earlier)
    LANES: tl.constexpr = thread.shape[0]
    while largest > 0:
        border = largest
        ahead, equal, equals = thread * 0, (), thread * 0
        for first in range(0, candidates, AT_ONCE * LANES):
            found = _load_keys(keys, thread, first, candidates - EACH, AT_ONCE, EACH)
            # Nothing is added: else the compiler would have some under way only when it has looked at others.
            larger = border + (_or(found) & (never + 1))
            ahead += _count_ahead(found, thread, first, start, candidates, larger - 1, larger, EACH)
        for word in tl.static_range(len(open_key)):
            equal = equal + (open_key[word] == border,)
            equals += equal[word].to(tl.int32)
        # Both in one sum: candidates are fewer than 2^16.
        ahead, largest = tl.reduce((ahead << 16 | equals, _largest_below(border, open_key)), 0, _add_and_max)
        number, ahead = ahead & 0xFFFF, ahead >> 16 & 0xFFFF
        of_warps = _count_in_chunk(of_chunk, is_earlier, border) - _count_in_chunk(of_chunk, is_earlier, border + 1)
        place = _places(equal, ahead + of_warps, thread % 32)
        kept = ()
        for word in tl.static_range(len(open_key)):
            kept = kept + (equal[word] & (place[word] < k),)
        _write_list(rows, estimates, entry, kept, place)
        # Where not all of these are kept, no smaller one is.
        largest = tl.where(ahead + number < k, largest, 0)


@triton.jit
def _places(kept, before, lane):
    """Of every tensor (lanes,) bool one (lanes,) int32: how many come before a lane, `before` those of its warp."""
    place = ()
    for word in tl.static_range(len(kept)):
        bits = ballot(kept[word])
        place = place + (before + count_bits(bits & ((1 << lane) - 1)),)
        before += count_bits(bits)
    return place


@triton.jit
def certain_from(histogram, candidates, k, thread, COARSE_SHIFT: tl.constexpr, COARSE: tl.constexpr):
    """(lanes,) int32: a key such that all from it on are kept, found by the coarse bins alone; never 0.

    For programs that have not waited for select: they read past the L1 cache, which may hold what was there earlier.
    One warp of a program does: many ask for these bins at a time, which come from one place, and one after the other.
    """
    looks = thread < 32
    coarse = _load_bins(histogram + tl.where(looks, thread, 0) * (COARSE // 32), COARSE, ".cg")
    bin, _ = _look_up(coarse, candidates - tl.maximum(k, 1), thread % 32)
    bin = tl.max(tl.where(looks, bin, 0), axis=0)
    return tl.where(k > 0, (bin + 1) << COARSE_SHIFT, _NO_KEY)


@triton.jit
def _border(
    coarse,
    skipped,
    histogram,
    fine_bins,
    lane,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    FINE: tl.constexpr,
):
    """(lanes,) int32 each: keys from the second on are kept, from the first on some, if any.

    The bin of the k-th largest, where not all of it is kept, lies between them. Keys whose upper bits alone differ
    share a fine bin: where the coarse bin of the k-th is touched by that, it serves, and where it holds scores of 0,
    which have no fine bin.

    coarse:    counts, as _load_bins has them
    skipped:   (lanes,) int32 - how many candidates are not kept
    histogram: (COARSE + FINE,) int32 - of the token's keys, see count_key
    fine_bins: (lanes,) pointers - to a lane's bins of the first window of fine ones
    """
    WINDOW: tl.constexpr = 1 << (COARSE_SHIFT - FINE_SHIFT)
    bin, rest = _look_up(coarse, skipped, lane)
    of_bin = tl.load(histogram + bin)
    fine = _load_bins(fine_bins + (bin * WINDOW & (FINE - 1)), WINDOW)
    fine_bin, rest_of_fine = _look_up(fine, rest, lane)
    shared = (_sum_of_warp(_sum(fine)) != of_bin) | (bin == 0)
    low = (bin << COARSE_SHIFT) + tl.where(shared, 0, fine_bin << FINE_SHIFT)
    width = tl.where(shared, 1 << COARSE_SHIFT, 1 << FINE_SHIFT)
    high = low + tl.where(tl.where(shared, rest, rest_of_fine) > 0, width, 0)
    return low, high


@triton.jit
def _load_bins(bins, BINS: tl.constexpr, CACHE: tl.constexpr = CACHED):
    """BINS / 32 tensors (lanes,) int32: counts of consecutive bins, from a lane's pointer on; a warp has all."""
    count = ()
    for first in tl.static_range(0, BINS // 32, 4):
        count = count + load_together(bins + first, 4, CACHE)
    return count


@triton.jit
def _look_up(count, skipped, lane):
    """(lanes,) int32 each: the bin of what comes behind the `skipped` smallest, and how many of these it holds.

    count: as _load_bins has them, a power of 2
    """
    BINS: tl.constexpr = len(count)
    of_lane = _sum(count)
    # Of the skipped ones, those that no bin of an earlier lane holds; then, of those halves that are passed by.
    left = skipped - _count_earlier_lanes(of_lane)
    here = left.to(tl.uint32, bitcast=True) < of_lane.to(tl.uint32, bitcast=True)
    bin = lane * BINS
    for halved in tl.static_range(1, BINS.bit_length()):
        lower, upper = count[: BINS >> halved], count[BINS >> halved :]
        of_lower = _sum(lower)
        passed = left >= of_lower
        count = _choose(passed, upper, lower)
        left -= tl.where(passed, of_lower, 0)
        bin += tl.where(passed, BINS >> halved, 0)
    # Both numbers in one sum: candidates are fewer than 2^16.
    found = _sum_of_warp(tl.where(here, bin << 16 | left, 0))
    return found >> 16, found & 0xFFFF


@triton.jit
def _choose(condition, those, others):
    chosen = ()
    for i in tl.static_range(len(those)):
        chosen = chosen + (tl.where(condition, those[i], others[i]),)
    return chosen


@triton.jit
def _sum(tensors):
    total = tensors[0]
    for i in tl.static_range(1, len(tensors)):
        total += tensors[i]
    return total


@triton.jit
def _or(tensors):
    bits = tensors[0]
    for i in tl.static_range(1, len(tensors)):
        bits |= tensors[i]
    return bits


@triton.jit
def _bits(pointers):
    """(lanes,) int32: some that are known only when all of a lane's pointers are."""
    bits = 0
    for i in tl.static_range(len(pointers)):
        bits |= pointers[i].to(tl.int64).to(tl.int32)
    return bits


@triton.jit
def _sum_of_warp(x):
    """(lanes,) int32 -> the same: the sum over a lane's warp."""
    of_warp = tl.broadcast_to(tl.sum(_by_warp(x), axis=1)[:, None], (x.shape[0] // 32, 32))
    return tl.reshape(of_warp, x.shape)


@triton.jit
def _by_warp(x):
    """(lanes,) -> (warps, 32)."""
    return tl.reshape(x, (x.shape[0] // 32, 32))


@triton.jit
def _count_earlier_lanes(x):
    """(lanes,) int32 -> the same: the sum over the earlier lanes of a lane's warp."""
    return tl.reshape(tl.cumsum(_by_warp(x), axis=1), x.shape) - x


@triton.jit
def _largest_below(bound, key):
    """(lanes,) int32: the largest of a lane's keys that are less than the bound, 0 if there is none."""
    largest = 0
    for word in tl.static_range(len(key)):
        largest = tl.maximum(largest, tl.where(key[word] < bound, key[word], 0))
    return largest


@triton.jit
def _add_and_max(a, b, other_a, other_b):
    return a + other_a, tl.maximum(b, other_b)


@triton.jit
def _load_keys(keys, thread, first, last, AT_ONCE: tl.constexpr, EACH: tl.constexpr):
    """AT_ONCE tensors (lanes,) int32: keys from `first` on, EACH side by side in a lane; behind `last` those again."""
    LANES: tl.constexpr = thread.shape[0]
    found = ()
    for part in tl.static_range(0, AT_ONCE * LANES, EACH * LANES):
        found = found + load_together(keys + tl.minimum(first + part + thread * EACH, last), EACH)
    return found


@triton.jit
def _count_ahead(found, thread, first, start, candidates, before, behind, EACH: tl.constexpr):
    """(lanes,) int32: of keys as _load_keys has them, those above `before` up to `start`, above `behind` from it on."""
    LANES: tl.constexpr = thread.shape[0]
    count = thread * 0
    for part in tl.static_range(len(found) // EACH):
        place = first + part * (EACH * LANES) + thread * EACH
        less = tl.where(place < candidates, tl.where(place < start, before, behind), _NO_KEY)
        for i in tl.static_range(EACH):
            count += is_less(less, found[part * EACH + i])
    return count
