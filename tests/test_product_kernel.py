"""A matrix times one token against float64, at odd sizes."""

# H numbers of a token, R rows of a matrix

import pytest
import torch

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


def test_a_view_is_multiplied_as_it_is() -> None:
    weight, x = torch.arange(12.0, device=DEVICE).view(3, 4).mT, torch.tensor([[1.0, 0.0, -1.0]], device=DEVICE)
    assert torch.equal(product(x, weight), x @ weight.mT)
