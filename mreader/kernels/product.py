"""A matrix times one token, bound by reading the matrix: which begins while what makes the token is still at work."""

# H numbers of a token, R rows of a matrix

import torch
import triton
from torch import Tensor

from mreader.kernels.intrinsics import has_dependent_launch, launch_options
from mreader.kernels.product_kernel import product_kernel

_NUMBERS, _WARPS = 1 << 13, 4  # of a program


def product(x: Tensor, weight: Tensor) -> Tensor:
    """y = W x: sums in float32, in a fixed order.

    x:       (..., H) any float, one token
    weight:  (R, H) any float
    returns: (..., R) dtype of x
    """
    R, H = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(*x.shape[:-1], R, dtype=x.dtype, device=x.device)
    rows = max(_NUMBERS // triton.next_power_of_2(H), 1)
    options = launch_options(has_dependent_launch(x.device))
    product_kernel[(triton.cdiv(R, rows),)](x, weight, y, R, H=H, ROWS=rows, **options, num_warps=_WARPS)
    return y
