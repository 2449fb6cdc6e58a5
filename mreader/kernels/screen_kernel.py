"""Sum the codes of the picked coordinates: a warp a (strip of words, part of a block, slot, token)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import (
    add_codes,
    as_float,
    byte_of_lane,
    fetch_to_l2,
    let_next_start,
    load_together,
    selector_of_lane,
    vector,
    wait_for_earlier,
    wait_for_earlier_after,
)

# Of the sums of code * x', as FP16: they reach 1.5 * 128 * 2^14, and FP16 ends below 2^16.
UNIT = tl.constexpr(128.0)


@triton.jit
def screen_kernel(
    codes,  # (E, nb * 128, T, 2, 4) int32: words of 16 codes, gate before up
    picked,  # (N, nb, 128) int32, from rotate_kernel
    blocks,  # (N, 3, nb) float32, from rotate_kernel
    ids,  # (N, K) int
    scales,  # (E, nb, T, 2, 64) float16
    errors,  # (E, nb, T, 2, 64) bfloat16
    norms,  # (E, I) int32: what score reads of a channel
    coeffs,  # (E, I, stored rank) float16
    sums,  # (N, K, nb, PARTS, T up to whole strips, 2, 64) float16, written: of a tile's gate, then up
    experts,
    slots,
    nothing,  # 0
    never,  # -1
    channels: tl.constexpr,
    nb: tl.constexpr,
    stored_rank: tl.constexpr,
    ZERO: tl.constexpr,  # the code of weight 0: value = (code - ZERO) * scale
    SHARE: tl.constexpr,  # coordinates of a part
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,  # of a lane and coordinate: 8 WORDS are a strip
    STRIPS: tl.constexpr,  # that hold all words of a coordinate
    LOADED: tl.constexpr,  # coordinates whose words a warp has under way at a time
    EAGER: tl.constexpr,  # whether sums begin with the first words that come
    SCORE: tl.constexpr,
    RANK: tl.constexpr,
    ROUTED: tl.constexpr,  # whether the ids are rotate's, else they were there before it
    AHEAD: tl.constexpr,  # 1 where what score and recovery read is fetched ahead, else 0
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """sum over the picked c of a part of block b of (code_cj - ZERO) * (Rx)_c, in the token's unit, for a strip's j.

    Lane 4 g + t loads WORDS words of a quarter t of the coordinates, and gets 4 channels of each word: an integer
    product of matrices sums over the lanes of a g, exactly. Nothing waits for another warp.
    """
    tiles: tl.constexpr = (channels + 63) // 64
    PROGRAMS: tl.constexpr = (nb * PARTS * STRIPS + WARPS - 1) // WARPS
    here = tl.program_id(1)
    token = here // slots
    if ROUTED:
        wait_for_earlier(DEPENDENT)
    expert = tl.load(ids + here, cache_modifier=".cg").to(tl.int64)
    # A slot without expert takes the same way with expert 0, so that no branch holds up the loads.
    expert = tl.where((expert >= 0) & (expert < experts), expert, 0)
    if AHEAD > 0 and not ROUTED:
        # Rotate lets this kernel start once the ids are known. While it is at work, memory is idle.
        _fetch_part(scales, expert, nb * 128 * tiles, PROGRAMS, WARPS, DEPENDENT)
        _fetch_part(norms, expert, channels, PROGRAMS, WARPS, DEPENDENT)
        if SCORE == "rho":
            _fetch_part(errors, expert, nb * 128 * tiles, PROGRAMS, WARPS, DEPENDENT)
        if stored_rank == RANK:  # else recovery reads some of each row
            _fetch_part(coeffs, expert, channels * stored_rank, PROGRAMS, WARPS, DEPENDENT)
    lane = tl.arange(0, WARPS * 32) % 32
    # Warps side by side read what lies side by side. Behind the last one they repeat it, and lanes behind the last word
    # take the first.
    warp = tl.minimum(tl.program_id(0) * WARPS + tl.arange(0, WARPS * 32) // 32, nb * PARTS * STRIPS - 1)
    strip, part, block = warp % STRIPS, warp // STRIPS % PARTS, warp // (STRIPS * PARTS)
    of_strip = lane // 4 * WORDS
    word = strip * (8 * WORDS) + of_strip
    of_rows = (expert * nb + block) * (128 * 8) * tiles + tl.where(word < tiles * 8, word, 0)
    first = (token * nb + block) * 128 + part * SHARE + lane % 4 * (SHARE // 4)
    if not ROUTED:  # else addresses and the list come together
        wait_for_earlier_after((of_rows.to(tl.int32) | first) & 0x7FFFFFFF, never, DEPENDENT)
    let_next_start(DEPENDENT)
    of_token = blocks + token * 3 * nb
    unit = tl.load(of_token + block) / (UNIT * _token_unit(of_token, nb))
    offset = tl.load(of_token + nb + block) * tl.where(part == 0, -ZERO, 0.0)
    selector = selector_of_lane(lane)
    a = _sum_codes(picked + first, codes + of_rows, tiles * 8, selector, nothing, SHARE, WORDS, LOADED, EAGER)
    of_warp = ((here.to(tl.int64) * nb + block) * PARTS + part) * STRIPS + strip
    to = sums + (of_warp * (8 * WORDS) + of_strip) * 16 + lane % 4 * 4
    for w in tl.static_range(WORDS):
        tl.store(vector(to + w * 16, 4, 2), (_sum_of_word(a, w, unit) + (offset * unit)[:, None]).to(tl.float16))


@triton.jit
def _fetch_part(
    tensor, expert, NUMBER: tl.constexpr, PROGRAMS: tl.constexpr, WARPS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Send what is read of an expert to the L2 cache: a part of its elements, by one lane."""
    thread = tl.arange(0, WARPS * 32)
    PART: tl.constexpr = (NUMBER + 64 * PROGRAMS - 1) // (64 * PROGRAMS) * 64
    first = tl.program_id(0) * PART
    here = tensor + (expert * NUMBER + first) + thread * 0
    fetch_to_l2(here, tl.minimum(PART, NUMBER - first), thread == 0, DEPENDENT)


