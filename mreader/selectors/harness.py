"""Selectors on a model: each is prepared once, then every token goes through the dense model and all of them."""

# N windows, T tokens of a window, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mreader.errors import UsageError
from mreader.evaluate import compare_windows, refuse_unknown_tokens, window_batches
from mreader.progress import Progress
from mreader.selectors.keep import Calibrating, Keep, Threshold, TopK, TopKPerExpert, pooled_threshold
from mreader.selectors.layers import Batch, Layer
from mreader.selectors.plans import Split, make_plan, run_block
from mreader.selectors.reads import InfeasibleError, Plan, to_nearest
from mreader.selectors.recovery import Map, fit_map, weight_map
from mreader.selectors.scores import Score, get_score
from mreader.selectors.subject import Forward, Subject

KEEPS = ("topk", "topk-expert", "threshold")
MATCHED = "matched"  # top-k at the reads that a threshold really used
RECOVERIES = ("none", "map", "fitted")
_POOLED = 1 << 24  # scores that a threshold for all layers is taken from


@dataclass(frozen=True)
class Job:
    """One selector at one budget.

    reads:  fraction of the dense reads asked for
    budget: what a threshold asked for, where `reads` is what it really used and this job is to match
    """

    selector: str
    keep: str
    recovery: str
    reads: float
    budget: float | None = None

    def __post_init__(self) -> None:
        get_score(self.selector)
        for name, value, known in (("keep rule", self.keep, KEEPS), ("recovery", self.recovery, RECOVERIES)):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}", f"known: {', '.join(known)}")

    @property
    def needs_calibration(self) -> bool:
        score = get_score(self.selector)
        return score.calibrated or score.inputs == "split" or self.keep == "threshold" or self.recovery == "fitted"


@dataclass(frozen=True)
class Prepared:
    """A job on one layer."""

    score: Score
    plan: Plan
    keep: Keep
    recovery: Map | None


