"""Step 3 of the decode block, first half: what skipping a candidate would cost, in units of the output.

A new score is one function here and one entry in SCORES.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert
# nb blocks of a rotated row, r rank in use; n tokens of one expert

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.activations import Activation
from mreader.errors import UsageError
from mreader.formats.codes import Code
from mreader.kernels.screen import Estimates, tokens_by_expert


@dataclass(frozen=True)
class Candidates:
    """Everything that a score may look at.

    estimates:  ghat, vhat and the energies of (Rx)_b
    ids:        (N, K) int - routed experts; anything outside 0..E-1 is a slot that no expert serves
    weights:    (N, K) float32 - routing weights w_e, which may be negative
    scales:     (E, 2, nb, I) float16 - s_b of gate and up rows
    errors:     (E, 2, nb, I) bfloat16 - rho_b of gate and up rows
    down_norms: (E, I) float16 - ||d_j||
    coeffs:     (E, I, r) float16 - b_j, the rank in use only; r = 0 is a reader without recovery
    code:       the levels, and what they leave of a Gaussian block
    activation: phi and psi, phi' and psi'
    """

    estimates: Estimates
    ids: Tensor
    weights: Tensor
    scales: Tensor
    errors: Tensor
    down_norms: Tensor
    coeffs: Tensor
    code: Code
    activation: Activation


@dataclass(frozen=True)
class Score:
    """One way to rank candidates. `reads_errors`: whether the stored rho is read, which a budget has to count."""

    name: str
    reads_errors: bool
    function: Callable[[Candidates], Tensor]


def get_score(name: str) -> Score:
    """The score of that name. Raises UsageError for an unknown one, listing those that are known."""
    if name not in SCORES:
        raise UsageError(f"unknown score {name!r}", f"known: {', '.join(SCORES)}")
    return SCORES[name]


def score(candidates: Candidates, name: str) -> Tensor:
    """s_j of every candidate; -inf in the slots that no expert serves.

    returns: (N, K, I) float32

    Raises UsageError for an unknown score.
    """
    experts = candidates.down_norms.shape[0]
    served = (candidates.ids >= 0) & (candidates.ids < experts)
    return get_score(name).function(candidates).masked_fill(~served.unsqueeze(-1), -torch.inf)


def _norm(candidates: Candidates) -> Tensor:
    """s_j = |w_e| * ||d_j|| * |phi(ghat_j) * psi(vhat_j)|."""
    estimates, down_norms = candidates.estimates, candidates.down_norms
    p = candidates.activation.gated(estimates.gate, estimates.up)
    norms = _by_slot(candidates, lambda expert: down_norms[expert].float())
    return candidates.weights.abs().unsqueeze(-1) * norms * p.abs()


def _rho(candidates: Candidates) -> Tensor:
    """Expected squared error of skipping j, with sg2 = sum_b rho_b(g_j) * ||(Rx)_b||^2 and sv2 likewise."""
    estimates, errors = candidates.estimates, candidates.errors
    energy = estimates.energy_read + estimates.energy_unread
    return _expected_error(candidates, energy, lambda expert: errors[expert].float())


def _variance(candidates: Candidates) -> Tensor:
    """The same, with sg2 = sum_b s_b(g_j)^2 * (noise_read * E_in + noise_unread * E_out).

    After the random rotation a block is nearly Gaussian, so its errors follow from the scale that is read anyway.
    """
    estimates, scales, code = candidates.estimates, candidates.scales, candidates.code
    energy = code.noise_read * estimates.energy_read + code.noise_unread * estimates.energy_unread
    return _expected_error(candidates, energy, lambda expert: scales[expert].float().square())


def _expected_error(candidates: Candidates, energy: Tensor, noise: Callable[[int], Tensor]) -> Tensor:
    """s_j = w_e^2 * (p_j^2 * (||d_j||^2 - ||b_j||^2) + var_j * ||d_j||^2), with

    var_j = (phi' psi)^2 sg2 + (phi psi')^2 sv2 + (phi' psi')^2 sg2 sv2, phi at ghat_j and psi at vhat_j, and
    sg2 = sum_b noise_b(g_j) * energy_b.

    energy:  (N, nb) float32 - of the token's blocks
    noise:   expert -> (2, nb, I) float32 - squared error of each block per unit of energy, gate first
    returns: (N, K, I) float32
    """
    estimates, down_norms, coeffs = candidates.estimates, candidates.down_norms, candidates.coeffs
    activation = candidates.activation
    phi, slope = activation.function(estimates.gate), activation.derivative(estimates.gate)
    psi, up_slope = activation.up_function(estimates.up), activation.up_derivative(estimates.up)
    p = phi * psi
    gate_error, up_error = _squared_errors(candidates, energy, noise)
    down = _by_slot(candidates, lambda expert: down_norms[expert].float().square())
    recovered = _by_slot(candidates, lambda expert: coeffs[expert].float().square().sum(-1))
    up_error = up_slope.square() * up_error
    variance = (slope * psi).square() * gate_error + phi.square() * up_error
    variance = variance + slope.square() * gate_error * up_error
    error: Tensor = p.square() * (down - recovered) + variance * down
    return candidates.weights.square().unsqueeze(-1) * error


def _squared_errors(candidates: Candidates, energy: Tensor, noise: Callable[[int], Tensor]) -> Tensor:
    """sg2 and sv2: (2, N, K, I) float32, zero in the slots that no expert serves."""
    out = energy.new_zeros(2, *candidates.estimates.gate.shape)
    for expert, tokens, slots in tokens_by_expert(candidates.ids, candidates.down_norms.shape[0]):
        out[:, tokens, slots] = energy[tokens] @ noise(expert)
    return out


def _by_slot(candidates: Candidates, rows: Callable[[int], Tensor]) -> Tensor:
    """rows(ids[n, s]) laid out by slot: (N, K, I) float32, zero in the slots that no expert serves."""
    out = torch.zeros_like(candidates.estimates.gate)
    for expert, tokens, slots in tokens_by_expert(candidates.ids, candidates.down_norms.shape[0]):
        out[tokens, slots] = rows(expert)
    return out


SCORES = {
    "norm": Score("norm", reads_errors=False, function=_norm),
    "rho": Score("rho", reads_errors=True, function=_rho),
    "variance": Score("variance", reads_errors=False, function=_variance),
}
