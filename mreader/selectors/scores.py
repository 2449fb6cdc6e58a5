"""Scores: what each method thinks a channel is worth, what it computes on the way, and what that costs.

A new score is one function here, one entry in SCORES and one test.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mreader.errors import UsageError
from mreader.kernels.rotate import pick_coordinates
from mreader.kernels.score import Candidates
from mreader.kernels.score import score as score_candidates
from mreader.kernels.screen import screen
from mreader.selectors import reads
from mreader.selectors.keep import Keep
from mreader.selectors.layers import Batch, Factors, Layer, Rounded, by_slot, exact, project
from mreader.selectors.reads import CostOf, Plan

# What a score knows of a channel that is skipped: its activation; something that a gain makes into one, which takes
# calibration data; or what its own factors take care of.
Estimate = Literal["activation", "proportional", "own"]
Inputs = Literal["all", "split", "proxy", "even"]


@dataclass(frozen=True)
class Scored:
    """Of every candidate of every token, (N, K, I) float32.

    scores:    what is compared; -inf where it cannot be kept
    values:    activation that a kept channel contributes
    estimates: what is known of a skipped one
    units:     (N,) float32 - units of the account that were read before deciding, see reads.Cost
    factors:   (E, I, R) and (E, R, H): the method's own low-rank way for skipped channels, or None
    """

    scores: Tensor
    values: Tensor
    estimates: Tensor
    units: Tensor
    factors: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Score:
    """One method's score.

    inputs:     which share of gate's and up's inputs is read: all, TEAL's greedy split, Prox's rule, or an even share
    calibrated: whether the score itself needs calibration data, whatever the keep rule
    model_wide: whether its threshold is one for all layers
    """

    name: str
    function: Callable[[Batch, Layer, Plan, Keep], Scored]
    cost: CostOf
    estimate: Estimate = "activation"
    inputs: Inputs = "all"
    calibrated: bool = False
    model_wide: bool = False


def get_score(name: str) -> Score:
    """The score of that name. UsageError for an unknown one, listing those that are known."""
    if name not in SCORES:
        raise UsageError(f"unknown selector {name!r}", f"known: {', '.join(SCORES)}")
    return SCORES[name]


def _reader(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """The expected squared error of skipping j, from the sketch (docs/reader.md)."""
    sketched = layer.sketched
    rx = layer.sketching.rotate(batch.x, sketched.signs)
    picked = pick_coordinates(rx, plan.coordinates)
    estimates = screen(rx, picked, batch.ids, sketched.codes, sketched.scales, sketched.code)
    candidates = Candidates(
        estimates,
        batch.ids,
        batch.weights,
        sketched.scales,
        sketched.errors,
        sketched.down_norms,
        sketched.coeffs[..., : plan.rank],
        sketched.code,
        sketched.activation,
    )
    scores = score_candidates(candidates, plan.score)
    return Scored(scores, _activations(batch, layer), layer.activate(estimates.gate, estimates.up), _none(batch))


def _oracle(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |w_e| * ||d_j|| * |a_j|: no method, the ceiling."""
    a = _activations(batch, layer)
    scores = batch.weights.abs().unsqueeze(-1) * by_slot(batch, layer.down_norms) * a.abs()
    return Scored(scores, a, a, _none(batch))


