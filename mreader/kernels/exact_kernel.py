"""The kept channels from their native weights: one program a (group of kept channels, token); then the token's sum."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import fetch_to_l2, let_next_start, wait_for_earlier
from mreader.kernels.select_kernel import certain_from, share_of_token


@triton.jit
def exact_kernel(
    x,  # (N, H) any float
    keys,  # (N, K, I) int32, from score_kernel
    histogram,  # (N, HISTOGRAM) int32, from score_kernel: coarse bins first
    rows,  # (N, listed) int64, from select_kernel
    ids,  # (N, K) int
    estimates,  # (N, K, I) float32: w_e p_j of the channels that were not kept, 0 of the others
    gate_up,  # (E, 2, I, H)
    down,  # (E, I, H)
    coeffs,  # (E, I, stored rank) float16
    outputs,  # (N, P, H) float32, written: sum of w_e a_j d_j over the group
    recovery,  # (N, K * PIECES, RANK_UP) float32, written: sum over skipped j of w_e p_j b_j
    experts,
    slots,
    k,
    groups,
    steps,
    listed,
    stored_rank,
    hidden: tl.constexpr,
    channels: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    HIDDEN_UP: tl.constexpr,
    CHANNELS: tl.constexpr,  # side by side
    PIECE: tl.constexpr,  # channels of a recovery program
    PIECES: tl.constexpr,  # of a slot
    AHEAD: tl.constexpr,  # tokens whose rows are fetched ahead, N or less
    COARSE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    HISTOGRAM: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The first P: sum over the group of w_e * phi(g_j . x) * (v_j . x) * d_j; the others: recovery of a piece."""
    program, token = tl.program_id(0), tl.program_id(1)
    if program < groups:
        h = tl.arange(0, HIDDEN_UP)
        inside = h < hidden
        token_x = tl.load(x + token.to(tl.int64) * hidden + h, mask=inside, other=0.0).to(tl.float32)
        y = tl.zeros((HIDDEN_UP,), tl.float32)
        if AHEAD > 0:
            # Select lets this kernel start once it has waited for score. While it looks for the border, memory is idle.
            programs = groups * tl.num_programs(1) // AHEAD
            other, part = (token * groups + program) // programs, (token * groups + program) % programs
            if (other < AHEAD) & (part * (32 * WARPS) < slots * channels):
                _fetch_ahead(
                    keys + other.to(tl.int64) * slots * channels, histogram + other.to(tl.int64) * HISTOGRAM,
                    ids + other * slots, gate_up, down, experts, slots, k,
                    part, hidden, channels, SHARED, SLOTS_UP, COARSE_SHIFT, COARSE, WARPS, DEPENDENT,
                )  # fmt: skip
        kept = share_of_token(k, ids + token * slots, experts, slots, SLOTS_UP) if SHARED else k
        rows += token.to(tl.int64) * listed
        first = program * (CHANNELS * steps)
        wait_for_earlier(DEPENDENT)
        let_next_start(DEPENDENT)
        for step in range(first, tl.minimum(first + CHANNELS * steps, kept), CHANNELS):
            row_and_weight = tl.load(rows + step + tl.arange(0, CHANNELS))
            row = row_and_weight.to(tl.int32)
            weight = (row_and_weight >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            # Nothing to do costs the same as channel 0, which lies in the cache by then.
            there = tl.maximum(row, 0)
            from_gate = gate_up + (there + there // channels * channels).to(tl.int64) * hidden
            matrix = tl.arange(0, 2)[None, :, None] * (channels * hidden)
            from_down = down + there.to(tl.int64) * hidden
            out = tl.load(from_down[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            both = tl.load(from_gate[:, None, None] + matrix + h[None, None, :], mask=inside[None, None, :], other=0.0)
            gate, up = tl.split(tl.sum(both.to(tl.float32) * token_x[None, None, :], axis=2))
            phi, _ = activate(gate, ACTIVATION)
            a = tl.where(row >= 0, weight * phi * up, 0.0)
            y += tl.sum(a[:, None] * out.to(tl.float32), axis=0)
        tl.store(outputs + (token.to(tl.int64) * groups + program) * hidden + h, y, mask=inside)
    elif RANK > 0:
        piece = token * slots * PIECES + program - groups
        serving = tl.load(ids + piece // PIECES, cache_modifier=".cg").to(tl.int64)
        serving = tl.where((serving >= 0) & (serving < experts), serving, 0)
        start = piece % PIECES * PIECE
        of_slot, of_expert = piece // PIECES * channels + start, serving * channels + start
        sums = _recover_piece(
            estimates + of_slot, coeffs + of_expert * stored_rank, channels - start, stored_rank,
            RANK, RANK_UP, PIECE, DEPENDENT,
        )  # fmt: skip
        tl.store(recovery + piece * RANK_UP + tl.arange(0, RANK_UP), sums)


@triton.jit
def _fetch_ahead(
    keys,
    histogram,
    ids,
    gate_up,
    down,
    experts,
    slots,
    k,
    part,
    hidden: tl.constexpr,
    channels: tl.constexpr,
    SHARED: tl.constexpr,
    SLOTS_UP: tl.constexpr,
    COARSE_SHIFT: tl.constexpr,
    COARSE: tl.constexpr,
    WARPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Send to the L2 cache what is read for certain of a part of a token's channels, of which a lane has one.

    Where there are fewer programs than parts, the rest is read when its turn comes.
    """
    lanes = tl.arange(0, 32 * WARPS)
    candidates = slots * channels
    inside = part * (32 * WARPS) + lanes < candidates
    candidate = tl.minimum(part * (32 * WARPS) + lanes, candidates - 1)
    expert, j = tl.load(ids + candidate // channels, cache_modifier=".cg").to(tl.int64), candidate % channels
    key = tl.load(keys + candidate, cache_modifier=".cg")
    if SHARED:
        k = share_of_token(k, ids, experts, slots, SLOTS_UP)
    # Nothing is added, as there are experts: else the compiler would load these two when it has looked for the border.
    k += (key | expert.to(tl.int32)) & (experts >> 31)
    certain = inside & (key >= certain_from(histogram, candidates, k, lanes, COARSE_SHIFT, COARSE))
    gate = gate_up + (expert * (2 * channels) + j) * hidden
    fetch_to_l2(gate, hidden, certain, DEPENDENT)
    fetch_to_l2(gate + channels * hidden, hidden, certain, DEPENDENT)
    fetch_to_l2(down + (expert * channels + j) * hidden, hidden, certain, DEPENDENT)


@triton.jit
def _recover_piece(
    estimates,
    coeffs,
    channels,
    stored_rank,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    PIECE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """(RANK_UP,) float32: sum over the skipped of the channels from the pointers on of w_e p_j b_j."""
    j, r = tl.arange(0, PIECE), tl.arange(0, RANK_UP)
    b = tl.load(
        coeffs + j[:, None] * stored_rank + r[None, :], mask=(j < channels)[:, None] & (r < RANK)[None, :], other=0.0
    )
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    wp = tl.load(estimates + j, mask=j < channels, other=0.0)
    return tl.sum(wp[:, None] * b.to(tl.float32), axis=0)


_ROWS = tl.constexpr(32)  # that finish adds side by side


@triton.jit
def finish_kernel(
    outputs,  # (N, P, H) float32
    recovery,  # (N, PIECES, RANK_UP) float32
    basis,  # (H, stored rank) float16
    y,  # (N, H) any float, written
    stored_rank,
    hidden: tl.constexpr,
    groups: tl.constexpr,
    GROUPS: tl.constexpr,  # under way at a time
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    PIECES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = sum of the groups' outputs + U . sum over skipped j of w_e p_j b_j.

    Rows and columns behind the last are the last: a mask would let six loads be under way, the compiler's predicates.
    """
    token = tl.program_id(1).to(tl.int64)
    h, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, _ROWS)
    inside = h < hidden
    column = h if hidden % COLUMNS == 0 else tl.minimum(h, hidden - 1)
    us = ()
    for first in tl.static_range(0, RANK, _ROWS):
        r = first + row
        of_row = basis + column[None, :] * stored_rank + r[:, None]
        us = us + (tl.load(of_row, mask=(r < RANK)[:, None], other=0.0).to(tl.float32),)
    recovery += token * PIECES * RANK_UP
    of_token = outputs + token * groups * hidden + column[None, :]
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    # All loads are under way before one is used: they come from the L2 cache, and would be waited for one by one.
    lefts = ()
    for first in tl.static_range(0, RANK, _ROWS):
        left = tl.zeros((_ROWS,), tl.float32)
        for piece in tl.static_range(PIECES):
            left += tl.load(recovery + piece * RANK_UP + tl.minimum(first + row, RANK_UP - 1))
        lefts = lefts + (left,)
    total = tl.zeros((_ROWS, COLUMNS), tl.float32)
    for first in range(0, groups, GROUPS):
        some = ()
        for at in tl.static_range(0, GROUPS, _ROWS):
            group = first + at + row
            some = some + (tl.load(of_token + tl.minimum(group, groups - 1)[:, None] * hidden),)
        for at in tl.static_range(0, GROUPS, _ROWS):
            total += tl.where((first + at + row < groups)[:, None], some[at // _ROWS], 0.0)
    for first in tl.static_range(0, RANK, _ROWS):
        total += us[first // _ROWS] * lefts[first // _ROWS][:, None]
    tl.store(y + token * hidden + h, tl.sum(total, axis=0).to(y.dtype.element_ty), mask=inside)
