"""The decode block: a routed layer's output from a fraction of its weights. Definition: docs/reader.md.

y = sum over kept j of w_e * a_j * d_j  +  U . sum over skipped j of w_e * p_j * b_j  +  sum over e of w_e * beta_e
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# B block, nb = ceil(H/B) blocks, C = nb*B rotated coordinates, r stored rank

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.activations import Activation
from mreader.errors import UsageError
from mreader.formats.codes import BLOCK, Code
from mreader.kernels.bias import add_down_bias, with_bias
from mreader.kernels.exact import exact
from mreader.kernels.recover import recover
from mreader.kernels.rotate import pick_coordinates, rotate
from mreader.kernels.score import Candidates, get_score, score
from mreader.kernels.screen import screen
from mreader.kernels.select import select


@dataclass(frozen=True)
class ExpertLayer:
    """The tensors of one routed layer of an augmented checkpoint, and how to read them.

    gate_up:    (E, 2, I, H) native dtype - gate first
    down:       (E, I, H) native dtype - transposed: a channel's down weights are one row
    codes:      (E, 2, C, row bytes) uint8 - sketch, coordinate-major
    scales:     (E, 2, nb, I) float16 - of each block
    errors:     (E, 2, nb, I) bfloat16 - mean squared error of each block
    signs:      (H,) int8 - of the rotation
    down_norms: (E, I) float16 - ||d_j||
    basis:      (H, r) float16 - U
    coeffs:     (E, I, r) float16 - b_j = U^T d_j
    gate_up_bias, down_bias: (E, 2, I) and (E, H) native dtype - beta_e is the latter; None where experts have no biases
    """

    gate_up: Tensor
    down: Tensor
    codes: Tensor
    scales: Tensor
    errors: Tensor
    signs: Tensor
    down_norms: Tensor
    basis: Tensor
    coeffs: Tensor
    code: Code
    activation: Activation
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def of(
        cls, gate_up: Tensor, down: Tensor, stored: Mapping[str, Tensor], code: Code, activation: Activation
    ) -> "ExpertLayer":
        """The layer of these weights and, under their names in the format, of the other tensors."""
        return cls(
            gate_up=gate_up,
            down=down,
            codes=stored["sketch_codes"],
            scales=stored["sketch_scales"],
            errors=stored["sketch_errors"],
            signs=stored["sketch_signs"],
            down_norms=stored["down_norms"],
            basis=stored["recovery_basis"],
            coeffs=stored["recovery_coeffs"],
            code=code,
            activation=activation,
            gate_up_bias=stored.get("gate_up_proj_bias"),
            down_bias=stored.get("down_proj_bias"),
        )


@dataclass(frozen=True)
class ReadSettings:
    """How much is read of each token's experts.

    k:           channels read exactly, over all K routed experts together; K*I or more reads all of them
    coordinates: coordinates screened in each block of 128
    score:       how candidates are ranked, a name in mreader.kernels.score.SCORES
    rank:        columns of the recovery map in use, 0 for none

    Raises UsageError for a value out of range or an unknown score.
    """

    k: int
    coordinates: int
    score: str
    rank: int

    def __post_init__(self) -> None:
        get_score(self.score)
        if self.k < 0:
            raise UsageError(f"k is {self.k}, but a number of channels cannot be negative")
        if not 1 <= self.coordinates <= BLOCK:
            raise UsageError(f"{self.coordinates} coordinates a block asked for", f"choose 1 to {BLOCK}")
        if self.rank < 0:
            raise UsageError(f"rank is {self.rank}", "choose 0 (no recovery) up to the rank that is stored")


@torch.no_grad()
def read(x: Tensor, ids: Tensor, weights: Tensor, layer: ExpertLayer, settings: ReadSettings) -> Tensor:
    """y = sum over kept j of w_e * a_j * d_j + U . sum over skipped j of w_e * p_j * b_j + sum over e of w_e * beta_e.

    x:       (N, H) any float - input of the routed experts
    ids:     (N, K) int - routed experts; anything outside 0..E-1 contributes nothing and is never selected
    weights: (N, K) any float - routing weights w_e, which may be negative
    returns: (N, H) dtype of x; the arithmetic is float32, and no gradients flow

    Raises UsageError where the settings ask for a higher rank than is stored.
    """
    basis, coeffs = _recovery(layer, settings.rank)
    served = (ids >= 0) & (ids < layer.down.shape[0])
    weights = torch.where(served, weights.float(), 0.0)

    rx = rotate(x, layer.signs)
    read_coordinates = pick_coordinates(rx, settings.coordinates)
    estimates = screen(rx, read_coordinates, ids, layer.codes, layer.scales, layer.code)
    estimates = with_bias(estimates, ids, layer.gate_up_bias)
    candidates = Candidates(
        estimates, ids, weights, layer.scales, layer.errors, layer.down_norms, coeffs, layer.code, layer.activation
    )
    kept = select(score(candidates, settings.score), settings.k)
    y = exact(x, ids, weights, kept, layer.gate_up, layer.down, layer.activation, layer.gate_up_bias)
    if settings.rank:
        p = layer.activation.gated(estimates.gate, estimates.up)
        y = y + recover(p, ids, weights, kept, basis, coeffs)
    return add_down_bias(y, ids, weights, layer.down_bias).to(x.dtype)


def _recovery(layer: ExpertLayer, rank: int) -> tuple[Tensor, Tensor]:
    """U and b_j, their first `rank` columns only: singular vectors come in order, so a lower rank is a prefix."""
    stored = layer.basis.shape[1]
    if rank > stored:
        raise UsageError(f"rank {rank} asked for, but rank {stored} is stored", f"choose 0 to {stored}")
    return layer.basis[:, :rank], layer.coeffs[..., :rank]
