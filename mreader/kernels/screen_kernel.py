"""Estimate and score the candidates of 64 channels: one program a (tile of 64 channels, slot, token)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import add_codes, high_half, let_next_start, low_half, wait_for_earlier


@triton.jit
def score_key(score):
    """An integer that rises with a score >= 0; never 0, which is for a slot without expert."""
    return tl.maximum(score, 0.0).to(tl.int32, bitcast=True) + 1


@triton.jit
def screen_kernel(
    codes,  # (E, nb * 128, T, 2, 4) int32: words of 16 codes, gate before up
    scales,  # (E, T, nb, 2, 64) float16
    noise,  # (E, T, nb, 2, 64): the scales, or bfloat16 errors where SCORE is "rho"
    offsets,  # (N, nb, 8, 4, 4) int32, from rotate_kernel
    values,  # (N, nb, 8, 4, 4) int32, from rotate_kernel
    blocks,  # (N, nb, 4) float32, from rotate_kernel
    ids,  # (N, K) int
    weights,  # (N, K) any float
    down_norms,  # (E, I) float16
    coeffs,  # (E, I, stored rank) float16
    keys,  # (N, K, I) int32, written: score_key of every candidate, 0 where no expert serves the slot
    skipped,  # (N, K, I) float32, written: w_e p_j
    histogram,  # (N, COARSE + FINE) int32, counted up: candidates by the upper bits of their key
    experts,
    channels,
    stored_rank,
    nothing,  # 0
    nb: tl.constexpr,
    NB_UP: tl.constexpr,  # at least 16, for the tensor cores
    ZERO: tl.constexpr,  # the code of weight 0: value = (code - ZERO) * scale
    NOISE_READ: tl.constexpr,  # squared error of a block per energy picked, in units of `noise` (squared for scales)
    NOISE_UNREAD: tl.constexpr,
    SCORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    COORDINATES: tl.constexpr,
    LOADED: tl.constexpr,  # groups of 4 words that a thread has under way at a time
    BLOCKS: tl.constexpr,  # rotation blocks side by side, one a warp
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ghat_j = sum_b s_b(g_j) * sum over picked c of (code - ZERO) * (Rx)_c, vhat_j likewise; score and key of both.

    A warp reads one block after the other: 4 picked coordinates at a time, 8 lanes for the 32 bytes of each. A lane
    sums its words in FP16 over the block, and the blocks in float32; lanes and warps are added up at the very end.
    """
    tile, slot, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles, slots = tl.num_programs(0), tl.num_programs(1)
    here = token * slots + slot
    expert = tl.load(ids + here).to(tl.int64)
    j = tile * 64 + tl.arange(0, 64)
    inside = j < channels
    served = (expert >= 0) & (expert < experts)
    # A slot without expert takes the same way with expert 0, so that no branch holds up the loads.
    expert = tl.where(served, expert, 0)
    weight = tl.where(served, tl.load(weights + here).to(tl.float32), 0.0)
    norm = tl.load(down_norms + expert * channels + j, mask=inside, other=0.0).to(tl.float32)
    of_tile = (expert * tiles + tile) * nb
    if SCORE != "norm":
        some_block = tl.arange(0, NB_UP)
        at = (of_tile + some_block)[:, None] * 128 + tl.arange(0, 64)[None, :]
        exists = (some_block < nb)[:, None]
        gate_noise = tl.load(noise + at, mask=exists, other=0.0)
        up_noise = tl.load(noise + at + 64, mask=exists, other=0.0)
        recovered = tl.zeros((64,), tl.float32)
        if RANK > 0:
            r = tl.arange(0, triton.next_power_of_2(RANK))
            b = tl.load(
                coeffs + (expert * channels + j)[:, None] * stored_rank + r[None, :],
                mask=inside[:, None] & (r < RANK)[None, :],
                other=0.0,
            ).to(tl.float32)
            recovered = tl.sum(b * b, axis=1)

    # (4 places, blocks, 8 words, 4 steps or 8 codes): the axis that lies within a thread comes last.
    place, word = tl.arange(0, 4)[:, None, None], tl.arange(0, 8)[None, None, :]
    step, code = tl.arange(0, 4)[None, None, None, :], tl.arange(0, 8)[None, None, None, :]
    low_sums = tl.zeros((4, BLOCKS, 8, 8), tl.float32)
    high_sums = tl.zeros((4, BLOCKS, 8, 8), tl.float32)
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    for first in range(0, nb, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[None, :, None]
        live = block < nb
        block = tl.minimum(block, nb - 1)
        of_list = ((token * nb + block) * 128 + place * 4 + word * 0)[:, :, :, None] + step
        # Not contiguous in the third axis. Said to be, it makes the lanes of a warp run along words, then places, as
        # those of the codes do: everything meets in registers.
        list_offsets = tl.max_contiguous(offsets + of_list, [1, 1, 2, 4])
        list_values = tl.max_contiguous(values + of_list, [1, 1, 2, 4])
        rows = codes + ((expert * nb + block) * (128 * 8) * tiles + tile * 8 + word + place * 0)
        of_scales = scales + ((of_tile + block) * 128 + word * 16 + place * 0)[:, :, :, None] + code
        of_scales = tl.max_contiguous(of_scales, [1, 1, 2, 8])
        low_scale, high_scale = tl.load(of_scales), tl.load(of_scales + 8)
        info = blocks + (token * nb + block) * 4
        unit = tl.where(live, tl.load(info), 0.0)
        offset = tl.where(live, tl.load(info + 1), 0.0) * (-0.25 * ZERO)  # each of 4 places takes a quarter
        zero = tl.zeros((4, BLOCKS, 8), tl.int32)
        a = (zero, zero, zero, zero, zero, zero, zero, zero)
        for start in tl.static_range(0, COORDINATES, 16 * LOADED):
            words, xs, arrived = _load_words(list_offsets, list_values, rows, place, start, COORDINATES, LOADED)
            # Nothing is added, but the compiler cannot know: it has to have all loads under way before it uses one.
            hold = arrived & nothing
            a = (
                a[0] | hold, a[1] | hold, a[2] | hold, a[3] | hold, a[4] | hold, a[5] | hold, a[6] | hold, a[7] | hold
            )  # fmt: skip
            for i in tl.static_range(min(4 * LOADED, (COORDINATES - start + 3) // 4)):
                a = add_codes(words[i], xs[i], a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
        unit0, unit1, unit2 = unit, unit * 0.25, unit * 0.0625
        unit3, unit4 = unit * 0.015625, unit * 0.00390625
        low_sums += low_scale.to(tl.float32) * _in_order(
            low_half(a[0]) * unit0 + offset, low_half(a[1]) * unit1 + offset, low_half(a[2]) * unit2 + offset,
            low_half(a[3]) * unit3 + offset, low_half(a[4]) * unit4 + offset, low_half(a[5]) * unit0 + offset,
            low_half(a[6]) * unit1 + offset, low_half(a[7]) * unit2 + offset,
        )  # fmt: skip
        high_sums += high_scale.to(tl.float32) * _in_order(
            high_half(a[0]) * unit0 + offset, high_half(a[1]) * unit1 + offset, high_half(a[2]) * unit2 + offset,
            high_half(a[3]) * unit3 + offset, high_half(a[4]) * unit4 + offset, high_half(a[5]) * unit0 + offset,
            high_half(a[6]) * unit1 + offset, high_half(a[7]) * unit2 + offset,
        )  # fmt: skip

    # Sums over lanes and warps are products with ones: the tensor cores are free, and exchanges between warps are not.
    partial = tl.permute(tl.join(low_sums, high_sums), (0, 1, 2, 4, 3))
    first_row = (tl.arange(0, 16) == 0)[:, None]
    ones = tl.where(first_row & (tl.arange(0, 4 * BLOCKS) >= 0)[None, :], 1.0, 0.0)
    partial = tl.reshape(partial, (4 * BLOCKS, 128))
    # What TF32 keeps of a number and the rest, which it keeps too: 22 bits.
    upper = (partial.to(tl.int32, bitcast=True) & ~0x1FFF).to(tl.float32, bitcast=True)
    sums = tl.dot(ones, upper, input_precision="tf32")
    sums = tl.sum(tl.dot(ones, partial - upper, acc=sums, input_precision="tf32"), axis=0)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, 64)), (1, 0)))
    phi, slope = activate(gate, ACTIVATION)
    p = phi * up
    if SCORE == "norm":
        score = tl.abs(weight * p) * norm
    else:
        of_block = blocks + (token * nb + some_block) * 4
        energy = NOISE_READ * tl.load(of_block + 2, mask=some_block < nb, other=0.0)
        energy += NOISE_UNREAD * tl.load(of_block + 3, mask=some_block < nb, other=0.0)
        gate_noise, up_noise = gate_noise.to(tl.float32), up_noise.to(tl.float32)
        if SCORE == "variance":
            gate_noise, up_noise = gate_noise * gate_noise, up_noise * up_noise
        energies = tl.where(first_row, energy[None, :], 0.0)
        gate_error = tl.sum(tl.dot(energies, gate_noise, input_precision="tf32"), axis=0)
        up_error = tl.sum(tl.dot(energies, up_noise, input_precision="tf32"), axis=0)
        down = norm * norm
        variance = slope * slope * (up * up * gate_error + gate_error * up_error) + phi * phi * up_error
        score = weight * weight * (p * p * (down - recovered) + variance * down)
    key = tl.where(served, score_key(score), 0)
    to = here * channels + j
    tl.store(keys + to, key, mask=inside)
    tl.store(skipped + to, weight * p, mask=inside)
    histogram += token.to(tl.int64) * (COARSE + FINE)
    tl.atomic_add(histogram + (key >> COARSE_SHIFT), 1, mask=inside, sem="relaxed")
    tl.atomic_add(histogram + COARSE + (key >> FINE_SHIFT), 1, mask=inside, sem="relaxed")


