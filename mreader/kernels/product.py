"""A matrix times one token, bound by reading the matrix: which begins while what makes the token is still at work."""

# H numbers of a token, R rows of a matrix

import torch
import triton
from torch import Tensor

from mreader.errors import UsageError
from mreader.kernels.intrinsics import has_dependent_launch, launch_options
from mreader.kernels.product_kernel import product_kernel

_NUMBERS, _WARPS = 1 << 13, 4  # of a program


def product(x: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
    """y = W x + addend: sums in float32, in a fixed order, rounded to x's dtype before the addend and behind it.

    x:       (..., H) float of up to 32 bits, one token
    weight:  (R, H) likewise, contiguous; read while an earlier kernel of the stream may be at work, so nothing that it
             writes
    addend:  (..., R) likewise; None: nothing is added
    returns: (..., R) dtype of x
    """
    R, H = weight.shape
    if x.numel() != H or not weight.is_contiguous():
        raise UsageError(f"x of shape {tuple(x.shape)} for a matrix of {R} x {H}, strides {weight.stride()}")
    x, addend = x.contiguous(), None if addend is None else addend.contiguous()
    y = torch.empty(*x.shape[:-1], R, dtype=x.dtype, device=x.device)
    rows = max(_NUMBERS // triton.next_power_of_2(H), 1)
    options = launch_options(has_dependent_launch(x.device))
    product_kernel[(triton.cdiv(R, rows),)](x, weight, addend, y, R, H=H, ROWS=rows, **options, num_warps=_WARPS)
    return y