@triton.jit
def _sum_codes(
    picked,
    rows,
    stride,
    selector,
    nothing,
    SHARE: tl.constexpr,
    WORDS: tl.constexpr,
    LOADED: tl.constexpr,
    EAGER: tl.constexpr,
):
    """8 WORDS tensors (lanes,) int32: the sums of `add_codes` over SHARE coordinates, word after word.

    picked: (lanes,) pointers to a lane's quarter of the list: lanes 4 g + t have the same of each t
    rows:   (lanes,) pointers to a lane's words of coordinate 0
    """
    a = ()
    listed, arrived = _load_list(picked, 0, min(LOADED // 4, SHARE // 4))
    for start in tl.static_range(0, SHARE // 4, LOADED // 4):
        words, arrived = _load_words(listed, rows, stride, arrived, WORDS)
        next_listed, next_arrived = _load_list(picked, start + LOADED // 4, min(start + LOADED // 2, SHARE // 4))
        # Nothing is added, but the compiler cannot know: it has to have all loads under way before it uses one.
        zero = (arrived | next_arrived) & nothing
        if start == 0:
            a = _times(nothing if EAGER else zero, 8 * WORDS)
        a = (a[0] | zero,) + a[1:]
        a = _add_words(a, listed, words, selector, WORDS)
        listed, arrived = next_listed, zero
    return a


@triton.jit
def _load_list(picked, START: tl.constexpr, STOP: tl.constexpr):
    """STOP - START tensors (lanes,) int32: of a lane's quarter of the list; and their OR."""
    listed, arrived = (), 0
    for at in tl.static_range(START, STOP, 2):
        listed = listed + load_together(picked + at, 2)
    for at in tl.static_range(len(listed)):
        arrived |= listed[at]
    return listed, arrived


@triton.jit
def _load_words(listed, rows, stride, arrived, WORDS: tl.constexpr):
    """WORDS tensors (lanes,) int32 of each of the listed coordinates; and the OR of all and of `arrived`."""
    words = ()
    for at in tl.static_range(len(listed)):
        words = words + load_together(rows + (listed[at] >> 16) * stride, WORDS)
    for at in tl.static_range(len(words)):
        arrived |= words[at]
    return words, arrived


@triton.jit
def _add_words(a, listed, words, selector, WORDS: tl.constexpr):
    """The sums `a` and the listed coordinates' words, times x'."""
    for at in tl.static_range(0, len(listed), 2):
        x, other_x = byte_of_lane(listed[at], selector), byte_of_lane(listed[at + 1], selector)
        added = ()
        for w in tl.static_range(WORDS):
            word, other_word = words[at * WORDS + w], words[(at + 1) * WORDS + w]
            added = added + add_codes(word, other_word, x, other_x, a[8 * w : 8 * w + 8])
        a = added
    return a


@triton.jit
def _sum_of_word(a, WORD: tl.constexpr, unit):
    """(lanes, 4) float32: the sums of codes * x' of channels 4 t + 0 to 3 of a lane's word, times its unit."""
    c0, c1 = _sum_of(a, WORD, 0, unit), _sum_of(a, WORD, 1, unit)
    c2, c3 = _sum_of(a, WORD, 2, unit), _sum_of(a, WORD, 3, unit)
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (c0.shape[0], 4))


@triton.jit
def _sum_of(a, WORD: tl.constexpr, I: tl.constexpr, unit):
    at: tl.constexpr = 8 * WORD + 2 * I
    return as_float(a[at]) * (unit * (256.0 / 4**I)) + as_float(a[at + 1]) * (unit * (1.0 / 4**I))


@triton.jit
def _token_unit(blocks, nb: tl.constexpr):
    """What the sums of a token are counted in: the largest of its blocks' units, powers of 2."""
    block = tl.arange(0, triton.next_power_of_2(nb))
    return tl.max(tl.load(blocks + block, mask=block < nb, other=0.0), axis=0)


@triton.jit
def _times(number, TIMES: tl.constexpr):
    every = (number,)
    for _ in tl.static_range(1, TIMES):
        every = every + (number,)
    return every
