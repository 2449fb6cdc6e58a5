"""phi and phi' on the GPU: the formulas of mreader.activations, chosen at compile time by name."""

# mypy: ignore-errors

import triton
import triton.language as tl

from mreader.errors import UnsupportedError

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
_GELU_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


# The names of mreader.activations -> the kernels' own.
_KINDS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_tanh"), "gelu_tanh"
    ),
    **{name: name for name in ("quick_gelu", "relu", "relu2", "sigmoid", "tanh")},
}


def activation_kind(name: str) -> str:
    """The KIND of `activate` for a name of mreader.activations. UnsupportedError where there is none."""
    if name not in _KINDS:
        raise UnsupportedError(
            f"activation {name!r} has no GPU kernel", "add it to mreader/kernels/activation_kernel.py"
        )
    return _KINDS[name]


@triton.jit
def activate(z, KIND: tl.constexpr):
    """phi(z) and phi'(z) of float32 z; KIND as `activation_kind` says."""
    if KIND == "silu":
        phi, slope = _swish(z, 1.0)
    elif KIND == "quick_gelu":
        phi, slope = _swish(z, 1.702)
    elif KIND == "gelu":
        below = 0.5 * (1 + tl.erf(z * _SQRT_HALF))
        phi, slope = z * below, below + z * _DENSITY * tl.exp(-0.5 * z * z)
    elif KIND == "gelu_tanh":
        t = _tanh((z + z * z * z * _GELU_CUBIC) * _GELU_SLOPE)
        phi = 0.5 * z * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * _GELU_SLOPE * (1 + z * z * _GELU_CUBIC * 3)
    elif KIND == "relu":
        phi, slope = tl.maximum(z, 0.0), tl.where(z > 0, 1.0, 0.0)
    elif KIND == "relu2":
        positive = tl.maximum(z, 0.0)
        phi, slope = positive * positive, 2 * positive
    elif KIND == "sigmoid":
        phi = tl.sigmoid(z)
        slope = phi * (1 - phi)
    else:
        tl.static_assert(KIND == "tanh", "unknown activation")
        phi = _tanh(z)
        slope = 1 - phi * phi
    return phi, slope


@triton.jit
def _swish(z, beta):
    gate = tl.sigmoid(beta * z)
    return z * gate, gate * (1 + beta * z * (1 - gate))


@triton.jit
def _tanh(z):
    return 2 * tl.sigmoid(2 * z) - 1
