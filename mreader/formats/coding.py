"""Rotated weights to few-level codes and back: the fit of a block, and its bytes on disk."""

# B coordinates of a block, I channels of an expert, n channels a byte

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mreader.errors import UnsupportedError
from mreader.formats.codes import BLOCK, QUATERNARY, TERNARY, Code

Fit = tuple[Tensor, Tensor, Tensor]

# The best border in units of sum w^2 / sum |w|: 0.488 for a Gaussian, within 5 % of that for Laplace and uniform, and
# the same with any share of zeros.
_TERNARY_BORDER = 0.49
# For that border to do, a code must take this share of its block's energy: Gaussian blocks 0.81 +- 0.02, so few of them
# are below; heavy tails are. Above, rho as a difference of energies would be inexact in float32.
_TERNARY_SHARE = (0.73, 0.99)
_TERNARY_COUNT = 24  # and keep this many weights; a code of fewer gains much from each of them
_QUATERNARY_STEPS = 4


def fit_ternary(weights: Tensor) -> Fit:
    """c = sign(w) where |w| > t, else 0;  s = mean of those |w|;  rho = mean (w - s c)^2 with s as stored.

    The best code maximises (sum of the kept |w|)^2 / (number kept), the energy that it takes from the error. The border
    t = 0.49 sum w^2 / sum |w| is within 0.15 % of the least error on average over Gaussian blocks. Only the blocks that
    are far from Gaussian are sorted for the exact optimum.

    weights: (..., B) float32 - any strides; fastest on a CPU where B is the slow axis in memory
    indices: (..., B) float32 - 0, 1, 2 for -1, 0, 1; the weights' strides
    scales:  (...,) float16 - s; 0 for a block of zeros and where s is less than half of FP16's least number
    errors:  (...,) bfloat16 - rho
    A NaN or infinite weight makes the error of its block NaN or infinite. Raises UnsupportedError where s exceeds FP16.
    Source: formats/SPEC.md, Sketch.
    """
    # A pass over the weights costs more than all that is computed a block, so there are few, over two arrays beside the
    # weights, and all in float32: a mask through out= runs four times as fast on a CPU as a boolean one. A block of
    # zeros makes NaN here, and is hard.
    magnitude = weights.abs()
    work = torch.mul(magnitude, magnitude)
    energy = work.sum(-1)
    border = energy / magnitude.sum(-1) * _TERNARY_BORDER
    kept = torch.gt(magnitude, border.unsqueeze(-1), out=work)
    count = kept.sum(-1)
    total = magnitude.mul_(kept).sum(-1)
    indices = kept.copysign_(weights).add_(1.0)
    scale = total / count
    gain = total * scale
    hard = _hard_blocks(gain / energy, count)
    if hard is None:
        scales = scale.to(torch.float16)
        errors = _ternary_errors(energy - gain, count, scale, scales)
    else:
        chosen = weights[hard]
        codes, scale[hard] = _sort_ternary(chosen)
        indices[hard] = codes + 1.0
        scales = scale.to(torch.float16)
        errors = _ternary_errors(energy - gain, count, scale, scales)
        errors[hard] = (codes * scales[hard].float().unsqueeze(-1) - chosen).square_().mean(-1)
    _refuse_overflow(errors, weights)
    return indices, scales, errors.to(torch.bfloat16)


def fit_quaternary(weights: Tensor) -> Fit:
    """c = sign(w) (1.5 where |w| > s, else 0.5);  s = sum |w| |c| / sum c^2;  rho = mean (w - s c)^2 with s as stored.

    s starts at the block's root mean square and takes four rounds of nearest code and least squares; the codes are
    chosen once more after s was rounded. A zero counts as positive. Shapes, errors: as for the ternary fit.
    Source: formats/SPEC.md, Sketch.
    """
    magnitude = weights.abs()
    kept = torch.empty_like(magnitude)
    work = torch.empty_like(magnitude)
    energy = torch.mul(magnitude, magnitude, out=work).sum(-1)
    half_total = magnitude.sum(-1) * 0.5
    quarter = magnitude.shape[-1] * 0.25
    scale = (energy / magnitude.shape[-1]).sqrt()
    for _ in range(_QUATERNARY_STEPS):
        torch.gt(magnitude, scale.unsqueeze(-1), out=kept)
        count = kept.sum(-1)
        total = torch.mul(kept, magnitude, out=work).sum(-1)
        scale = (half_total + total) / (quarter + 2 * count)
    scales = scale.to(torch.float16)
    stored = scales.float().unsqueeze(-1)
    torch.gt(magnitude, stored, out=kept)
    errors = torch.mul(kept.add_(0.5), stored, out=work).sub_(magnitude).square_().mean(-1)
    _refuse_overflow(errors, weights)
    torch.ge(weights, -stored, out=kept)
    kept.add_(torch.ge(weights, 0.0, out=work))
    indices = kept.add_(torch.gt(weights, stored, out=work))
    return indices, scales, errors.to(torch.bfloat16)


