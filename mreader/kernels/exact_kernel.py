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
    nothing,  # 0
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
    AHEAD: tl.constexpr,  # whether all rows of a step are under way before one is looked at
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
        chunk, first, stop = _find_group(counts + token * chunks, program, chunks, CHANNELS * STEPS, CHUNKS_UP)
        rows += (token * chunks + chunk).to(tl.int64) * LIST
        for step in range(first, stop, CHANNELS):
            row_and_weight = tl.load(rows + step + tl.arange(0, CHANNELS))
            row = row_and_weight.to(tl.int32)
            weight = (row_and_weight >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            # Nothing to do costs the same as channel 0, which lies in the cache by then.
            expert, j = tl.maximum(row, 0) // channels, tl.maximum(row, 0) % channels
            from_gate = gate_up + (expert * 2 * channels + j).to(tl.int64) * hidden
            matrix = tl.arange(0, 2)[None, :, None] * (channels * hidden)
            from_down = down + tl.maximum(row, 0).to(tl.int64) * hidden
            out = tl.load(from_down[:, None] + h[None, :], mask=inside[None, :], other=0.0)
            both = tl.load(from_gate[:, None, None] + matrix + h[None, None, :], mask=inside[None, None, :], other=0.0)
            x_then = token_x
            if AHEAD:
                # Nothing is added, but the compiler cannot know: it has to have all loads under way before it uses one.
                arrived = _some_bits(out) | _some_bits(tl.reshape(both, (2 * CHANNELS, HIDDEN_UP)))
                x_then += (arrived & nothing).to(tl.float32)
            gate, up = tl.split(tl.sum(both.to(tl.float32) * x_then[None, None, :], axis=2))
            phi, _ = activate(gate, ACTIVATION)
            a = tl.where(row >= 0, weight * phi * up, 0.0)
            y += tl.sum(a[:, None] * out.to(tl.float32), axis=0)
        let_next_start(DEPENDENT)
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
def _some_bits(rows):
    """(n, H) -> (H,) int32: of all rows bits of one number of 16 bytes, which a thread loads at once."""
    NUMBERS: tl.constexpr = 128 // rows.dtype.primitive_bitwidth
    BITS: tl.constexpr = tl.int16 if NUMBERS == 8 else tl.int32
    loaded = tl.reshape(rows.to(BITS, bitcast=True), (rows.shape[0], rows.shape[1] // NUMBERS, NUMBERS))
    first = tl.reduce(tl.where(tl.arange(0, NUMBERS)[None, None, :] == 0, loaded, 0), 2, _or)
    every = tl.reduce(first, 0, _or).to(tl.int32)
    return tl.reshape(tl.broadcast_to(every[:, None], (rows.shape[1] // NUMBERS, NUMBERS)), (rows.shape[1],))


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _find_group(counts, program, chunks, ROWS: tl.constexpr, CHUNKS_UP: tl.constexpr):
    """The chunk whose list a program takes from, its first entry there and the one behind its last: ROWS or less."""
    chunk = tl.arange(0, CHUNKS_UP)
    count = tl.load(counts + chunk, mask=chunk < chunks, other=0)
    upto = tl.cumsum(tl.cdiv(count, ROWS), axis=0)
    last = tl.max(tl.where(upto <= program, ((chunk + 1) << 16) | upto, 0), axis=0)
    mine, first = last >> 16, (program - (last & 0xFFFF)) * ROWS
    number = tl.sum(tl.where(chunk == mine, count, 0), axis=0)
    return mine, first, tl.minimum(first + ROWS, number)


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


@triton.jit
def finish_kernel(
    outputs,  # (N, P, H) float32
    recovery,  # (N, PIECES, RANK_UP) float32
    basis,  # (H, stored rank) float16
    y,  # (N, H) any float, written
    groups,
    stored_rank,
    hidden: tl.constexpr,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    GROUPS: tl.constexpr,  # at a time
    PIECES: tl.constexpr,
    PIECES_UP: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = sum of the groups' outputs + U . sum over skipped j of w_e p_j b_j."""
    token = tl.program_id(1).to(tl.int64)
    h, r = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK_UP)
    inside = h < hidden
    if RANK > 0:
        u = tl.load(
            basis + h[None, :] * stored_rank + r[:, None], mask=inside[None, :] & (r < RANK)[:, None], other=0.0
        )
    group, piece = tl.arange(0, GROUPS), tl.arange(0, PIECES_UP)
    of_group = outputs + (token * groups + group)[:, None] * hidden + h[None, :]
    of_piece = recovery + (token * PIECES + piece)[:, None] * RANK_UP + r[None, :]
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    # All loads are under way before one is used: they come from the L2 cache, and would be waited for one by one.
    if RANK > 0:
        lefts = tl.load(of_piece, mask=(piece < PIECES)[:, None], other=0.0)
    total = tl.sum(tl.load(of_group, mask=(group < groups)[:, None] & inside[None, :], other=0.0), axis=0)
    for first in range(GROUPS, groups, GROUPS):
        some = (first + group < groups)[:, None] & inside[None, :]
        total += tl.sum(tl.load(of_group + first * hidden, mask=some, other=0.0), axis=0)
    if RANK > 0:
        left = tl.sum(lefts, axis=0)
        # Along the same axis as above: sums along the other one would have to be exchanged between threads.
        total += tl.sum(u.to(tl.float32) * left[:, None], axis=0)
    tl.store(y + token * hidden + h, total.to(y.dtype.element_ty), mask=inside)
