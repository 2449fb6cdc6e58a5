"""Triton code of product.py: rows of weights times one token."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.kernels.intrinsics import let_next_start, wait_for_earlier


@triton.jit
def product_kernel(
    x,  # (H,) any float
    weight,  # (R, H) any float, contiguous
    addend,  # (R,) any float, or None
    y,  # (R,), written
    rows,  # R
    H: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program ROWS rows, all of which are on their way before the kernel waits for x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, triton.next_power_of_2(H))
    inside = (row < rows)[:, None] & (h < H)[None, :]
    w = tl.load(weight + row[:, None].to(tl.int64) * H + h[None, :], mask=inside, other=0.0)
    wait_for_earlier(DEPENDENT)
    let_next_start(DEPENDENT)
    token = tl.load(x + h, mask=h < H, other=0.0).to(tl.float32)
    total = tl.sum(w.to(tl.float32) * token[None, :], axis=1)
    total = total.to(y.dtype.element_ty)
    if addend is not None:
        total = (total.to(tl.float32) + tl.load(addend + row, mask=row < rows, other=0.0)).to(y.dtype.element_ty)
    tl.store(y + row, total, mask=row < rows)
