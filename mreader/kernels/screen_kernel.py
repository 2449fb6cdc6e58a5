"""Sum the codes of the picked coordinates: a warp a (strip of 32 words, part of a block, slot, token)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import add_codes, high_half, let_next_start, low_half, wait_for_earlier_after

STRIP = tl.constexpr(32)  # words of 16 codes: 4 tiles of 64 channels, gate and up, in 128 bytes
_SUMMED = tl.constexpr(20)  # coordinates that are summed in FP16 before float32 takes over


@triton.jit
def screen_kernel(
    codes,  # (E, nb * 128, T, 2, 4) int32: words of 16 codes, gate before up
    offsets,  # (N, nb, 128) int32, from rotate_kernel
    values,  # (N, nb, 128) int32, from rotate_kernel
    blocks,  # (N, 3, nb) float32, from rotate_kernel
    ids,  # (N, K) int
    sums,  # (N, K, nb, PARTS, strips, 2, 32, 8) float16, written: codes 8 h to 8 h + 7 of a word at (h, word)
    experts,
    slots,
    tiles,
    nothing,  # 0
    never,  # -1
    nb: tl.constexpr,
    ZERO: tl.constexpr,  # the code of weight 0: value = (code - ZERO) * scale
    SHARE: tl.constexpr,  # coordinates of a part
    PARTS: tl.constexpr,
    LOADED: tl.constexpr,  # coordinates whose words a thread has under way at a time
    BLOCKS: tl.constexpr,  # of a program, one a warp
    DEPENDENT: tl.constexpr,
):
    """sum over the picked c of a part of block b of (code_cj - ZERO) * (Rx)_c, in the token's unit, for a strip's j.

    A lane keeps one word of each coordinate: nothing is exchanged between lanes, nothing waits for another warp.
    """
    strip, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    here = tl.program_id(2)
    strips, token = tl.num_programs(0) // PARTS, here // slots
    expert = tl.load(ids + here).to(tl.int64)
    # A slot without expert takes the same way with expert 0, so that no branch holds up the loads.
    expert = tl.where((expert >= 0) & (expert < experts), expert, 0)
    lane = tl.arange(0, BLOCKS * STRIP) % STRIP
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS * STRIP) // STRIP
    # Warps behind the last block repeat it, and lanes behind the last word the first.
    word, block = strip * STRIP + lane, tl.minimum(block, nb - 1)
    of_rows = (expert * nb + block) * (128 * 8) * tiles + tl.where(word < tiles * 8, word, 0)
    rows = codes + of_rows
    first = (token * nb + block) * 128 + part * SHARE
    of_list = first[:, None] + tl.arange(0, 4)[None, :]
    list_offsets = tl.max_contiguous(offsets + of_list, [1, 4])
    list_values = tl.max_contiguous(values + of_list, [1, 4])
    low_sums = tl.zeros((BLOCKS * STRIP, 8), tl.float32)
    high_sums = tl.zeros((BLOCKS * STRIP, 8), tl.float32)
    wait_for_earlier_after((of_rows.to(tl.int32) | first) & 0x7FFFFFFF, never, DEPENDENT)
    let_next_start(DEPENDENT)
    unit = tl.load(blocks + token * 3 * nb + block) / token_unit(blocks + token * 3 * nb, nb)
    offset = tl.load(blocks + (token * 3 + 1) * nb + block) * tl.where(part == 0, -0.00390625 * ZERO, 0.0)
    # The whole lists come into the L1 cache at once. Their parts are loaded where they are used, to save registers.
    listed = tl.zeros((BLOCKS * STRIP,), tl.int32)
    for start in tl.static_range(0, SHARE, STRIP):
        listed |= tl.load(values + first + start + lane, mask=start + lane < SHARE, other=0)
        if LOADED < SHARE:
            listed |= tl.load(offsets + first + start + lane, mask=start + lane < SHARE, other=0)
    for start in tl.static_range(0, SHARE, LOADED):
        words, xs, arrived = _load_words(list_offsets, list_values, rows, start, min(start + LOADED, SHARE))
        if start == 0:
            arrived |= listed
        # Nothing is added, but the compiler cannot know: it has to have all loads under way before it uses one.
        zero = arrived & nothing
        for at in tl.static_range(0, min(LOADED, SHARE - start), _SUMMED):
            a = (zero, zero, zero, zero, zero, zero, zero, zero)
            for i in tl.static_range(at, min(at + _SUMMED, LOADED, SHARE - start)):
                a = add_codes(words[i], xs[i], a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
            low_sums += _in_order(
                low_half(a[0]) * 65536.0, low_half(a[1]) * 16384.0, low_half(a[2]) * 4096.0, low_half(a[3]) * 1024.0,
                low_half(a[4]) * 256.0, low_half(a[5]) * 65536.0, low_half(a[6]) * 16384.0, low_half(a[7]) * 4096.0,
            )  # fmt: skip
            high_sums += _in_order(
                high_half(a[0]) * 65536.0, high_half(a[1]) * 16384.0, high_half(a[2]) * 4096.0,
                high_half(a[3]) * 1024.0, high_half(a[4]) * 256.0, high_half(a[5]) * 65536.0,
                high_half(a[6]) * 16384.0, high_half(a[7]) * 4096.0,
            )  # fmt: skip
    of_strip = (((here.to(tl.int64) * nb + block) * PARTS + part) * strips + strip) * (2 * 8 * STRIP)
    to = sums + (of_strip + lane * 8)[:, None] + tl.arange(0, 8)[None, :]
    to = tl.max_contiguous(tl.multiple_of(to, [1, 16]), [1, 8])
    tl.store(to, ((low_sums + offset[:, None]) * unit[:, None]).to(tl.float16))
    tl.store(to + 8 * STRIP, ((high_sums + offset[:, None]) * unit[:, None]).to(tl.float16))


@triton.jit
def token_unit(blocks, nb: tl.constexpr):
    """What the sums of a token are counted in: the largest of its blocks' units, powers of 2."""
    block = tl.arange(0, triton.next_power_of_2(nb))
    return tl.max(tl.load(blocks + block, mask=block < nb, other=0.0), axis=0)


