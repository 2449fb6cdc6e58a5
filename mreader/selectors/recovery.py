"""Recovery: what the skipped channels would have added, from what is known of them and r numbers a channel.

y = U . sum over skipped j of w_e * p_j * b_j
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, r rank

from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.selectors.layers import Batch, Layer, combine


@dataclass(frozen=True)
class Map:
    """basis: (H, r) float - U;  coeffs: (E, I, r) float - b_j."""

    basis: Tensor
    coeffs: Tensor


def weight_map(layer: Layer, rank: int) -> Map:
    """The stored map: U are the top left singular vectors of all down columns, b_j = U^T d_j."""
    sketched = layer.sketched
    return Map(sketched.basis[:, :rank], sketched.coeffs[..., :rank])


def fit_map(batch: Batch, layer: Layer, values: Tensor, estimates: Tensor, kept: Tensor, rank: int) -> Map:
    """The map that calibration tokens ask for: U are the directions that the skipped output mostly has there, and

    b_j = gain_j * U^T d_j, gain_j = sum w^2 a_j p_j / sum w^2 p_j^2 over the tokens that skip j.

    values:    (N, K, I) float32 - a_j
    estimates: (N, K, I) float32 - p_j, or what is proportional to it
    kept:      (N, K, I) bool
    """
    skipped = combine(batch, values.masked_fill(kept, 0.0), lambda expert: layer.down[expert])
    basis = torch.linalg.eigh(skipped.mT @ skipped).eigenvectors[:, -rank:]
    gains = _gains(batch, values, estimates.masked_fill(kept, 0.0), len(layer.down))
    coeffs = torch.stack([down.float() @ basis for down in layer.down])
    return Map(basis, coeffs * gains.unsqueeze(-1))


def recover(batch: Batch, recovery: Map, estimates: Tensor, kept: Tensor) -> Tensor:
    """U . sum over skipped j of w_e * p_j * b_j: (N, H) float32."""
    folded = combine(batch, estimates.masked_fill(kept, 0.0), lambda expert: recovery.coeffs[expert])
    return folded @ recovery.basis.float().mT


def _gains(batch: Batch, values: Tensor, estimates: Tensor, experts: int) -> Tensor:
    """(E, I): least squares through the origin; 0 for channels that no token skips."""
    weighted = estimates * batch.weights.square().unsqueeze(-1)
    gains = values.new_zeros(experts, values.shape[-1])
    for expert, tokens, slots in batch.routes:
        p, wp, a = (part[tokens, slots] for part in (estimates, weighted, values))
        gains[expert] = (wp * a).sum(0) / (wp * p).sum(0).clamp_min(1e-30)
    return gains
