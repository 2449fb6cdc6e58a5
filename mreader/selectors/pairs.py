"""Runs compared in pairs, window by window: a threshold against top-k, a variant against the reader as it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import fmean, stdev
from typing import Literal

from mreader.selectors.jobs import MATCHED
from mreader.selectors.runs import Run


@dataclass(frozen=True)
class Pair:
    """A run, and another one on the same windows.

    difference: KL of the run less KL of the other, mean over windows
    error:      its standard error; a window is a cluster of tokens that are not independent
    """

    run: Run
    other: Run
    difference: float
    error: float

    @property
    def verdict(self) -> Literal["win", "tie", "loss"]:
        """Of the other: beyond two standard errors."""
        if abs(self.difference) <= 2 * self.error:
            return "tie"
        return "win" if self.difference > 0 else "loss"


def compare_windowwise(run: Run, other: Run) -> Pair | None:
    """The two as a pair; None where one of them is infeasible."""
    if not run.kl_windows or not other.kl_windows:
        return None
    differences = [a - b for a, b in zip(run.kl_windows, other.kl_windows, strict=True)]
    return Pair(run, other, *mean_and_error(differences))


def keep_pairs(runs: Sequence[Run], against: str = MATCHED) -> list[Pair]:
    """Every threshold run beside its top-k run.

    against: "topk", at the budget, or "matched", at the reads that the threshold really used
    """
    others = {_asked(run): run for run in runs if run.keep_name == against}
    found = [
        compare_windowwise(run, others[_asked(run)])
        for run in runs
        if run.keep_name == "threshold" and _asked(run) in others
    ]
    return [pair for pair in found if pair is not None]


def _asked(run: Run) -> object:
    """The job but for its keep rule."""
    return replace(run.job, keep="topk", reads=run.budget, budget=None)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; infinite for one value alone."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")


@dataclass(frozen=True)
class Count:
    """Wins, ties and losses of top-k against the threshold over some pairs."""

    against: str
    wins: int
    ties: int
    losses: int


def count_verdicts(runs: Sequence[Run]) -> list[Count]:
    """At the budget, and at the reads that the thresholds really used, where there are such runs of several windows."""
    counts = []
    for against in ("topk", MATCHED):
        verdicts = [pair.verdict for pair in keep_pairs(runs, against) if isfinite(pair.error)]
        if verdicts:
            counts.append(Count(against, *(verdicts.count(verdict) for verdict in ("win", "tie", "loss"))))
    return counts
