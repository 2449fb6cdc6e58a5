"""Triton code of attention.py: scores of a head, their softmax and the sum of values, and the sum of several parts."""

# mypy: ignore-errors
# N sequences, h heads, g key heads, L tokens, D their size, Dv that of their values

import triton
import triton.language as tl

from mreader.kernels.intrinsics import let_next_start, let_next_start_after, wait_for_earlier

_SMALLEST = tl.constexpr(-3.4028234663852886e38)  # of float32: exp(-infinity - this) is 0, where no token is seen


@triton.jit
def attention_kernel(
    query,  # (N, h, D)
    key,  # (N, g, L, D)
    value,  # (N, g, L, Dv)
    mask,  # (N, L) bool, true where a token is seen, or an addend; or None
    output,  # (N, h, Dv), written where there is one part
    sums,  # (N, h, PARTS, Dv) float32, written where there are several: sum of e^(s - largest) v
    scores,  # (N, h, PARTS, 2) float32, written likewise: the largest, and the sum of e^(s - largest)
    scale,
    length,
    query_0,  # strides, in elements; those that are not given are 1
    query_1,
    key_0,
    key_1,
    key_2,
    value_0,
    value_1,
    value_2,
    mask_0,
    mask_1,
    never,  # -1
    GROUP: tl.constexpr,  # h / g
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a part
    D: tl.constexpr,
    DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a part of the tokens, a head and a sequence; keys and values are on their way together.

    The next kernel, a product that begins with its weights, starts when they have come, and not in their way.
    """
    part, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = (part * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = token < length
    d, dv = tl.arange(0, triton.next_power_of_2(D)), tl.arange(0, triton.next_power_of_2(DV))
    keys = key + n * key_0 + head // GROUP * key_1 + token[:, None] * key_2 + d[None, :]
    values = value + n * value_0 + head // GROUP * value_1 + token[:, None] * value_2 + dv[None, :]
    wait_for_earlier(DEPENDENT)
    if mask is not None:
        allowed = tl.load(mask + n * mask_0 + token * mask_1, mask=inside, other=0)
        if mask.dtype.element_ty == tl.int1:
            inside = inside & (allowed != 0)
    q = tl.load(query + n * query_0 + head * query_1 + d, mask=d < D, other=0.0).to(tl.float32)
    k = tl.load(keys, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(values, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
    score = tl.sum(k.to(tl.float32) * q[None, :], axis=1) * scale
    if mask is not None and mask.dtype.element_ty != tl.int1:
        score += allowed.to(tl.float32)
    score = tl.where(inside, score, float("-inf"))
    largest = tl.maximum(tl.max(score, axis=0), _SMALLEST)
    share = tl.exp(score - largest)
    let_next_start_after(largest.to(tl.int32, bitcast=True) & 0x7FFFFFFF, never, DEPENDENT)
    total = tl.sum(share, axis=0)
    summed = tl.sum(share[:, None] * v.to(tl.float32), axis=0)
    row = n * tl.num_programs(1) + head
    if PARTS == 1:
        tl.store(output + row * DV + dv, (summed / total).to(output.dtype.element_ty), mask=dv < DV)
    else:
        row = row * PARTS + part
        tl.store(sums + row * DV + dv, summed, mask=dv < DV)
        tl.store(scores + row * 2, largest)
        tl.store(scores + row * 2 + 1, total)


@triton.jit
def combine_parts_kernel(
    sums,  # (N, h, PARTS, Dv) float32
    scores,  # (N, h, PARTS, 2) float32
    output,  # (N, h, Dv), written
    PARTS: tl.constexpr,
    DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program a head: its parts, brought to the largest score of all."""
    row = tl.program_id(0).to(tl.int64)
    part, dv = tl.arange(0, triton.next_power_of_2(PARTS)), tl.arange(0, triton.next_power_of_2(DV))
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    there = part < PARTS
    largest = tl.load(scores + (row * PARTS + part) * 2, mask=there, other=_SMALLEST)
    total = tl.load(scores + (row * PARTS + part) * 2 + 1, mask=there, other=0.0)
    both = there[:, None] & (dv < DV)[None, :]
    summed = tl.load(sums + (row * PARTS + part)[:, None] * DV + dv[None, :], mask=both, other=0.0)
    share = tl.exp(largest - tl.max(largest, axis=0))
    y = tl.sum(share[:, None] * summed, axis=0) / tl.sum(share * total, axis=0)
    tl.store(output + row * DV + dv, y.to(output.dtype.element_ty), mask=dv < DV)
