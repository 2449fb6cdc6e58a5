"""What a job did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mreader.selectors.jobs import MATCHED, Job
from mreader.selectors.scores import get_score


@dataclass(frozen=True)
class Run:
    """What a job did. Figures are None where the budget is infeasible, and `note` says why.

    kl, top1, nll_dense, nll: as mreader.evaluate.Evaluation
    reads:       fraction of the dense reads that a token really read, mean over tokens and layers
    k:           channels kept, mean over tokens and layers
    kl_windows, reads_windows:                   KL in nats a token, and reads, of each window
    reads_layers, kept_layers, reads_positions:  means by layer, and of reads by position in the window
    """

    job: Job
    kl: float | None = None
    top1: float | None = None
    nll_dense: float | None = None
    nll: float | None = None
    reads: float | None = None
    k: int | None = None
    note: str = ""
    kl_windows: tuple[float, ...] = ()
    reads_windows: tuple[float, ...] = ()
    reads_layers: tuple[float, ...] = ()
    kept_layers: tuple[float, ...] = ()
    reads_positions: tuple[float, ...] = ()

    @property
    def budget(self) -> float:
        """The budget that the job belongs to."""
        return self.job.reads if self.job.budget is None else self.job.budget

    @property
    def keep_name(self) -> str:
        """The keep rule; "matched" for top-k at the reads that a threshold really used."""
        return self.job.keep if self.job.budget is None else MATCHED

    @property
    def ranking(self) -> str:
        """What ranks the channels: the reader's score, or the function of another selector."""
        score = get_score(self.job.selector)
        return self.job.reader.score if score.name == "reader" else score.function.__name__.strip("_")

    def reads_of_quarter(self, number: int) -> float | None:
        """Mean reads of the positions in one quarter of the window, 0 to 3."""
        length = len(self.reads_positions)
        part = self.reads_positions[number * length // 4 : (number + 1) * length // 4]
        return sum(part) / len(part) if part else None

    def row(self) -> dict[str, Any]:
        """As `mreader compare --json` prints it; the keys of `mreader eval --json` are among them."""
        return {
            "selector": self.job.selector,
            "variant": self.job.variant,
            "score": self.ranking,
            "keep": self.keep_name,
            "recovery": self.job.recovery,
            "reads_asked": self.job.reads,
            "reads_used": self.reads,
            "reads_first_quarter": self.reads_of_quarter(0),
            "reads_last_quarter": self.reads_of_quarter(3),
            "k": self.k,
            "kl": self.kl,
            "top1": self.top1,
            "nll_dense": self.nll_dense,
            "nll": self.nll,
            "reads": self.reads,
            "note": self.note,
        }


def matched(run: Run) -> Job | None:
    """Top-k at the reads that a threshold really used; None for what is no threshold, or has used none."""
    job = run.job
    if job.keep != "threshold" or run.reads is None:
        return None
    return Job(job.selector, "topk", job.recovery, run.reads, job.reads, job.reader)
