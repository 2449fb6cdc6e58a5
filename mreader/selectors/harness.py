"""Selectors on a model: every token through the dense model and through one of them, a job at a time."""

# N windows, T tokens of a window, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mreader.continuation import Divergence, compare_continuations
from mreader.evaluate import compare_windows, refuse_unknown_tokens, vocabulary_of, window_batches
from mreader.progress import Progress
from mreader.selectors.jobs import Job
from mreader.selectors.layers import Batch
from mreader.selectors.plans import run_block
from mreader.selectors.prepare import Prepared, Preparer
from mreader.selectors.reads import InfeasibleError
from mreader.selectors.runs import Run
from mreader.selectors.subject import Forward, Subject, windows_sha256


class Meter:
    """The blocks of a job, and what they read.

    sectors, kept: of each layer, (calls) tensors of (tokens,) float32
    """

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self.sectors: list[list[Tensor]] = [[] for _ in prepared]
        self.kept: list[list[Tensor]] = [[] for _ in prepared]
        self.forwards = [self._forward(number, part) for number, part in enumerate(prepared)]

    def _forward(self, number: int, prepared: Prepared) -> Forward:
        layer = prepared.layer
        widest = max(layer.shape.hidden, layer.shape.channels)

        def forward(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            outputs = [
                run_block(part, layer, prepared.score, prepared.plan, prepared.keep, prepared.recovery)
                for part in Batch(x.float(), ids, weights.float()).parts(widest)
            ]
            self.sectors[number] += [output.sectors.cpu() for output in outputs]
            self.kept[number] += [output.kept.cpu() for output in outputs]
            return torch.cat([output.y for output in outputs]).to(x.dtype)

        return forward

    def take(self) -> tuple[Tensor, Tensor]:
        """Sectors and channels kept of every token since the last time, (layers, tokens) float32 each."""
        taken = [torch.stack([torch.cat(calls) for calls in layers]) for layers in (self.sectors, self.kept)]
        for layers in (self.sectors, self.kept):
            for calls in layers:
                calls.clear()
        return taken[0], taken[1]


class _Tally:
    """Sums of one job over windows."""

    def __init__(self) -> None:
        self._windows: list[Tensor] = []  # (N, 4) sums that compare_windows makes
        self._reads: list[Tensor] = []  # (N, T), mean over layers
        self._layers: list[Tensor] = []  # (2, layers) of a batch, sums of reads and of channels kept

    def add(self, windows: Tensor, reads: Tensor, kept: Tensor) -> None:
        """windows: (N, 4); reads, kept: (layers, N * T), of one batch of windows."""
        self._windows.append(windows)
        self._reads.append(reads.double().mean(0).view(len(windows), -1))
        self._layers.append(torch.stack([reads.double().sum(1), kept.double().sum(1)]))

    def run(self, job: Job) -> Run:
        windows, reads = torch.cat(self._windows), torch.cat(self._reads)
        (count, length), tokens = reads.shape, reads.numel()
        layers = torch.stack(self._layers).sum(0) / tokens
        kl, agreed, nll_dense, nll = windows.sum(0).tolist()
        return Run(
            job,
            kl=kl / tokens,
            top1=agreed / tokens,
            nll_dense=nll_dense / (count * (length - 1)),
            nll=nll / (count * (length - 1)),
            reads=float(reads.mean()),
            k=round(float(layers[1].mean())),
            kl_windows=tuple((windows[:, 0] / length).tolist()),
            reads_windows=tuple(reads.mean(1).tolist()),
            reads_layers=tuple(layers[0].tolist()),
            kept_layers=tuple(layers[1].tolist()),
            reads_positions=tuple(reads.mean(0).tolist()),
        )


class Harness:
    """Runs jobs on a model and some windows.

    windows: (N, T) int64

    Raises UsageError for token ids outside the vocabulary.
    """

    def __init__(self, subject: Subject, windows: Tensor, progress: Progress | None = None) -> None:
        refuse_unknown_tokens(subject.model, windows)
        self.windows = windows
        self._dense_logits = ("dense logits", windows.shape, windows_sha256(windows))
        self._subject = subject
        self._preparer = Preparer(subject.layers)
        self._progress = progress or Progress()

    @torch.inference_mode()
    def run(self, job: Job) -> Run:
        """The job over all windows, or why it is infeasible."""
        try:
            prepared = self._preparer.prepare(job)
        except InfeasibleError as error:
            self._progress.advance(self.windows.numel())
            return Run(job, note=f"{error.cause}: {error.remedy}" if error.remedy else error.cause)
        meter, tally, native = Meter(prepared), _Tally(), self._subject.layers[0].shape.native_sectors
        for number, ids in enumerate(window_batches(self.windows, vocabulary_of(self._subject.model))):
            dense = self._subject.kept.get(self._dense_logits, number, partial(self._subject.logits, ids))
            with self._subject.experts(meter.forwards):
                sparse = self._subject.logits(ids)
            sectors, kept = meter.take()
            tally.add(compare_windows(dense, sparse, ids.to(sparse.device)), sectors / native, kept)
            self._progress.advance(ids.numel())
        return tally.run(job)

    @torch.inference_mode()
    def diverge(self, job: Job, tokens: int) -> tuple[Divergence, Run]:
        """What follows every window, by the dense model and with the job in the decode steps.

        Of the run only reads and k are given, of the decode steps. UsageError where the job is infeasible.
        """
        meter = Meter(self._preparer.prepare(job))
        found = compare_continuations(
            self._subject.model,
            self._subject.dense_steps,
            partial(self._subject.decode_steps, meter.forwards),
            self.windows,
            tokens,
            self._progress,
        )
        sectors, kept = meter.take()
        reads = sectors.double() / self._subject.layers[0].shape.native_sectors
        return found, Run(
            job,
            reads=float(reads.mean()),
            k=round(float(kept.mean())),
            reads_layers=tuple(reads.mean(1).tolist()),
            kept_layers=tuple(kept.mean(1).tolist()),
        )
