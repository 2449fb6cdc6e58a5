"""Activations of gated experts, by their Hugging Face name (`hidden_act`), with the derivatives that the scores need.

a = phi(g . x) * (v . x); an error in the estimate of g . x reaches the output through phi'.

A plan asks for no more than the names, so torch, which takes seconds, is imported by the functions that need it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mreader.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """phi and phi', both elementwise on float tensors; `name` is the Hugging Face name it was looked up by."""

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def get_activation(name: str) -> Activation:
    """The activation that a checkpoint's `hidden_act` names.

    Raises UnsupportedError for a name that is not known, listing those that are.
    """
    if name not in _FUNCTIONS:
        raise UnsupportedError(
            f"unknown activation {name!r}",
            f"known: {', '.join(sorted(_FUNCTIONS))}; add one to mreader/activations.py with its derivative",
        )
    function, derivative = _FUNCTIONS[name]
    return Activation(name, function, derivative)


def _silu(z: Tensor) -> Tensor:
    from torch.nn.functional import silu

    return silu(z)


def _silu_derivative(z: Tensor) -> Tensor:
    return _swish_derivative(z, 1.0)


def _quick_gelu(z: Tensor) -> Tensor:
    return z * (1.702 * z).sigmoid()


def _quick_gelu_derivative(z: Tensor) -> Tensor:
    return _swish_derivative(z, 1.702)


def _swish_derivative(z: Tensor, beta: float) -> Tensor:
    gate = (beta * z).sigmoid()
    return gate * (1 + beta * z * (1 - gate))


def _gelu(z: Tensor) -> Tensor:
    from torch.nn.functional import gelu

    return gelu(z)


def _gelu_derivative(z: Tensor) -> Tensor:
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return 0.5 * (1 + (z / math.sqrt(2)).erf()) + z * density


def _gelu_tanh(z: Tensor) -> Tensor:
    from torch.nn.functional import gelu

    return gelu(z, approximate="tanh")


def _gelu_tanh_derivative(z: Tensor) -> Tensor:
    slope, cubic = math.sqrt(2 / math.pi), 0.044715
    t = (slope * (z + cubic * z**3)).tanh()
    return 0.5 * (1 + t) + 0.5 * z * (1 - t.square()) * slope * (1 + 3 * cubic * z.square())


def _relu(z: Tensor) -> Tensor:
    return z.relu()


def _relu_derivative(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


def _relu2(z: Tensor) -> Tensor:
    return _relu(z).square()


def _relu2_derivative(z: Tensor) -> Tensor:
    return 2 * _relu(z)


def _sigmoid(z: Tensor) -> Tensor:
    return z.sigmoid()


def _sigmoid_derivative(z: Tensor) -> Tensor:
    s = _sigmoid(z)
    return s * (1 - s)


def _tanh(z: Tensor) -> Tensor:
    return z.tanh()


def _tanh_derivative(z: Tensor) -> Tensor:
    return 1 - _tanh(z).square()


_SILU = (_silu, _silu_derivative)
_GELU = (_gelu, _gelu_derivative)
_GELU_TANH = (_gelu_tanh, _gelu_tanh_derivative)

_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": _SILU,
    "swish": _SILU,
    "gelu": _GELU,
    "gelu_python": _GELU,
    "gelu_new": _GELU_TANH,
    "gelu_fast": _GELU_TANH,
    "gelu_accurate": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "gelu_python_tanh": _GELU_TANH,
    "quick_gelu": (_quick_gelu, _quick_gelu_derivative),
    "relu": (_relu, _relu_derivative),
    "relu2": (_relu2, _relu2_derivative),
    "sigmoid": (_sigmoid, _sigmoid_derivative),
    "tanh": (_tanh, _tanh_derivative),
}
