"""Triton code of dense.py: a plan of who is computed where, two grouped matrix products, and the sum over slots."""

# mypy: ignore-errors
# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# P = N * K slots, slot p of token p // K; a block is up to BLOCK_M slots that name the same expert

import torch
import triton
import triton.language as tl

from mreader.kernels.activation_kernel import activate
from mreader.kernels.intrinsics import let_next_start, wait_for_earlier


@triton.jit(do_not_specialize=["slots", "blocks"])
def plan_kernel(
    ids_ptr,  # (P,) int
    order_ptr,  # (P,) int32 out
    blocks_ptr,  # (3, blocks) int32 out
    slots,  # P
    blocks,  # P // BLOCK_M + E
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sort the slots by expert, in slot order within each, and cut each expert's slots into blocks.

    One program an expert, and none waits for another: expert e's slots begin where those of lower experts end, and its
    blocks at first // BLOCK_M + e, which leaves room for every partly filled block of the experts before it.
    """
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    lower = tl.zeros((CHUNK,), tl.int32)
    mine = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, slots, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < slots, other=-1)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        mine += (ids == expert).to(tl.int32)
    first = tl.sum(lower)
    end = first + tl.sum(mine)

    position = first
    for start in range(0, slots, CHUNK):
        ids = tl.load(ids_ptr + start + lane, mask=start + lane < slots, other=-1)
        same = (ids == expert).to(tl.int32)
        tl.store(order_ptr + position + tl.cumsum(same) - same, start + lane, mask=same != 0)
        position += tl.sum(same)

    begin = first // BLOCK_M + expert
    # The last expert also marks the blocks that slots of no expert would have taken.
    stop = tl.where(expert == E - 1, blocks, end // BLOCK_M + expert + 1)
    for start in range(begin, stop, 64):
        block = start + tl.arange(0, 64)
        block_first = first + (block - begin) * BLOCK_M
        inside = block < stop
        tl.store(blocks_ptr + block, tl.where(block_first < end, expert, -1), mask=inside)
        tl.store(blocks_ptr + blocks + block, block_first, mask=inside)
        tl.store(blocks_ptr + 2 * blocks + block, end, mask=inside)


@triton.jit
def _planned_block(block, order_ptr, blocks_ptr, blocks, BLOCK_M: tl.constexpr):
    """Expert (-1: idle), slots (BLOCK_M,), and which of them are there: what the plan says."""
    expert = tl.load(blocks_ptr + block)
    first = tl.load(blocks_ptr + blocks + block)
    end = tl.load(blocks_ptr + 2 * blocks + block)
    position = first + tl.arange(0, BLOCK_M)
    there = position < end
    return expert, tl.load(order_ptr + position, mask=there, other=0), there


@triton.jit
def _found_block(block, ids_ptr, slots, E: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert (-1: idle), slots (BLOCK_M,), and which of them are there: without a plan, a block a slot.

    A block is busy if its slot is the first, or the BLOCK_M-th further one, that names its expert. Its members are that
    slot and the next ones.
    """
    lane = tl.arange(0, SLOTS)
    # Through the L1 cache: all programs want these few lines, and would wait in line for one part of the L2 cache. What
    # an SM has there is not older than the kernel: nowhere promised where one starts early, but README.md says how that
    # was looked for.
    ids = tl.load(ids_ptr + lane, mask=lane < slots, other=-1)
    expert = tl.load(ids_ptr + block)
    same = (ids == expert).to(tl.int32)
    before = tl.sum(tl.where(lane < block, same, 0))
    rank = tl.cumsum(same) - same - before
    member = (same[None, :] != 0) & (rank[None, :] == tl.arange(0, BLOCK_M)[:, None])
    chosen = tl.sum(tl.where(member, lane[None, :], 0), 1)
    busy = (expert >= 0) & (expert < E) & (before % BLOCK_M == 0)
    return tl.where(busy, expert, -1), chosen, tl.sum(member.to(tl.int32), 1) > 0


@triton.jit
def _block(
    block,
    ids_ptr,
    order_ptr,
    blocks_ptr,
    slots,
    blocks,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What the plan says about the block, or what the ids say where there is no plan."""
    if blocks_ptr is None:
        return _found_block(block, ids_ptr, slots, E, SLOTS, BLOCK_M)
    else:  # noqa: RET505 (Triton compiles what follows a return, but not a branch that is constant)
        return _planned_block(block, order_ptr, blocks_ptr, blocks, BLOCK_M)


@triton.jit
def _dot_native(a, b, total):
    """total + a . b in float32; of FP32 operands too, which tensor cores would round to TF32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _dot_widened(a, b, total):
    """The same sums: a product of two BF16 or FP16 is exact in float32."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


# The interpreter multiplies the bit patterns of BF16.
_dot = _dot_widened if triton.knobs.runtime.interpret else _dot_native


@triton.jit
def _prefetch_asm(ptrs):
    """Ask for the lines of these addresses in the L2 cache, and wait for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_plain(ptrs):
    """The twin of `_prefetch_asm`: it has no result."""


_prefetch = _prefetch_plain if triton.knobs.runtime.interpret or torch.version.hip else _prefetch_asm


@triton.jit(do_not_specialize=["slots", "blocks"])
def gate_up_kernel(
    x_ptr,  # (N, H)
    gate_up_ptr,  # (E, 2, I, H)
    a_ptr,  # (P, I) out
    ids_ptr,
    order_ptr,
    blocks_ptr,
    slots,
    blocks,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """a[p, j] = phi(g_j . x_n) * (v_j . x_n) of a block of slots and BLOCK_N channels of their expert."""
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    # Neighbouring programs take neighbouring channels of the same slots: x stays in L2, weights come as one stream.
    columns: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    expert, slot, there = _block(pid // columns, ids_ptr, order_ptr, blocks_ptr, slots, blocks, E, SLOTS, BLOCK_M)
    if expert < 0:
        return

    channel = pid % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    # Channels beyond the last one read the last one's rows again, and are not stored: no mask in the loop.
    row = tl.minimum(channel, I - 1)
    x_ptrs = x_ptr + (slot // K).to(tl.int64)[:, None] * H + lane[None, :]
    gate_ptrs = gate_up_ptr + expert.to(tl.int64) * (2 * I * H) + row[:, None] * H + lane[None, :]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, H, BLOCK_K):
        inside = (k + lane < H) | (H % BLOCK_K == 0)
        x = tl.load(x_ptrs + k, mask=there[:, None] & inside[None, :], other=0.0)
        g = tl.load(gate_ptrs + k, mask=inside[None, :], other=0.0)
        v = tl.load(gate_ptrs + I * H + k, mask=inside[None, :], other=0.0)
        gate = _dot(x, tl.trans(g), gate)
        up = _dot(x, tl.trans(v), up)

    phi, _ = activate(gate, ACTIVATION)
    a_ptrs = a_ptr + slot.to(tl.int64)[:, None] * I + channel[None, :]
    tl.store(a_ptrs, (phi * up).to(a_ptr.dtype.element_ty), mask=there[:, None] & (channel < I)[None, :])


@triton.jit(do_not_specialize=["slots", "blocks"])
def down_kernel(
    a_ptr,  # (P, I)
    down_ptr,  # (E, I, H)
    weights_ptr,  # (P,)
    rows_ptr,  # (P, SPLITS, H) out
    ids_ptr,
    order_ptr,
    blocks_ptr,
    slots,
    blocks,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    SECTOR: tl.constexpr,  # elements of 32 bytes
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """rows[p, s] = w_p * sum over the channels j of split s of a[p, j] * d_j, of a block of slots and BLOCK_N of H."""
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    share: tl.constexpr = (I + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    pid = tl.program_id(0)
    split = pid // columns % SPLITS
    block = pid // (columns * SPLITS)
    expert, slot, there = _block(block, ids_ptr, order_ptr, blocks_ptr, slots, blocks, E, SLOTS, BLOCK_M)
    if expert < 0:
        return

    column = pid % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    down_ptr += expert.to(tl.int64) * (I * H)
    # What names the block is older than gate_up_kernel, which has waited for it; only a is not there yet. Until it is,
    # memory would be idle: fetch the first weights, a request for each of their sectors.
    if DEPENDENT and AHEAD > 0:
        row = tl.minimum(split * share + tl.arange(0, AHEAD * BLOCK_K), I - 1)
        sector = tl.minimum(pid % columns * BLOCK_N + tl.arange(0, BLOCK_N // SECTOR) * SECTOR, H - 1)
        _prefetch(down_ptr + row[:, None] * H + sector[None, :])
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)

    in_row = (column < H) | (H % BLOCK_N == 0)
    lane = split * share + tl.arange(0, BLOCK_K)
    slot = slot.to(tl.int64)
    a_ptrs = a_ptr + slot[:, None] * I + lane[None, :]
    down_ptrs = down_ptr + lane[:, None] * H + column[None, :]
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, share, BLOCK_K):
        inside = (lane + k < I) | (I % (SPLITS * BLOCK_K) == 0)
        a = tl.load(a_ptrs + k, mask=there[:, None] & inside[None, :], other=0.0)
        d = tl.load(down_ptrs + k * H, mask=inside[:, None] & in_row[None, :], other=0.0)
        y = _dot(a, d, y)

    y *= tl.load(weights_ptr + slot, mask=there, other=0.0).to(tl.float32)[:, None]
    rows_ptrs = rows_ptr + (slot * SPLITS + split)[:, None] * H + column[None, :]
    tl.store(rows_ptrs, y.to(rows_ptr.dtype.element_ty), mask=there[:, None] & in_row[None, :])


@triton.jit
def combine_kernel(
    rows_ptr,  # (N, K, SPLITS, H)
    ids_ptr,  # (N, K) int
    y_ptr,  # (N, H) out
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
    TERMS_UP: tl.constexpr,  # K * SPLITS, rounded up
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y_n = sum over the slots of n of their rows, in a fixed order; slots that no expert serves have none."""
    columns: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    token = (pid // columns).to(tl.int64)
    column = pid % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    term = tl.arange(0, TERMS_UP)
    expert = tl.load(ids_ptr + token * K + term // SPLITS, mask=term < K * SPLITS, other=-1)
    there = ((expert >= 0) & (expert < E))[:, None] & (column < H)[None, :]
    # As in down_kernel: ids are older than what is waited for.
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    rows = tl.load(rows_ptr + (token * K * SPLITS + term)[:, None] * H + column[None, :], mask=there, other=0.0)
    y = tl.sum(rows.to(tl.float32), axis=0)
    tl.store(y_ptr + token * H + column, y.to(y_ptr.dtype.element_ty), mask=column < H)
