"""The kept channels from their native weights: one program a (group of kept channels, token); then the token's sum."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import let_next_start, wait_for_earlier


@triton.jit
def exact_kernel(
    x,  # (N, H) any float
    rows,  # (N, chunks, LIST) int64, from select_kernel
    counts,  # (N, chunks) int32, from select_kernel
    ids,  # (N, K) int
    estimates,  # (N, K, I) float32: w_e p_j of the channels that were not kept, 0 of the others
    gate_up,  # (E, 2, I, H)
    down,  # (E, I, H)
    coeffs,  # (E, I, stored rank) float16
    outputs,  # (N, P, H) float32, written: sum of w_e a_j d_j over the group
    recovery,  # (N, K * PIECES, RANK_UP) float32, written: sum over skipped j of w_e p_j b_j
    experts,
    slots,
    groups,
    chunks,
    stored_rank,
    hidden: tl.constexpr,
    channels: tl.constexpr,
    LIST: tl.constexpr,
    CHUNKS_UP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    HIDDEN_UP: tl.constexpr,
    CHANNELS: tl.constexpr,  # side by side
    STEPS: tl.constexpr,
    PIECE: tl.constexpr,  # channels of a recovery program
    PIECES: tl.constexpr,  # of a slot
    DEPENDENT: tl.constexpr,
):
    """The first P: sum over the group of w_e * phi(g_j . x) * (v_j . x) * d_j; the others: recovery of a piece."""
    program, token = tl.program_id(0), tl.program_id(1)
    if program < groups:
        h = tl.arange(0, HIDDEN_UP)
        inside = h < hidden
        token_x = tl.load(x + token.to(tl.int64) * hidden + h, mask=inside, other=0.0).to(tl.float32)
        y = tl.zeros((HIDDEN_UP,), tl.float32)
        wait_for_earlier(DEPENDENT)
        let_next_start(DEPENDENT)
        chunk, first, stop = _find_group(counts + token * chunks, program, chunks, CHANNELS * STEPS, CHUNKS_UP)
        rows += (token * chunks + chunk).to(tl.int64) * LIST
        for step in range(first, stop, CHANNELS):
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
        serving = tl.load(ids + piece // PIECES).to(tl.int64)
        serving = tl.where((serving >= 0) & (serving < experts), serving, 0)
        start = piece % PIECES * PIECE
        of_slot, of_expert = piece // PIECES * channels + start, serving * channels + start
        sums = _recover_piece(
            estimates + of_slot, coeffs + of_expert * stored_rank, channels - start, stored_rank,
            RANK, RANK_UP, PIECE, DEPENDENT,
        )  # fmt: skip
        tl.store(recovery + piece * RANK_UP + tl.arange(0, RANK_UP), sums)


@triton.jit
def _find_group(counts, program, chunks, ROWS: tl.constexpr, CHUNKS_UP: tl.constexpr):
    """The chunk whose list a program takes from, its first entry there and the one behind its last: ROWS or less."""
    chunk = tl.arange(0, CHUNKS_UP)
    count = tl.load(counts + chunk, mask=chunk < chunks, other=0)
    upto = tl.cumsum(tl.cdiv(count, ROWS), axis=0)
    # The first chunk that goes on behind the group; behind the last one, a chunk without entries.
    mine = tl.min(tl.where(upto > program, (chunk << 16) | count, CHUNKS_UP << 16), axis=0)
    before = tl.max(tl.where(upto > program, 0, upto), axis=0)
    first = (program - before) * ROWS
    return mine >> 16, first, tl.minimum(first + ROWS, mine & 0xFFFF)


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
