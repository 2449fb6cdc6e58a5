"""A matrix times one token against float64, at odd sizes."""

# H numbers of a token, R rows of a matrix

import re

import pytest
import torch

from mreader.errors import UsageError
from mreader.kernels import product as module
from mreader.kernels.product import product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the norm. float32: sums of up to thousands of products, rounded at 6e-8; the others are rounded once, at 2^-12 and
# 2^-9, and cut off by the interpreter in BF16, at 2^-8.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
REAL = [(5120, 2048), (2048, 4096), (2816, 2112), (7168, 16384)]
SHAPES = [
    (1, 1),
    (3, 5),
    (130, 37),
    (65, 256),
    (7, 3000),
    *(pytest.param(*real, marks=pytest.mark.gpu) for real in REAL),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("R", "H"), SHAPES)
def test_the_product_is_the_formula(R: int, H: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(R)
    x, weight = (torch.randn(*size, generator=generator).to(dtype).to(DEVICE) for size in ((1, 1, H), (R, H)))
    expected = x.double() @ weight.double().mT
    for numbers in (1, 64, module._NUMBERS):  # one row a program, and several, of which the last are none
        monkeypatch.setattr(module, "_NUMBERS", numbers)
        y = product(x, weight)
        assert (y.shape, y.dtype) == ((1, 1, R), dtype)
        assert float((y.double() - expected).norm() / expected.norm()) < TOLERANCE[dtype]


# The interpreter cuts BF16 off instead of rounding it.
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_a_sum_is_rounded_before_and_behind_it(dtype: torch.dtype) -> None:
    """Of integers that float32 adds up exactly, and that the dtype does not hold; halves show what is rounded once."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-40, 40, size, generator=generator).to(dtype).to(DEVICE) for size in ((1, 37), (130, 37))
    )
    addend = (torch.randint(0, 64, (1, 130), generator=generator) / 2).to(dtype).to(DEVICE)
    exact = x.float() @ weight.float().mT
    expected = exact.to(dtype) + addend
    assert not torch.equal(expected, (exact + addend.float()).to(dtype))
    assert torch.equal(product(x, weight, addend), expected)


def test_a_token_is_multiplied_as_it_lies() -> None:
    weight, x = torch.arange(12.0, device=DEVICE).view(4, 3), torch.tensor([[1.0, 5.0, 0.0, 5.0, -1.0]], device=DEVICE)
    assert torch.equal(product(x[:, ::2], weight), x[:, ::2] @ weight.mT)


@pytest.mark.parametrize(("x", "turned"), [((2, 3), False), ((1, 4), False), ((1, 3), True)])
def test_several_tokens_and_matrices_that_would_have_to_be_copied_are_refused(x: tuple[int, int], turned: bool) -> None:
    weight = torch.zeros(3, 5, device=DEVICE).mT if turned else torch.zeros(5, 3, device=DEVICE)
    with pytest.raises(UsageError, match=re.escape(f"x of shape {x} for a matrix of 5 x 3")):
        product(torch.zeros(x, device=DEVICE), weight)
