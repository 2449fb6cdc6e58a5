"""Estimate and score the candidates of 64 channels: one program a (tile of 64 channels, slot, token)."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import let_next_start, wait_for_earlier_after
from mreader.kernels.screen_kernel import STRIP, load_sums, token_unit
from mreader.kernels.select_kernel import count_key, score_key


@triton.jit
def score_kernel(
    sums,  # (N, K, nb, PARTS, strips, 2, 32, 8) float16, from screen_kernel
    scales,  # (E, nb, T, 2, 64) float16
    errors,  # (E, nb, T, 2, 64) bfloat16, read where SCORE is "rho"
    blocks,  # (N, 3, nb) float32, from rotate_kernel
    ids,  # (N, K) int
    weights,  # (N, K) any float
    down_norms,  # (E, I) float16
    coeffs,  # (E, I, stored rank) float16
    keys,  # (N, K, I) int32, written: score_key of every candidate, 0 where no expert serves the slot
    estimates,  # (N, K, I) float32, written: w_e p_j
    histogram,  # (N, COARSE + FINE) int32, counted up: see count_key
    experts,
    stored_rank,
    never,  # -1
    channels: tl.constexpr,
    nb: tl.constexpr,
    PARTS: tl.constexpr,
    SCORE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    FINE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,  # bins
    FINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """ghat_j = sum_b s_b(g_j) * sum over picked c of (code - ZERO) * (Rx)_c, vhat_j likewise; score and key of both."""
    tile, slot, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slots = tl.num_programs(1)
    tiles: tl.constexpr = (channels + 63) // 64
    strips: tl.constexpr = (tiles * 8 + STRIP - 1) // STRIP
    here = token * slots + slot
    expert = tl.load(ids + here).to(tl.int64)
    served = (expert >= 0) & (expert < experts)
    expert = tl.where(served, expert, 0)
    weight = tl.where(served, tl.load(weights + here).to(tl.float32), 0.0)
    j = tile * 64 + tl.arange(0, 64)
    inside = j < channels
    norm = tl.load(down_norms + expert * channels + j, mask=inside, other=0.0).to(tl.float32)
    block = tl.arange(0, triton.next_power_of_2(nb))
    exists = (block < nb)[:, None]
    # Said to be contiguous in pairs only, so that a lane gets 2 channels of every block and all sums stay within it.
    of_tile = (((expert * nb + block) * tiles + tile) * 128)[:, None] + tl.arange(0, 64)[None, :]
    of_tile = tl.max_contiguous(tl.multiple_of(of_tile, [1, 2]), [1, 2])
    gate_scale = tl.load(scales + of_tile, mask=exists, other=0.0).to(tl.float32)
    up_scale = tl.load(scales + of_tile + 64, mask=exists, other=0.0).to(tl.float32)
    gate_noise, up_noise = gate_scale * gate_scale, up_scale * up_scale
    if SCORE == "rho":
        gate_noise = tl.load(errors + of_tile, mask=exists, other=0.0).to(tl.float32)
        up_noise = tl.load(errors + of_tile + 64, mask=exists, other=0.0).to(tl.float32)
    recovered = tl.zeros((64,), tl.float32)
    if SCORE != "norm" and RANK > 0:
        r = tl.arange(0, triton.next_power_of_2(RANK))
        b = tl.load(
            coeffs + (expert * channels + j)[:, None] * stored_rank + r[None, :],
            mask=inside[:, None] & (r < RANK)[None, :],
            other=0.0,
        ).to(tl.float32)
        recovered = tl.sum(b * b, axis=1)
    down = norm * norm
    unrecovered = down - recovered
    known = tl.max(unrecovered.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    wait_for_earlier_after(known, never, DEPENDENT)
    let_next_start(DEPENDENT)
    of_block = here.to(tl.int64) * nb + block
    gate_sums = load_sums(sums, of_block, tile, strips, 0, PARTS, exists)
    up_sums = load_sums(sums, of_block, tile, strips, 1, PARTS, exists)
    blocks += token * 3 * nb
    unit = token_unit(blocks, nb)
    sums_of_block = tl.join(gate_scale * gate_sums, up_scale * up_sums)
    if SCORE == "norm":
        gate, up = tl.split(tl.sum(sums_of_block, axis=0))
    else:
        energy = tl.load(blocks + 2 * nb + block, mask=block < nb, other=0.0)[:, None]
        errors_of_block = tl.join(gate_noise * energy, up_noise * energy)
        # One sum of all four over the blocks: each would wait at barriers of its own.
        every = tl.sum(tl.join(sums_of_block, errors_of_block), axis=0)
        of_gate, of_up = tl.split(tl.permute(every, (0, 2, 1)))
        gate, gate_error = tl.split(of_gate)
        up, up_error = tl.split(of_up)
    gate, up = gate * unit, up * unit
    phi, slope = activate(gate, ACTIVATION)
    p = phi * up
    if SCORE == "norm":
        score = tl.abs(weight * p) * norm
    else:
        variance = slope * slope * (up * up * gate_error + gate_error * up_error) + phi * phi * up_error
        score = weight * weight * (p * p * unrecovered + variance * down)
    key = tl.where(served, score_key(score), 0)
    tl.store(keys + here * channels + j, key, mask=inside)
    # Not 0 * p, which is no number where p is none.
    tl.store(estimates + here * channels + j, tl.where(served, weight * p, 0.0), mask=inside)
    histogram += token.to(tl.int64) * (COARSE + FINE)
    count_key(histogram, key, inside, COARSE_SHIFT, FINE_SHIFT, COARSE, FINE)