def _gate_first(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |phi(g_j . x)| (CATS; Park et al. with one threshold a model)."""
    gate, up = exact(batch, layer)
    phi = layer.native.activation.function(gate)
    return Scored(phi.abs(), phi * up, phi, _none(batch))


def _chess(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = phi(g_j . x)^2 * E[(v_j . x)^2], the mean over calibration tokens."""
    gate, up = exact(batch, layer)
    phi = layer.native.activation.function(gate)
    return Scored(phi.square() * by_slot(batch, layer.up_energy), phi * up, phi, _none(batch))


def _countdown(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |v_j . x| (M-COUNTDOWN)."""
    gate, up = exact(batch, layer)
    return Scored(up.abs(), layer.activate(gate, up), up, _none(batch))


def _hire(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |a_j| of the channels that a 2-bit copy of gate and up nominates by the same score (HiRE-style)."""
    approximate = _rounded(batch, layer, layer.nominators, batch.x)
    nominated = keep("nominated", approximate.abs(), round(plan.nominated * plan.k))
    a = _activations(batch, layer)
    scores = torch.where(nominated, a.abs(), -torch.inf)
    units = nominated.flatten(1).sum(1).float()
    return Scored(scores, a, torch.where(nominated, a, approximate), units)


def _prox(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |phi(g~_j . x) * (v~_j . x)| from INT4 rows, on the largest inputs."""
    count, _ = plan.inputs(layer.shape.hidden)
    read = keep("gate", batch.x.abs().unsqueeze(1), count)
    p = _rounded(batch, layer, layer.proxies, _seen(batch, read))
    return Scored(p.abs(), _activations(batch, layer), p, layer.shape.routed * _counted((read, read)))


def _teal(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |a_j|, a_j from the inputs that |x_i| keeps of gate and of up."""
    magnitude = batch.x.abs().unsqueeze(1)
    masks = _input_masks(layer, plan, keep, (magnitude, magnitude))
    a = layer.activate(*(_masked(batch, layer, side, mask) for side, mask in enumerate(masks)))
    return Scored(a.abs(), a, a, layer.shape.routed * _counted(masks))


def _wina(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |a_j| * ||d_j||, a_j from the inputs that |x_i| * ||column i|| keeps of gate and of up."""
    masks = _input_masks(layer, plan, keep, _weighted_inputs(batch, layer))
    a = layer.activate(*(_masked(batch, layer, side, mask) for side, mask in enumerate(masks)))
    return Scored(a.abs() * by_slot(batch, layer.down_norms), a, a, _counted(masks))


def _rsparse(batch: Batch, layer: Layer, plan: Plan, keep: Keep) -> Scored:
    """s_j = |a_j| * ||d_j||; the inputs that |x_i| * ||column i|| drops go through rank-R factors (R-Sparse)."""
    masks = _input_masks(layer, plan, keep, _weighted_inputs(batch, layer))
    factors = layer.factors(plan.factor_rank)
    gate, up = (
        _masked(batch, layer, side, mask) + _low_rank(batch, factors, side, ~mask) for side, mask in enumerate(masks)
    )
    a = layer.activate(gate, up)
    scores = a.abs() * by_slot(batch, layer.down_norms)
    return Scored(scores, a, a, _counted(masks), (factors.left[2], factors.right[2]))


def _activations(batch: Batch, layer: Layer) -> Tensor:
    return layer.activate(*exact(batch, layer))


def _none(batch: Batch) -> Tensor:
    return batch.x.new_zeros(len(batch.x))


def _rounded(batch: Batch, layer: Layer, rounded: Rounded, x: Tensor) -> Tensor:
    """p_j from rounded rows."""
    both = project(batch, x, lambda expert: rounded.rows(expert).flatten(0, 1))
    return layer.activate(both[..., : layer.shape.channels], both[..., layer.shape.channels :])


def _weighted_inputs(batch: Batch, layer: Layer) -> tuple[Tensor, Tensor]:
    """|x_i| * ||column i|| of gate and of up: (N, K, H) each."""
    magnitude = batch.x.abs().unsqueeze(1)
    return magnitude * layer.input_norms[batch.ids, 0], magnitude * layer.input_norms[batch.ids, 1]


def _input_masks(layer: Layer, plan: Plan, keep: Keep, scores: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The inputs that are read of gate and of up, (N, 1 or K, H) bool each."""
    gate, up = plan.inputs(layer.shape.hidden)
    slots = scores[0].shape[1]
    return keep("gate", scores[0], slots * gate), keep("up", scores[1], slots * up)


def _masked(batch: Batch, layer: Layer, side: int, mask: Tensor) -> Tensor:
    """g_j . x (side 0) or v_j . x (1) over the inputs of the mask: (N, K, I)."""
    return project(batch, _seen(batch, mask), lambda expert: layer.gate_up[expert, side])


def _low_rank(batch: Batch, factors: Factors, side: int, mask: Tensor) -> Tensor:
    """The same by low-rank factors."""
    inner = project(batch, _seen(batch, mask), lambda expert: factors.right[side][expert])
    return project(batch, inner, lambda expert: factors.left[side][expert])


def _seen(batch: Batch, mask: Tensor) -> Tensor:
    """(N, H) where all slots read the same inputs, else (N, K, H)."""
    return batch.x * mask.squeeze(1) if mask.shape[1] == 1 else batch.x.unsqueeze(1) * mask


def _counted(masks: tuple[Tensor, Tensor]) -> Tensor:
    """Inputs read by one token, over its slots and both matrices."""
    return torch.stack([mask.flatten(1).sum(1) for mask in masks]).sum(0).float()


SCORES = {
    score.name: score
    for score in (
        Score("reader", _reader, reads.reader_cost),
        Score("prox", _prox, reads.proxy_cost, inputs="proxy"),
        Score("hire", _hire, reads.nominating_cost),
        Score("teal", _teal, reads.inputs_cost, inputs="split"),
        Score("wina", _wina, reads.weighted_inputs_cost, inputs="split"),
        Score("rsparse", _rsparse, reads.low_rank_cost, "own", inputs="even"),
        Score("cats", _gate_first, reads.gate_first_cost, "proportional"),
        Score("park", _gate_first, reads.gate_first_cost, "proportional", model_wide=True),
        Score("chess", _chess, reads.gate_first_cost, "proportional", calibrated=True),
        Score("m-countdown", _countdown, reads.gate_first_cost, "proportional"),
        Score("oracle", _oracle, reads.free_cost),
    )
}
