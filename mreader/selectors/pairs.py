"""Keep rules compared in pairs: a threshold against top-k, window by window."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import stdev
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mreader.selectors.harness import Run


@dataclass(frozen=True)
class Pair:
    """One selector, recovery and budget under two keep rules.

    against:    "topk", at the budget, or "matched", at the reads that the threshold really used
    difference: KL of the threshold less KL of top-k, mean over windows
    error:      its standard error; a window is a cluster of tokens that are not independent
    """

    selector: str
    recovery: str
    budget: float
    against: str
    difference: float
    error: float

    @property
    def verdict(self) -> Literal["win", "tie", "loss"]:
        """Of top-k: beyond two standard errors."""
        if abs(self.difference) <= 2 * self.error:
            return "tie"
        return "win" if self.difference > 0 else "loss"


def keep_pairs(runs: "Sequence[Run]", against: str = "matched") -> list[Pair]:
    """Every threshold run beside its top-k run."""
    others = {(r.job.selector, r.job.recovery, r.budget): r for r in runs if r.keep_name == against and r.kl_windows}
    pairs = []
    for run in runs:
        key = (run.job.selector, run.job.recovery, run.budget)
        if run.keep_name == "threshold" and run.kl_windows and key in others:
            pairs.append(Pair(*key, against, *mean_and_error(run.kl_windows, others[key].kl_windows)))
    return pairs


def mean_and_error(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Mean of the paired differences first - second, and its standard error; infinite for one pair alone."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = sum(differences) / len(differences)
    return mean, stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else float("inf")


@dataclass(frozen=True)
class Count:
    """Wins, ties and losses of top-k against the threshold over some pairs."""

    against: str
    wins: int
    ties: int
    losses: int


def count_verdicts(runs: "Sequence[Run]") -> list[Count]:
    """At the budget, and at the reads that the thresholds really used, where there are such runs."""
    counts = []
    for against in ("topk", "matched"):
        verdicts = [pair.verdict for pair in keep_pairs(runs, against)]
        if verdicts:
            counts.append(Count(against, *(verdicts.count(verdict) for verdict in ("win", "tie", "loss"))))
    return counts
