"""Many selectors at many budgets: which, on which tokens, in one run."""

# N windows, T tokens of a window

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from mreader.errors import UsageError
from mreader.evaluate import cut_windows, read_ids, refuse_unknown_tokens
from mreader.formats.augmented import DEFAULT_OPTIONS, is_augmented, open_augmented
from mreader.progress import Progress
from mreader.selectors.harness import Harness
from mreader.selectors.jobs import KEEPS, MATCHED, RECOVERIES, Job, Reader
from mreader.selectors.ledger import Ledger
from mreader.selectors.runs import Run, matched
from mreader.selectors.scores import SCORES, get_score
from mreader.selectors.subject import Texts, open_subject


@dataclass(frozen=True)
class Grid:
    """Every selector x keep rule x recovery x budget. Recoveries that a selector has no use for are left out."""

    selectors: tuple[str, ...]
    keeps: tuple[str, ...]
    recoveries: tuple[str, ...]
    reads: tuple[float, ...]

    @classmethod
    def of(cls, selectors: str, keeps: str, recoveries: str, reads: tuple[float, ...]) -> Grid:
        """Of lists as a command line gives them. UsageError for a name that is not known."""
        every = tuple(SCORES) if selectors == "all" else _names(selectors, "selector", tuple(SCORES))
        return cls(
            every,
            _names(keeps, "keep rule", (*KEEPS, MATCHED)),
            _names(recoveries, "recovery", RECOVERIES),
            reads,
        )

    def jobs(self, reader: Reader) -> Iterator[Job]:
        """All but the matched ones, which follow from what the thresholds use; those of a selector stand together."""
        rules = [keep for keep in KEEPS if keep in self.keeps or (keep == "threshold" and MATCHED in self.keeps)]
        for selector in self.selectors:
            for recovery in self._recoveries(selector):
                for budget in self.reads:
                    yield from (Job(selector, keep, recovery, budget, reader=reader) for keep in rules)

    def _recoveries(self, selector: str) -> Sequence[str]:
        estimate = get_score(selector).estimate
        useful = {"activation": RECOVERIES, "proportional": ("none", "fitted"), "own": ("none",)}[estimate]
        return [recovery for recovery in self.recoveries if recovery in useful]


def _names(given: str, what: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}", f"known: {', '.join(known)}")
    return names


def parse_reads(given: str) -> tuple[float, ...]:
    """Budgets like "0.25,0.3". UsageError for what is no fraction."""
    try:
        reads = tuple(dict.fromkeys(float(part) for part in given.split(",")))
    except ValueError as error:
        raise UsageError(f"--reads {given} is no list of numbers", "like 0.25,0.30,0.40") from error
    for budget in reads:
        if not 0 < budget <= 1:
            raise UsageError(f"reads of {budget:g} asked for", "give fractions above 0, up to 1")
    return reads


def read_texts(
    model: Path, given: Path, calibration: Path | None, windows: tuple[int, int], calibration_windows: int
) -> Texts:
    """Windows to evaluate, and windows to calibrate on: of another file, or the last ones of the same.

    windows: how many, and the tokens of each
    """
    count, length = windows
    ids = read_ids(given, model)
    evaluated = cut_windows(ids, count, length)
    rest = ids[count * length :] if calibration is None else read_ids(calibration, model)
    if calibration is None:
        rest = rest[-calibration_windows * length :] if calibration_windows > 0 else rest
    return Texts(evaluated, cut_windows(rest, calibration_windows, length))


def reader_of(
    model: Path, coordinates: int | None, score: str | None, rank: int | None, codes: str | None = None
) -> Reader:
    """The reader but for its budget; what is None is the checkpoint's own, or a conversion's default."""
    own = open_augmented(model).options if is_augmented(model) else DEFAULT_OPTIONS
    return Reader(
        own.coordinates if coordinates is None else coordinates,
        own.score if score is None else score,
        own.rank if rank is None else rank,
        own.codes if codes is None else codes,
    )


def open_harness(model: Path, texts: Texts, dtype: str, device: str, progress: Progress) -> Harness:
    """The model in a folder, calibrated where there is a text for it. Raises what opening the model raises."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # one bar is enough
    subject = open_subject(model, dtype, device)
    if texts.calibration is not None:
        refuse_unknown_tokens(subject.model, texts.calibration)
        with torch.inference_mode():
            subject = subject.calibrated(texts.calibration)
    return Harness(subject, texts.evaluated, progress)


def run_all(
    harness: Callable[[], Harness],
    texts: Texts,
    jobs: Sequence[Job],
    keeps: Sequence[str],
    ledger: Ledger,
    progress: Progress,
) -> list[Run]:
    """Every job that the ledger does not hold, each followed by its matched one where `keeps` has that.

    harness: opens the model; it is not asked where the ledger holds everything

    Returns the runs whose keep rule is one of `keeps`.
    """
    opened = cache(harness)
    follow = MATCHED in keeps
    count = len(jobs) + (sum(job.keep == "threshold" for job in jobs) if follow else 0)
    progress.begin("evaluating", count * texts.evaluated.numel(), "tokens")

    def run(job: Job) -> Run:
        found = ledger.find(job)
        if found is not None:
            progress.advance(texts.evaluated.numel())
            return found
        done = opened().run(job)
        ledger.add(done)
        return done

    runs = []
    for job in jobs:
        runs.append(run(job))
        if follow and job.keep == "threshold":
            other = matched(runs[-1])
            runs += [run(other)] if other is not None else []
    return [run for run in runs if run.keep_name in keeps]