@triton.jit
def _load_words(
    list_offsets, list_values, rows, place, START: tl.constexpr, COORDINATES: tl.constexpr, LOADED: tl.constexpr
):
    """The words of up to 16 * LOADED picked coordinates from START on, their x', and the OR of all loads."""
    w0, w1, w2, w3, x0, x1, x2, x3 = _load_four(list_offsets, list_values, rows, place, START, COORDINATES)
    words, xs, arrived = (w0, w1, w2, w3), (x0, x1, x2, x3), (w0 | w1) | (w2 | w3) | x0
    for at in tl.static_range(START + 16, min(START + 16 * LOADED, COORDINATES), 16):
        w0, w1, w2, w3, x0, x1, x2, x3 = _load_four(list_offsets, list_values, rows, place, at, COORDINATES)
        words, xs = words + (w0, w1, w2, w3), xs + (x0, x1, x2, x3)  # noqa: RUF005 (Triton knows no unpacking)
        arrived |= (w0 | w1) | (w2 | w3) | x0
    return words, xs, arrived


@triton.jit
def _load_four(list_offsets, list_values, rows, place, AT: tl.constexpr, COORDINATES: tl.constexpr):
    """4 steps of 4 coordinates: the words (4, blocks, 8) of each step, and its x'."""
    o0, o1, o2, o3 = _split_four(tl.load(list_offsets + AT))
    x0, x1, x2, x3 = _split_four(tl.load(list_values + AT))
    w0, x0 = _load_step(rows, o0, x0, place, AT, COORDINATES)
    w1, x1 = _load_step(rows, o1, x1, place, AT + 4, COORDINATES)
    w2, x2 = _load_step(rows, o2, x2, place, AT + 8, COORDINATES)
    w3, x3 = _load_step(rows, o3, x3, place, AT + 12, COORDINATES)
    return w0, w1, w2, w3, x0, x1, x2, x3


@triton.jit
def _split_four(steps):
    """(..., 4) -> 4 tensors."""
    even, odd = tl.split(tl.reshape(steps, (steps.shape[0], steps.shape[1], steps.shape[2], 2, 2)))
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return s0, s1, s2, s3


@triton.jit
def _load_step(rows, offset, x, place, AT: tl.constexpr, COORDINATES: tl.constexpr):
    # One word a lane, though 8 lie side by side: sums over fewer lanes are cheaper than fewer loads.
    pointers = tl.max_contiguous(tl.multiple_of(rows + offset, [1, 1, 1]), [1, 1, 8])
    if AT + 4 <= COORDINATES:
        words = tl.load(pointers)
    else:
        exists = (place < COORDINATES - AT) & (offset == offset)
        words = tl.load(tl.where(exists, pointers, rows), mask=exists, other=0)
        x = tl.where(exists, x, 0)
    return words, x


@triton.jit
def _in_order(c0, c1, c2, c3, c4, c5, c6, c7):
    """(..., 8) from 8 tensors."""
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    joined = tl.join(even, tl.join(tl.join(c1, c5), tl.join(c3, c7)))
    return tl.reshape(joined, (joined.shape[0], joined.shape[1], joined.shape[2], 8))