@triton.jit
def load_sums(sums, of_block, tile, strips: tl.constexpr, MATRIX: tl.constexpr, PARTS: tl.constexpr, mask):
    """The sums of a tile's 64 channels, parts added up, (blocks, 64) float32; gate is matrix 0, up is 1.

    of_block: (blocks,) int64 - (token * K + slot) * nb + block
    """
    j = tl.arange(0, 64)
    in_strip = (tile % 4 * 8 + MATRIX * 4 + j // 16) * 8 + j // 8 % 2 * (8 * STRIP) + j % 8
    at = (of_block * PARTS * strips + tile // 4)[:, None] * (2 * 8 * STRIP) + in_strip[None, :]
    # In eights, but said to be so in pairs: see score_kernel.
    at = tl.max_contiguous(tl.multiple_of(at, [1, 2]), [1, 2])
    total = tl.load(sums + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + at + part * strips * (2 * 8 * STRIP), mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _load_words(list_offsets, list_values, rows, START: tl.constexpr, STOP: tl.constexpr):
    """The words of coordinates START to STOP - 1 of the list, their x', and the OR of all words."""
    words, xs = _load_four(list_offsets + START, list_values + START, rows)
    arrived = (words[0] | words[1]) | (words[2] | words[3])
    for at in tl.static_range(START + 4, STOP, 4):
        four, four_xs = _load_four(list_offsets + at, list_values + at, rows)
        words, xs = words + four, xs + four_xs
        arrived |= (four[0] | four[1]) | (four[2] | four[3])
    return words, xs, arrived


@triton.jit
def _load_four(list_offsets, list_values, rows):
    o0, o1, o2, o3 = _split_four(tl.load(list_offsets))
    x0, x1, x2, x3 = _split_four(tl.load(list_values))
    return (tl.load(rows + o0), tl.load(rows + o1), tl.load(rows + o2), tl.load(rows + o3)), (x0, x1, x2, x3)


@triton.jit
def _split_four(four):
    """(lanes, 4) -> 4 tensors (lanes,)."""
    even, odd = tl.split(tl.reshape(four, (four.shape[0], 2, 2)))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0, s1, s2, s3


@triton.jit
def _in_order(c0, c1, c2, c3, c4, c5, c6, c7):
    """(lanes, 8) from 8 tensors (lanes,)."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    joined = tl.join(even, tl.join(tl.join(c1, c5), tl.join(c3, c7)))
    return tl.reshape(joined, (joined.shape[0], 8))