def _hard_blocks(share: Tensor, count: Tensor) -> Tensor | None:
    """Mask of the blocks that the closed-form border does not suit, non-finite ones among them; None for no block."""
    least, most = _TERNARY_SHARE
    lowest, highest = torch.aminmax(share)
    if float(lowest) >= least and float(highest) <= most and float(count.min()) >= _TERNARY_COUNT:
        return None  # NaN would have made every comparison false
    return ~((share >= least) & (share <= most) & (count >= _TERNARY_COUNT))


def _sort_ternary(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The best codes (n, B), float32 of -1, 0, 1, and their scales (n,) of weights (n, B)."""
    magnitude = weights.abs()
    kept = (magnitude > 0.5 * _best_ternary_scale(magnitude).unsqueeze(-1)).float()
    scale = (kept * magnitude).sum(-1) / kept.sum(-1).clamp_min_(1.0)
    return kept.copysign_(weights), scale


def _best_ternary_scale(magnitude: Tensor) -> Tensor:
    """Mean of the m largest magnitudes, with the m that maximises (their sum)^2 / m. (n, B) -> (n,)"""
    sums = magnitude.sort(-1, descending=True).values.cumsum(-1)
    means = sums / torch.arange(1, sums.shape[-1] + 1, device=sums.device)
    best = (sums * means).argmax(-1, keepdim=True)
    return means.gather(-1, best).squeeze(-1)


def _ternary_errors(left: Tensor, count: Tensor, scale: Tensor, stored: Tensor) -> Tensor:
    """rho = (L + m (s' - s)^2) / B in float32: L is left out by the mean s of m kept weights, s' is stored.

    No pass over the weights: the error is least at the mean, and grows from there by m (s' - s)^2.
    """
    return (stored - scale).square_().mul_(count).add_(left).mul_(1 / BLOCK)


def _refuse_overflow(errors: Tensor, weights: Tensor) -> None:
    """UnsupportedError where a scale, or an energy, is infinite although the weights are not."""
    # Weights that are not finite are the caller's to name: it knows the tensor, the expert and the row.
    if not math.isfinite(float(errors.sum())) and bool(torch.isfinite(weights).all()):
        raise UnsupportedError(
            f"a block of weights up to {float(weights.abs().max()):.3g} has a scale beyond FP16 (65504)",
            "check the checkpoint: trained weights are far smaller",
        )


_FITS: dict[str, Callable[[Tensor], Fit]] = {TERNARY.name: fit_ternary, QUATERNARY.name: fit_quaternary}


def fit(weights: Tensor, code: Code) -> Fit:
    """The code, scale and error of every block: what the fit of `code` says.

    weights: (..., B) float32
    returns: indices (..., B) float32, scales (...,) float16, errors rho (...,) bfloat16
    """
    return _FITS[code.name](weights)


def pack_digits(digits: Tensor, code: Code) -> Tensor:
    """byte_b = sum over i of digits[i, b] * base^i.

    digits:  (..., n, b) float32 - level indices: in row i the i-th digits of all bytes
    returns: (..., b) uint8
    """
    first, *others = digits.unbind(-2)
    packed = first.clone(memory_format=torch.contiguous_format)
    for place, digit in enumerate(others, start=1):
        packed.add_(digit, alpha=code.base**place)
    return packed.to(torch.uint8)


def pack(indices: Tensor, code: Code) -> Tensor:
    """byte_b = sum over i of indices[n b + i] * base^i, missing channels as digit 0; zeros up to the stored length.

    indices: (..., I) - level indices
    returns: (..., row_bytes) uint8
    """
    channels = indices.shape[-1]
    padded = torch.nn.functional.pad(indices.float(), (0, -channels % code.per_byte))
    used = pack_digits(padded.reshape(*indices.shape[:-1], -1, code.per_byte).transpose(-1, -2), code)
    return torch.nn.functional.pad(used, (0, code.row_bytes(channels) - used.shape[-1]))


def unpack(packed: Tensor, code: Code, channels: int) -> Tensor:
    """index[n b + i] = byte_b // base^i mod base.

    packed:  (..., row_bytes) uint8 - stored rows (their padding is not looked at)
    returns: (..., I) uint8 - level indices of the `channels` channels
    """
    used = packed[..., : code.used_bytes(channels)]
    digits = [(used // code.base**place) % code.base for place in range(code.per_byte)]
    return torch.stack(digits, -1).flatten(-2)[..., :channels]


def values(indices: Tensor, code: Code) -> Tensor:
    """levels[index] as float32, in the shape of the indices."""
    return torch.tensor(code.levels, device=indices.device)[indices.int()]