@dataclass(frozen=True)
class Run:
    """What a job did. Figures are None where the budget is infeasible, and `note` says why.

    kl, top1, nll_dense, nll: as mreader.evaluate.Evaluation
    reads:       fraction of the dense reads that a token really read, mean over tokens and layers
    k:           channels kept, mean over tokens and layers
    kl_windows:  KL of each window, nats a token
    reads_layers, kept_layers, reads_positions: means by layer, and of reads by position in the window
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

    def row(self) -> dict[str, Any]:
        """As `mreader compare --json` prints it; the keys of `mreader eval --json` are among them."""
        score = get_score(self.job.selector)
        return {
            "selector": self.job.selector,
            "score": score.function.__name__.strip("_"),
            "keep": self.keep_name,
            "recovery": self.job.recovery,
            "reads_asked": self.job.reads,
            "reads_used": self.reads,
            "k": self.k,
            "kl": self.kl,
            "top1": self.top1,
            "nll_dense": self.nll_dense,
            "nll": self.nll,
            "reads": self.reads,
            "note": self.note,
        }


class Preparer:
    """Makes jobs ready to run, and keeps what several of them share."""

    def __init__(self, subject: Subject, base: Plan) -> None:
        self._subject, self._base = subject, base
        self._splits: dict[tuple[str, int], Split] = {}

    def prepare(self, job: Job) -> list[Prepared]:
        """The job on every layer. InfeasibleError where the budget or the recovery cannot be had."""
        score = get_score(job.selector)
        if job.recovery != "none" and score.estimate == "own":
            raise InfeasibleError(f"{job.selector} has factors of its own for what it skips")
        if job.recovery == "map" and score.estimate == "proportional":
            raise InfeasibleError(f"{job.selector} knows no activation of a skipped channel")
        plans = [self._plan(job, score, number, layer) for number, layer in enumerate(self._subject.layers)]
        keeps = self._keeps(job, score, plans)
        return [
            Prepared(score, plan, keep, _recovery(job, score, plan, keep, layer))
            for layer, plan, keep in zip(self._subject.layers, plans, keeps, strict=True)
        ]

    def _plan(self, job: Job, score: Score, number: int, layer: Layer) -> Plan:
        base = Plan(coordinates=self._base.coordinates, score=self._base.score)
        if job.recovery != "none":
            base = Plan(coordinates=base.coordinates, score=base.score, rank=self._base.rank)
        split = None
        if score.inputs == "split":
            split = self._splits.setdefault((job.selector, number), Split(layer, score))
        plan = make_plan(score, layer, job.reads, base, split)
        return plan if job.budget is None else to_nearest(layer.shape, job.reads, plan, score.cost)

    def _keeps(self, job: Job, score: Score, plans: list[Plan]) -> list[Keep]:
        layers = self._subject.layers
        if job.keep == "topk":
            return [TopK()] * len(layers)
        if job.keep == "topk-expert":
            return [TopKPerExpert()] * len(layers)
        if score.model_wide:
            return [Threshold({"channels": _one_threshold(score, layers, plans)})] * len(layers)
        return [_calibrate(score, layer, plan) for layer, plan in zip(layers, plans, strict=True)]


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


class _Tally:
    """Sums of one job over windows."""

    def __init__(self, layers: Sequence[Layer], length: int) -> None:
        self._native = layers[0].shape.native_sectors
        self._windows: list[Tensor] = []
        self._sectors = torch.zeros(len(layers), length, dtype=torch.float64)
        self._kept = torch.zeros(len(layers), dtype=torch.float64)
        self._tokens = 0

    def forwards(self, layers: Sequence[Layer], prepared: Sequence[Prepared]) -> list[Forward]:
        return [self._forward(i, *pair) for i, pair in enumerate(zip(layers, prepared, strict=True))]

    def _forward(self, number: int, layer: Layer, prepared: Prepared) -> Forward:
        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            batch = Batch(x.float(), ids, weights.float())
            widest = max(layer.shape.hidden, layer.shape.channels)
            outputs = [
                run_block(part, layer, prepared.score, prepared.plan, prepared.keep, prepared.recovery)
                for part in batch.parts(widest)
            ]
            length = self._sectors.shape[1]
            sectors = torch.cat([output.sectors for output in outputs])
            self._sectors[number] += sectors.view(-1, length).sum(0).double().cpu()
            self._kept[number] += float(sum(output.kept.sum() for output in outputs))
            return torch.cat([output.y for output in outputs]).to(x.dtype)

        return forward

    def add(self, windows: Tensor) -> None:
        """windows: (N, 4) - of each window, the sums that `compare_windows` makes."""
        self._windows.append(windows)
        self._tokens += len(windows) * self._sectors.shape[1]

    def run(self, job: Job) -> Run:
        windows = torch.cat(self._windows)
        count, length = len(windows), self._sectors.shape[1]
        kl, agreed, nll_dense, nll = windows.sum(0).tolist()
        reads, kept = self._sectors / count / self._native, self._kept / self._tokens
        return Run(
            job,
            kl / self._tokens,
            agreed / self._tokens,
            nll_dense / (count * (length - 1)),
            nll / (count * (length - 1)),
            float(reads.mean()),
            round(float(kept.mean())),
            "",
            tuple((windows[:, 0] / length).tolist()),
            tuple(reads.mean(1).tolist()),
            tuple(kept.tolist()),
            tuple(reads.mean(0).tolist()),
        )


@torch.inference_mode()
def run_jobs(
    subject: Subject, windows: Tensor, jobs: Sequence[Job], base: Plan, progress: Progress | None = None
) -> list[Run]:
    """Every job over all windows, in the order given; the dense logits are computed once a batch of windows.

    windows: (N, T) int64
    base:    coordinates, score and rank of the reader, and the rank of recovery maps
    """
    progress = progress or Progress()
    refuse_unknown_tokens(subject.model, windows)
    preparer = Preparer(subject, base)
    notes: dict[Job, str] = {}
    prepared: dict[Job, list[Prepared]] = {}
    progress.begin("preparing", len(jobs), "selectors")
    for job in jobs:
        try:
            prepared[job] = preparer.prepare(job)
        except InfeasibleError as error:
            notes[job] = f"{error.cause}: {error.remedy}" if error.remedy else error.cause
        progress.advance(1)
    tallies = {job: _Tally(subject.layers, windows.shape[1]) for job in prepared}
    progress.begin("evaluating", windows.numel() * len(prepared), "tokens")
    for batch in window_batches(windows):
        for job, sums in _compare_batch(subject, batch.to(subject.model.device), prepared, tallies):
            tallies[job].add(sums)
            progress.advance(batch.numel())
    return [tallies[job].run(job) if job in tallies else Run(job, note=notes[job]) for job in jobs]


def _compare_batch(
    subject: Subject, ids: Tensor, prepared: dict[Job, list[Prepared]], tallies: dict[Job, _Tally]
) -> Iterator[tuple[Job, Tensor]]:
    dense = subject.logits(ids)
    for job, layers in prepared.items():
        with subject.experts(tallies[job].forwards(subject.layers, layers)):
            sparse = subject.logits(ids)
        yield job, compare_windows(dense, sparse, ids)


def matched(runs: Sequence[Run]) -> list[Job]:
    """For every threshold run, top-k at the reads that the threshold really used."""
    return [
        Job(run.job.selector, "topk", run.job.recovery, run.reads, run.job.reads)
        for run in runs
        if run.job.keep == "threshold" and run.reads is not None
    ]
