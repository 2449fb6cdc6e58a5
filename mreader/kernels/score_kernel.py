"""Estimate and score candidates: one program a (CHANNELS of a tile of 64, slot, token)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import let_next_start, wait_for_earlier_after
from mreader.kernels.select_kernel import count_key, score_key


@triton.jit
def score_kernel(
    sums,  # (N, K, nb, PARTS, T up to whole strips, 2, 64) float16, from screen_kernel
    scales,  # (E, nb, T, 2, 64) float16
    errors,  # (E, nb, T, 2, 64) bfloat16, read where SCORE is "rho"
    blocks,  # (N, 3, nb) float32, from rotate_kernel
    ids,  # (N, K) int
    weights,  # (N, K) any float
    norms,  # (E, I) int32: two FP16, ||d_j|| and what recovery leaves of it
    keys,  # (N, K, I) int32, written: score_key of every candidate, 0 where no expert serves the slot
    estimates,  # (N, K, I) float32, written: w_e p_j
    histogram,  # (N, COARSE + FINE) int32, counted up: see count_key
    experts,
    never,  # -1
    channels: tl.constexpr,
    nb: tl.constexpr,
    PARTS: tl.constexpr,
    TILES: tl.constexpr,  # T up to whole strips
    SCORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CHANNELS: tl.constexpr,  # of a program: 32 or 64, and 32 or more a warp
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ghat_j = sum_b s_b(g_j) * sum over picked c of (code - ZERO) * (Rx)_c, vhat_j likewise; score and key of both.

    The expected error of score.py is phi^2 (vhat_j^2 A + C) + phi'^2 (vhat_j^2 + sv2) B. Known before the screen ends:
    A = w_e^2 (||d_j||^2 - ||b_j||^2), B = w_e^2 ||d_j||^2 sg2, C = w_e^2 ||d_j||^2 sv2.
    """
    first, slot, token = tl.program_id(0) * CHANNELS, tl.program_id(1), tl.program_id(2)
    tiles: tl.constexpr = (channels + 63) // 64
    of_part: tl.constexpr = TILES * 128
    here = token * tl.num_programs(1) + slot
    # The screen lets this kernel start once it has waited for rotate. What rotate wrote is thus in the L2 cache before
    # this kernel has waited for the screen, and so are the ids; the L1 cache, which .cg passes by, may hold what was
    # there earlier.
    expert = tl.load(ids + here, cache_modifier=".cg").to(tl.int64)
    served = (expert >= 0) & (expert < experts)
    expert = tl.where(served, expert, 0)
    weight = tl.where(served, tl.load(weights + here, cache_modifier=".cg").to(tl.float32), 0.0)
    # Blocks behind the last repeat it, and channels likewise, so that no load needs a mask.
    blocks_up: tl.constexpr = triton.next_power_of_2(nb)
    i = tl.arange(0, blocks_up)
    block = tl.minimum(i, nb - 1)
    j = first + tl.arange(0, CHANNELS)
    inside = j < channels
    row = tl.minimum(j, channels - 1)

    blocks += token * 3 * nb + block
    unit = tl.max(tl.load(blocks, cache_modifier=".cg"), axis=0)

    # (blocks, channels), lanes along the channels, one each: what is summed lies within a lane or two. The compiler
    # does not know that 1 + never is 0, nor thus that a lane could load 16 bytes.
    of_tile = first // 64 * 128 + first % 64 + (1 + never)
    across = tl.arange(0, CHANNELS)[None, :]
    of_expert = expert * (nb * tiles * 128) + of_tile
    in_expert = (block * (tiles * 128))[:, None] + across
    gate_scale = tl.load(scales + of_expert + in_expert).to(tl.float32)
    up_scale = tl.load(scales + of_expert + 64 + in_expert).to(tl.float32)
    both = tl.load(norms + expert * channels + row)
    norm, left = _half(both), _half(both >> 16)
    known = both
    if SCORE != "norm":
        gate_noise, up_noise = gate_scale * gate_scale, up_scale * up_scale
        if SCORE == "rho":
            gate_noise = tl.load(errors + of_expert + in_expert).to(tl.float32)
            up_noise = tl.load(errors + of_expert + 64 + in_expert).to(tl.float32)
        energy = tl.where(i < nb, tl.load(blocks + 2 * nb, cache_modifier=".cg"), 0.0)[:, None]
        gate_error, up_error = tl.sum(gate_noise * energy, axis=0), tl.sum(up_noise * energy, axis=0)
        of_square, down = weight * weight * (left * left), weight * weight * (norm * norm)
        of_slope, of_phi = down * gate_error, down * up_error
        known = _bits(of_square) | _bits(of_slope) | _bits(of_phi)
    gate_scale = tl.where((i < nb)[:, None], gate_scale, 0.0)
    up_scale = tl.where((i < nb)[:, None], up_scale, 0.0)
    sums += here.to(tl.int64) * (nb * PARTS * of_part) + of_tile
    in_sums = (block * (PARTS * of_part))[:, None] + across
    keys, estimates = keys + here * channels + j, estimates + here * channels + j
    histogram += token.to(tl.int64) * (COARSE + FINE)
    known |= (keys.to(tl.int64) | estimates.to(tl.int64) | histogram.to(tl.int64)).to(tl.int32)
    wait_for_earlier_after(tl.max(known & 0x7FFFFFFF, axis=0) | _bits(unit), never, DEPENDENT)
    let_next_start(DEPENDENT)

    gate_sums, up_sums = tl.load(sums + in_sums).to(tl.float32), tl.load(sums + 64 + in_sums).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        gate_sums += tl.load(sums + part * of_part + in_sums).to(tl.float32)
        up_sums += tl.load(sums + (part * of_part + 64) + in_sums).to(tl.float32)
    # One sum of both: each would wait at barriers of its own where several warps have a part in it.
    gate, up = tl.split(tl.sum(tl.join(gate_scale * gate_sums, up_scale * up_sums), axis=0) * unit)
    phi, slope = activate(gate, ACTIVATION)
    p = weight * (phi * up)
    if SCORE == "norm":
        score = tl.abs(p) * norm
    else:
        score = phi * phi * (up * up * of_square + of_phi) + slope * slope * ((up * up + up_error) * of_slope)
    key = tl.where(served, score_key(score), 0)
    tl.store(keys, key, mask=inside)
    # Not 0 * p, which is no number where p is none.
    tl.store(estimates, tl.where(served, p, 0.0), mask=inside)
    count_key(histogram, key, inside, COARSE_SHIFT, FINE_SHIFT, COARSE, FINE)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _half(word):
    """The FP16 in the lower half of an int32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
