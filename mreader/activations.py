"""Activations of gated experts, by name, with the derivatives that the scores need.

a = phi(g . x) * psi(v . x), and nearly always psi(u) = u; an error in the estimate of g . x reaches the output through
phi', one of v . x through psi'.

A plan asks for no more than the names, so torch, which takes seconds, is imported by the functions that need it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mreader.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


def _identity(z: Tensor) -> Tensor:
    return z


def _one(z: Tensor) -> Tensor:
    return z.new_ones(()).expand_as(z)


@dataclass(frozen=True)
class Activation:
    """How a channel's gate and up make its activation; all functions are elementwise on float tensors.

    name:                      what it was looked up by
    function, derivative:       phi and phi', of the gate
    up_function, up_derivative: psi and psi', of up
    """

    name: str
    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    up_function: Callable[[Tensor], Tensor] = _identity
    up_derivative: Callable[[Tensor], Tensor] = _one

    @property
    def is_linear_in_up(self) -> bool:
        """Whether psi(u) = u, as selectors other than the reader and the GPU kernels take for granted."""
        return self.up_function is _identity

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """phi(gate) * psi(up)."""
        return self.function(gate) * self.up_function(up)


def get_activation(name: str) -> Activation:
    """The activation of that name: Hugging Face's (`hidden_act`), or `name(parameter=1.5, ...)` of a clamped one.

    Raises UnsupportedError for a name that is not known, listing those that are.
    """
    if name in _FUNCTIONS:
        return Activation(name, *_FUNCTIONS[name])
    family, parameters = _parse(name)
    if family in _CLAMPED and parameters.keys() == _CLAMPED[family].parameters:
        return _CLAMPED[family].make(name, **parameters)
    known = [*_FUNCTIONS, *(f"{family}({', '.join(sorted(c.parameters))})" for family, c in _CLAMPED.items())]
    raise UnsupportedError(
        f"unknown activation {name!r}",
        f"known: {', '.join(sorted(known))}; add one to mreader/activations.py with its derivative",
    )


def _parse(name: str) -> tuple[str, dict[str, float]]:
    """`clamped_silu(limit=7)` -> ("clamped_silu", {"limit": 7.0})."""
    match = re.fullmatch(r"(\w+)\((.*)\)", name)
    if match is None:
        return name, {}
    found = re.findall(r"(\w+)=(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", match[2])
    return match[1], {key: float(value) for key, value in found}


def _silu(z: Tensor) -> Tensor:
    from torch.nn.functional import silu

    return silu(z)


def _silu_derivative(z: Tensor) -> Tensor:
    return _swish_derivative(z, 1.0)


def _quick_gelu(z: Tensor) -> Tensor:
    return _swish(1.702, z)


def _quick_gelu_derivative(z: Tensor) -> Tensor:
    return _swish_derivative(z, 1.702)


def _swish(beta: float, z: Tensor) -> Tensor:
    return z * (beta * z).sigmoid()


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


def _clamped(
    name: str,
    limit: float,
    function: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    shift: float = 0.0,
) -> Activation:
    """phi(z) = function(min(z, limit)), psi(u) = shift + u between -limit and limit. Can be pickled, as models are."""
    return Activation(
        name,
        function=partial(_below, function, limit),
        derivative=partial(_below_derivative, derivative, limit),
        up_function=partial(_between, limit, shift),
        up_derivative=partial(_between_derivative, limit),
    )


def _below(function: Callable[[Tensor], Tensor], limit: float, z: Tensor) -> Tensor:
    return function(z.clamp(max=limit))


def _below_derivative(derivative: Callable[[Tensor], Tensor], limit: float, z: Tensor) -> Tensor:
    return derivative(z).masked_fill(z > limit, 0.0)


def _between(limit: float, shift: float, u: Tensor) -> Tensor:
    return u.clamp(-limit, limit) + shift


def _between_derivative(limit: float, u: Tensor) -> Tensor:
    return (u.abs() <= limit).to(u.dtype)


def _clamped_silu(name: str, limit: float) -> Activation:
    return _clamped(name, limit, _silu, _silu_derivative)


def _clamped_swiglu(name: str, alpha: float, limit: float) -> Activation:
    """phi(z) = z sigmoid(alpha z), psi(u) = 1 + u, clamped: that of gpt-oss."""
    return _clamped(name, limit, partial(_swish, alpha), partial(_swish_derivative, beta=alpha), shift=1.0)


@dataclass(frozen=True)
class _Family:
    """Activations that differ in a few numbers."""

    make: Callable[..., Activation]
    parameters: frozenset[str]


_CLAMPED = {
    "clamped_silu": _Family(_clamped_silu, frozenset({"limit"})),
    "clamped_swiglu": _Family(_clamped_swiglu, frozenset({"alpha", "limit"})),
}

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
