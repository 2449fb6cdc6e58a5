"""Few-level codes of a block of rotated weights, and their bytes on disk."""

# B coordinates of a block, I channels of an expert, n channels a byte

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mreader.errors import UnsupportedError, UsageError

BLOCK = 128  # coordinates that share a scale
ROW_ALIGNMENT = 32  # bytes: DRAM is read in sectors of this size


def count_blocks(hidden: int) -> int:
    """nb = ceil(H / 128)."""
    return -(-hidden // BLOCK)


Fit = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

# The best threshold in units of sum w^2 / sum |w|: 0.488 for a Gaussian, within 5 % of that for Laplace and uniform,
# and the same with any share of zeros.
_TERNARY_START = 0.49
# Gaussian blocks leave 0.19 +- 0.02 of their energy as error, so few of them are above this; heavy tails are.
_TERNARY_HARD = 0.27
_QUATERNARY_STEPS = 4


@dataclass(frozen=True)
class Code:
    """w ~ s * levels[index], one scale s a block of B weights.

    levels:       the values of a code in units of s, ascending; a code is stored as the index of its level
    per_byte:     channels that share a byte, as digits in base len(levels)
    noise_read:   rho / s^2 of Gaussian weights, rho the mean squared error of a block
    noise_unread: E[w^2] / s^2 of Gaussian weights: the error where the code is not read
    fit:          (..., B) float32 -> indices (..., B) uint8, scales (...,) float16, errors rho (...,) bfloat16
    """

    name: str
    levels: tuple[float, ...]
    per_byte: int
    noise_read: float
    noise_unread: float
    fit: Fit = field(repr=False, compare=False)

    @property
    def base(self) -> int:
        return len(self.levels)

    def used_bytes(self, channels: int) -> int:
        """Bytes of a row that hold codes, ceil(I / n)."""
        return math.ceil(channels / self.per_byte)

    def row_bytes(self, channels: int) -> int:
        """Bytes of a stored row: the used ones, rounded up to whole sectors."""
        return math.ceil(self.used_bytes(channels) / ROW_ALIGNMENT) * ROW_ALIGNMENT


def fit_ternary(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """c = sign(w) where |w| > t, else 0;  s = mean of those |w|;  rho = mean (w - s c)^2 with s as stored.

    The best code maximises (sum of the kept |w|)^2 / (number kept). A closed-form t and one Lloyd step (t = s / 2) are
    within 0.04 % of the least error on average over Gaussian blocks; only the blocks where the error stays large, those
    of a few heavy weights, are sorted for the exact optimum.

    weights: (..., B) float32 - any strides; fastest on a CPU where B is the slow axis in memory
    indices: (..., B) uint8 - 0, 1, 2 for -1, 0, 1; the weights' strides
    scales:  (...,) float16 - s; 0 for a block of zeros and where s is less than half of FP16's least number
    errors:  (...,) bfloat16 - rho
    A NaN or infinite weight makes the error of its block NaN. Raises UnsupportedError where s exceeds FP16.
    Source: formats/SPEC.md, Sketch; Lloyd, "Least squares quantization in PCM", 1982.
    """
    magnitude = weights.abs()
    kept = torch.empty_like(magnitude)
    work = torch.empty_like(magnitude)
    energy = torch.mul(magnitude, magnitude, out=work).sum(-1)
    threshold = energy / magnitude.sum(-1).clamp_min_(torch.finfo(torch.float32).tiny) * _TERNARY_START
    total, count = _keep(magnitude, threshold, kept, work)
    threshold = total / count * 0.5
    total, count = _keep(magnitude, threshold, kept, work)
    scale = total / count
    hard = total * scale < (1 - _TERNARY_HARD) * energy
    if bool(hard.any()):
        chosen = magnitude[hard]
        exact = _best_ternary_scale(chosen) * 0.5
        mask = (chosen > exact.unsqueeze(-1)).float()
        threshold[hard] = exact
        kept[hard] = mask
        scale[hard] = (mask * chosen).sum(-1) / mask.sum(-1).clamp_min_(1.0)
    scales = _stored_scales(scale, energy, magnitude)
    errors = _mean_square(torch.mul(kept, scales.float().unsqueeze(-1), out=work).sub_(magnitude))
    border = threshold.unsqueeze(-1)
    torch.ge(weights, -border, out=kept)
    indices = kept.add_(torch.gt(weights, border, out=work)).to(torch.uint8)
    return indices, scales, errors


def fit_quaternary(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    scales = _stored_scales(scale, energy, magnitude)
    stored = scales.float().unsqueeze(-1)
    torch.gt(magnitude, stored, out=kept)
    errors = _mean_square(torch.mul(kept.add_(0.5), stored, out=work).sub_(magnitude))
    torch.ge(weights, -stored, out=kept)
    kept.add_(torch.ge(weights, 0.0, out=work))
    indices = kept.add_(torch.gt(weights, stored, out=work)).to(torch.uint8)
    return indices, scales, errors


def _keep(magnitude: Tensor, threshold: Tensor, kept: Tensor, work: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number (at least 1) of the magnitudes above a threshold; `kept` becomes their mask in float32."""
    # A float32 mask through out= runs four times as fast on a CPU as a boolean one and its product.
    torch.gt(magnitude, threshold.unsqueeze(-1), out=kept)
    total = torch.mul(kept, magnitude, out=work).sum(-1)
    return total, kept.sum(-1).clamp_min_(1.0)


def _best_ternary_scale(magnitude: Tensor) -> Tensor:
    """Mean of the m largest magnitudes, with the m that maximises (their sum)^2 / m. (n, B) -> (n,)"""
    sums = magnitude.sort(-1, descending=True).values.cumsum(-1)
    means = sums / torch.arange(1, sums.shape[-1] + 1, device=sums.device)
    best = (sums * means).argmax(-1, keepdim=True)
    return means.gather(-1, best).squeeze(-1)


def _stored_scales(scale: Tensor, energy: Tensor, magnitude: Tensor) -> Tensor:
    stored = scale.to(torch.float16)
    # One sum instead of two isfinite: any infinity or NaN shows in it, and finite scales keep it far below overflow.
    total = float(torch.sum(stored, dtype=torch.float32) + energy.sum())
    # Weights that are not finite are the caller's to name: it knows the tensor, the expert and the row.
    if not math.isfinite(total) and bool(torch.isfinite(magnitude).all()):
        raise UnsupportedError(
            f"a block of weights up to {float(magnitude.max()):.3g} has a scale beyond FP16 (65504)",
            "check the checkpoint: trained weights are far smaller",
        )
    return stored


def _mean_square(error: Tensor) -> Tensor:
    return error.square_().mean(-1).to(torch.bfloat16)


TERNARY = Code("ternary", (-1.0, 0.0, 1.0), per_byte=5, noise_read=0.127, noise_unread=0.667, fit=fit_ternary)
QUATERNARY = Code(
    "quaternary", (-1.5, -0.5, 0.5, 1.5), per_byte=4, noise_read=0.117, noise_unread=1.012, fit=fit_quaternary
)
CODES: dict[str, Code] = {code.name: code for code in (TERNARY, QUATERNARY)}


def get_code(name: str) -> Code:
    """The code of that name. Raises UsageError that lists the known ones."""
    try:
        return CODES[name]
    except KeyError:
        raise UsageError(f"unknown codes {name!r}", f"choose one of {', '.join(CODES)}") from None


def pack_used(indices: Tensor, code: Code) -> Tensor:
    """byte_b = sum over i of indices[n b + i] * base^i, missing channels as digit 0.

    indices: (..., I) uint8 - level indices
    returns: (..., ceil(I / n)) uint8 - the used bytes of each row, without padding
    """
    missing = -indices.shape[-1] % code.per_byte
    padded = torch.nn.functional.pad(indices, (0, missing)) if missing else indices
    digits = padded.reshape(*padded.shape[:-1], -1, code.per_byte).unbind(-1)
    packed: Tensor = digits[0].clone(memory_format=torch.contiguous_format)
    for place, digit in enumerate(digits[1:], start=1):
        packed.add_(digit, alpha=code.base**place)
    return packed


def pack(indices: Tensor, code: Code) -> Tensor:
    """byte_b = sum over i of indices[n b + i] * base^i; zeros up to the row's stored length.

    indices: (..., I) uint8 - level indices
    returns: (..., row_bytes) uint8
    """
    used = pack_used(indices, code)
    return torch.nn.functional.pad(used, (0, code.row_bytes(indices.shape[-1]) - used.shape[-1]))


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
