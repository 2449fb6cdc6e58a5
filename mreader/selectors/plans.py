"""How a budget is split: between reading to decide and reading what is kept, and between gate, up and down."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from mreader.selectors.keep import Keep, TopK
from mreader.selectors.layers import Batch, Layer, combine, exact
from mreader.selectors.reads import Plan, fit_channels
from mreader.selectors.recovery import Map, recover
from mreader.selectors.scores import Score

Shares = tuple[float, float, float]  # of gate's, up's and down's inputs

_STEP = 0.05  # TEAL's
_SPLIT_TOKENS = 256  # on which the split is searched
_FACTOR_SHARE = 0.25  # of a budget that goes into low-rank factors
_PROX_START, _PROX_LEAST = 0.3, 0.3  # share of channels that Prox begins with, least share of inputs


@dataclass(frozen=True)
class Output:
    """Of every token of a batch: y (N, H), sectors (N,), channels kept (N,)."""

    y: Tensor
    sectors: Tensor
    kept: Tensor


def run_block(batch: Batch, layer: Layer, score: Score, plan: Plan, keep: Keep, recovery: Map | None) -> Output:
    """y = sum over kept j of w_e * a_j * d_j, and what recovery makes of the others."""
    scored = score.function(batch, layer, plan, keep)
    kept = keep("channels", scored.scores, plan.k) & scored.scores.isfinite()
    y = combine(batch, scored.values.masked_fill(~kept, 0.0), lambda expert: layer.down[expert])
    if recovery is not None:
        y = y + recover(batch, recovery, scored.estimates, kept)
    if scored.factors is not None:
        y = y + _through_factors(batch, scored.estimates.masked_fill(kept, 0.0), *scored.factors)
    cost, count = score.cost(layer.shape, plan), kept.sum((1, 2)).float()
    return Output(y, cost.fixed + cost.unit * scored.units + cost.channel * count, count)


def _through_factors(batch: Batch, values: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return combine(batch, values, lambda expert: left[expert] @ right[expert])


class Split:
    """TEAL's split of a layer: the shares of gate, up and down, each step lowering the one that costs the output least.

    One path serves every budget: it is walked as far as the lowest one asked for.
    """

    def __init__(self, layer: Layer, score: Score) -> None:
        self._layer, self._score = layer, score
        self._steps = self._walk()
        self._path = [next(self._steps)]

    def at(self, reads: float, base: Plan) -> Plan:
        """The plan whose reads meet the budget, between two steps of the path."""
        total = reads * self._layer.shape.native_sectors
        while self._sectors(self._path[-1], base) > total:
            after = next(self._steps, None)
            if after is None:
                break
            self._path.append(after)
        at = next((i for i, step in enumerate(self._path) if self._sectors(step, base) <= total), len(self._path) - 1)
        low, high = self._path[at], self._path[max(at - 1, 0)]
        spent, more = self._sectors(low, base), self._sectors(high, base)
        t = (total - spent) / (more - spent) if more > spent else 0.0
        gate, up = (low[i] + max(min(t, 1.0), 0.0) * (high[i] - low[i]) for i in (0, 1))
        return replace(base, gate=gate, up=up)

    def _plan(self, shares: Shares, base: Plan) -> Plan:
        gate, up, down = shares
        return replace(base, gate=gate, up=up, k=round(down * self._layer.shape.candidates))

    def _sectors(self, shares: Shares, base: Plan) -> float:
        plan = self._plan(shares, base)
        return self._score.cost(self._layer.shape, plan).sectors(plan.k)

    def _walk(self) -> Iterator[Shares]:
        batch, layer = self._layer.calibrated.strided(_SPLIT_TOKENS), self._layer
        dense = combine(batch, layer.activate(*exact(batch, layer)), lambda expert: layer.down[expert])
        keep = _SameTokens()

        def error(shares: Shares) -> float:
            output = run_block(batch, layer, self._score, self._plan(shares, Plan()), keep, None)
            return float((output.y - dense).square().sum())

        shares = (1.0, 1.0, 1.0)
        yield shares
        while lowered := _lowered(shares):
            shares = min(lowered, key=error)
            yield shares


class _SameTokens:
    """TopK for tokens that stay the same: of their inputs, the last two masks of each stage are remembered.

    One step of a path asks for the inputs of its shares and of the shares a step lower, each twice or more.
    """

    def __init__(self) -> None:
        self._masks: dict[str, dict[int, Tensor]] = {}

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor:
        if stage == "channels":  # their scores follow from the inputs that were kept
            return TopK()(stage, scores, count)
        masks = self._masks.setdefault(stage, {})
        if count in masks:
            masks[count] = masks.pop(count)  # last: asked for just now
        else:
            while len(masks) > 1:
                del masks[next(iter(masks))]
            masks[count] = TopK()(stage, scores, count)
        return masks[count]


def _lowered(shares: Shares) -> list[Shares]:
    """One of the shares a step lower, and none at nothing."""
    gate, up, down = (round(share - _STEP, 2) for share in shares)
    steps = [(gate, *shares[1:]), (shares[0], up, shares[2]), (*shares[:2], down)]
    return [step for step in steps if min(step) > 0]


def make_plan(score: Score, layer: Layer, reads: float, base: Plan, split: Split | None) -> Plan:
    """How the score spends `reads` of the dense reads. InfeasibleError where it cannot keep to that.

    split: TEAL's, for scores that take it
    """
    if score.inputs == "split" and split is not None:
        base = split.at(reads, base)
    elif score.inputs == "proxy":
        share = min(max(1.5 * (3 * reads - 3 * _PROX_START), _PROX_LEAST), 1.0)
        base = replace(base, gate=share, up=share)
    elif score.inputs == "even":
        base = _even(score, layer, reads, base)
    return fit_channels(score.name, layer.shape, reads, base, score.cost)


def _even(score: Score, layer: Layer, reads: float, base: Plan) -> Plan:
    """A quarter of the budget for factors, and the same share of gate's, up's and down's inputs for the rest."""
    shape = layer.shape
    weights = reads * _FACTOR_SHARE * shape.channels * shape.hidden
    base = replace(base, factor_rank=max(1, int(weights / (shape.channels + shape.hidden))))
    nothing = score.cost(shape, replace(base, gate=0.0, up=0.0)).sectors(0)
    everything = score.cost(shape, base).sectors(shape.candidates)
    share = min(max((reads * shape.native_sectors - nothing) / (everything - nothing), 0.0), 1.0)
    return replace(base, gate=share, up=share)
