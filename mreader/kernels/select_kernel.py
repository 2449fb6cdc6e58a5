"""The exact top k of a token: one program a (slot, token), each for its own candidates."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import let_next_start, wait_for_earlier

_RANKED = tl.constexpr(4)  # members of the border bin that are ranked side by side
_ABOVE_BITS = tl.constexpr(19)  # of a packed (place, count): counts below 2^19
_ABOVE_MASK = tl.constexpr((1 << 19) - 1)


@triton.jit
def select_kernel(
    keys,  # (N, M) int32
    histogram,  # (N, COARSE + FINE) int32: candidates by the upper bits of their key
    ids,  # (N, K) int
    weights,  # (N, K) any float
    rows,  # (N, k) int64, written: row e * I + j in the low half, w_e as float32 in the high; row -1 for no expert
    skipped,  # (N, K, I) float32: w_e p_j; zeros are written for the kept ones
    members,  # (N, K, I) int32, scratch
    experts,
    k,
    channels: tl.constexpr,
    CANDIDATES_UP: tl.constexpr,
    CHANNELS_UP: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The histogram gives the bin of the k-th largest, first coarse, then fine. What lies above it is kept, in the
    order of the candidates; a member of the bin, of which a slot has a handful, is kept if its rank is below k. Ties
    go to the lower candidate. Every program counts through all keys: cheaper than to hear from the others.
    """
    slot, token, slots = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    here = token * slots + slot
    expert = tl.load(ids + here).to(tl.int64)
    weight = tl.load(weights + here).to(tl.float32)
    first_row = tl.where((expert >= 0) & (expert < experts), expert * channels, -1).to(tl.int32)
    i, j = tl.arange(0, CANDIDATES_UP), tl.arange(0, CHANNELS_UP)
    all_keys = keys + token.to(tl.int64) * slots * channels
    my_keys = all_keys + slot * channels
    skipped += here.to(tl.int64) * channels
    members += here.to(tl.int64) * channels
    rows += token * k
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    key = tl.load(my_keys + j, mask=j < channels, other=-1)
    any_key = tl.load(all_keys + i, mask=i < slots * channels, other=-1)
    border = _border(histogram + token.to(tl.int64) * (COARSE + FINE), k, COARSE_SHIFT - FINE_SHIFT, COARSE)

    larger, member = (key >> FINE_SHIFT) > border, (key >> FINE_SHIFT) == border
    flags = larger.to(tl.uint32) | (member.to(tl.uint32) << 16)
    before = tl.cumsum(flags, axis=0) - flags
    # Two counts in one: what is certain in earlier slots, and the members of this one.
    bins = any_key >> FINE_SHIFT
    earlier = i < slot * channels
    own = (i >= slot * channels) & (i < (slot + 1) * channels)
    counts = tl.sum(((bins > border) & earlier).to(tl.uint32) | (((bins == border) & own).to(tl.uint32) << 16), axis=0)
    in_earlier_slots, count = (counts & 0xFFFF).to(tl.int32), (counts >> 16).to(tl.int32)
    tl.store(rows + in_earlier_slots + (before & 0xFFFF).to(tl.int32), _row(first_row, j, weight), mask=larger)
    tl.store(skipped + j, tl.zeros_like(j).to(tl.float32), mask=larger)
    tl.store(members + (before >> 16).to(tl.int32), j, mask=member)
    tl.debug_barrier()
    # Keys of earlier slots win ties, those of later slots lose them; twice the key leaves a bit to say so.
    doubled = (any_key.to(tl.uint32) << 1) | earlier.to(tl.uint32)
    doubled = tl.where((any_key < 0) | own, 0, doubled)
    for first in range(0, count, _RANKED):
        mine = first + tl.arange(0, _RANKED)
        my_j = tl.load(members + mine, mask=mine < count, other=0)
        my_key = tl.load(my_keys + my_j)
        ahead = doubled[:, None] > (my_key.to(tl.uint32) << 1)[None, :]
        ties = (key[:, None] == my_key[None, :]) & (j[:, None] < my_j[None, :])
        ahead_here = (key[:, None] > my_key[None, :]) | ties
        rank = tl.sum(ahead.to(tl.int32), axis=0) + tl.sum(ahead_here.to(tl.int32), axis=0)
        kept = (mine < count) & (rank < k)
        tl.store(rows + rank, _row(first_row, my_j, weight), mask=kept)
        tl.store(skipped + my_j, tl.zeros_like(my_j).to(tl.float32), mask=kept)


@triton.jit
def _row(first_row, j, weight):
    """A row and its weight in one int64: one store of a scattered kind instead of two."""
    row = tl.where(first_row >= 0, first_row + j, -1).to(tl.uint32).to(tl.int64)
    return row | (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _border(histogram, k, SPLIT: tl.constexpr, COARSE: tl.constexpr):
    """The fine bin that the k-th largest lies in; a coarse bin is 2^SPLIT fine ones."""
    fine_bins: tl.constexpr = 1 << SPLIT
    falling = tl.arange(0, COARSE)
    coarse, above = _bin_of(tl.load(histogram + (COARSE - 1) - falling), k, COARSE)
    falling = tl.arange(0, fine_bins)
    fine = histogram + COARSE + coarse * fine_bins
    border, _ = _bin_of(tl.load(fine + (fine_bins - 1) - falling), k - above, fine_bins)
    return coarse * fine_bins + border


@triton.jit
def _bin_of(counts, k, BINS: tl.constexpr):
    """The bin that the k-th largest lies in, and how many lie in larger bins; `counts` by falling bin."""
    i = tl.arange(0, BINS)
    so_far = tl.cumsum(counts, axis=0)
    last = tl.max(tl.where(so_far < k, ((i + 1) << _ABOVE_BITS) | so_far, 0), axis=0)
    return BINS - 1 - (last >> _ABOVE_BITS), last & _ABOVE_MASK
