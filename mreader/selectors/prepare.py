"""A job made ready on every layer: plan, keep rule, recovery map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mreader.selectors.jobs import Job
from mreader.selectors.keep import Calibrating, Keep, Threshold, TopK, TopKPerExpert, pooled_threshold
from mreader.selectors.layers import Layer
from mreader.selectors.plans import Split, make_plan
from mreader.selectors.reads import InfeasibleError, Plan, to_nearest
from mreader.selectors.recovery import Map, fit_map, weight_map
from mreader.selectors.scores import Score, get_score

_POOLED = 1 << 24  # scores that a threshold for all layers is taken from


@dataclass(frozen=True)
class Prepared:
    """A job on one layer."""

    layer: Layer
    score: Score
    plan: Plan
    keep: Keep
    recovery: Map | None


class Preparer:
    """Makes jobs ready to run on these layers, and keeps the splits that several of them walk along."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._splits: dict[tuple[str, int], Split] = {}

    def prepare(self, job: Job) -> list[Prepared]:
        """The job on every layer. InfeasibleError where the budget or the recovery cannot be had."""
        score = get_score(job.selector)
        if job.recovery != "none" and score.estimate == "own":
            raise InfeasibleError(f"{job.selector} has factors of its own for what it skips")
        if job.recovery == "map" and score.estimate == "proportional":
            raise InfeasibleError(f"{job.selector} knows no activation of a skipped channel")
        layers = [layer.sketched_as(job.reader.sketching(layer.sketching)) for layer in self._layers]
        everywhere = self._everywhere(job, score, layers)
        return [self._on_layer(job, score, layer, everywhere) for layer in layers]

    def _everywhere(self, job: Job, score: Score, layers: Sequence[Layer]) -> Keep | None:
        """The keep rule where it is one for all layers."""
        if job.keep == "topk":
            return TopK()
        if job.keep == "topk-expert":
            return TopKPerExpert()
        if score.model_wide:
            plans = [self._plan(job, score, layer) for layer in layers]
            return Threshold({"channels": _one_threshold(score, layers, plans)})
        return None

    def _on_layer(self, job: Job, score: Score, layer: Layer, everywhere: Keep | None) -> Prepared:
        plan = self._plan(job, score, layer)
        keep = everywhere or _calibrate(score, layer, plan)
        return Prepared(layer, score, plan, keep, _recovery(job, score, plan, keep, layer))

    def _plan(self, job: Job, score: Score, layer: Layer) -> Plan:
        split = None
        if score.inputs == "split":
            key = job.selector, layer.ordinal
            if key not in self._splits:
                self._splits[key] = Split(layer, score)
            split = self._splits[key]
        plan = make_plan(score, layer, job.reads, job.reader.plan(job.recovery), split)
        return plan if job.budget is None else to_nearest(layer.shape, job.reads, plan, score.cost)


def _calibrate(score: Score, layer: Layer, plan: Plan) -> Threshold:
    rule = Calibrating()
    rule("channels", score.function(layer.calibrated, layer, plan, rule).scores, plan.k)
    return Threshold(rule.taus)


def _one_threshold(score: Score, layers: Sequence[Layer], plans: Sequence[Plan]) -> float:
    """The one value under which a token keeps k channels, mean over tokens and layers."""
    tokens = max(1, _POOLED // (len(layers) * layers[0].shape.candidates))
    pooled = [
        score.function(layer.calibrated.strided(tokens), layer, plan, TopK()).scores
        for layer, plan in zip(layers, plans, strict=True)
    ]
    return pooled_threshold(torch.cat(pooled), plans[0].k)


def _recovery(job: Job, score: Score, plan: Plan, keep: Keep, layer: Layer) -> Map | None:
    if job.recovery == "none":
        return None
    if job.recovery == "map":
        return weight_map(layer, plan.rank)
    batch = layer.calibrated
    scored = score.function(batch, layer, plan, keep)
    kept = keep("channels", scored.scores, plan.k) & scored.scores.isfinite()
    return fit_map(batch, layer, scored.values, scored.estimates, kept, plan.rank)
