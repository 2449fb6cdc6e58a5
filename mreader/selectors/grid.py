"""Many selectors at many budgets: which, on which tokens, in one run."""

# N windows, T tokens of a window

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from mreader.errors import UsageError
from mreader.evaluate import cut_windows, read_ids, refuse_unknown_tokens
from mreader.formats.augmented import DEFAULT_OPTIONS, FormatOptions
from mreader.progress import Progress
from mreader.reader import ReadSettings
from mreader.selectors.harness import KEEPS, MATCHED, RECOVERIES, Job, Run, matched, run_jobs
from mreader.selectors.reads import Plan
from mreader.selectors.scores import SCORES, get_score
from mreader.selectors.subject import Subject, open_subject


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

    def jobs(self) -> Iterator[Job]:
        """All but the matched ones, which follow from what the thresholds use."""
        rules = [keep for keep in KEEPS if keep in self.keeps or (keep == "threshold" and MATCHED in self.keeps)]
        for budget in self.reads:
            for selector in self.selectors:
                for keep in rules:
                    yield from (Job(selector, keep, recovery, budget) for recovery in self._recoveries(selector))

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
        reads = tuple(float(part) for part in given.split(","))
    except ValueError as error:
        raise UsageError(f"--reads {given} is no list of numbers", "like 0.25,0.30,0.40") from error
    for budget in reads:
        if not 0 < budget <= 1:
            raise UsageError(f"reads of {budget:g} asked for", "give fractions above 0, up to 1")
    return reads


def split_tokens(
    model: Path, given: Path, calibration: Path | None, windows: tuple[int, int], calibration_windows: int
) -> tuple[Tensor, Tensor]:
    """Windows to evaluate, and windows to calibrate on: of another file, or the last ones of the same.

    windows: how many, and the tokens of each
    """
    count, length = windows
    ids = read_ids(given, model)
    evaluated = cut_windows(ids, count, length)
    rest = ids[count * length :] if calibration is None else read_ids(calibration, model)
    if calibration is None:
        rest = rest[-calibration_windows * length :] if calibration_windows > 0 else rest
    return evaluated, cut_windows(rest, calibration_windows, length)


def reader_plan(coordinates: int | None, score: str | None, rank: int | None) -> Plan:
    """The reader's settings but for its budget; None is a conversion's default. Raises what ReadSettings raises."""
    default = DEFAULT_OPTIONS
    settings = ReadSettings(
        0,
        default.coordinates if coordinates is None else coordinates,
        default.score if score is None else score,
        default.rank if rank is None else rank,
    )
    return Plan(coordinates=settings.coordinates, score=settings.score, rank=settings.rank)


def sketch_options(codes: str | None, rank: int | None) -> FormatOptions | None:
    """How to sketch a source where the default will not do: other codes, or a recovery map of a higher rank."""
    if codes is None and (rank is None or rank <= DEFAULT_OPTIONS.rank):
        return None
    return replace(DEFAULT_OPTIONS, codes=codes or DEFAULT_OPTIONS.codes, rank=max(rank or 0, DEFAULT_OPTIONS.rank))


def quiet_loading() -> None:
    """One bar is enough."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()


def evaluate_job(
    model: Path,
    job: Job,
    windows: Tensor,
    calibration: Tensor | None,
    base: Plan,
    dtype: str,
    device: str,
    progress: Progress,
    options: FormatOptions | None = None,
) -> Run:
    """One job. UsageError where it is infeasible."""
    subject = _open(model, calibration, dtype, device, options, progress)
    (run,) = run_jobs(subject, windows, [job], base, progress)
    if run.kl is None:
        raise UsageError(run.note, "give another budget, or another recovery")
    return run


def _open(
    model: Path, calibration: Tensor | None, dtype: str, device: str, options: FormatOptions | None, progress: Progress
) -> Subject:
    subject = open_subject(model, dtype, device, options, progress)
    if calibration is None:
        return subject
    refuse_unknown_tokens(subject.model, calibration)
    with torch.inference_mode():
        return subject.calibrated(calibration)


def run_grid(
    model: Path,
    grid: Grid,
    windows: Tensor,
    calibration: Tensor,
    base: Plan,
    dtype: str,
    device: str,
    progress: Progress,
    options: FormatOptions | None = None,
) -> list[Run]:
    """Every job of the grid, and then the matched ones.

    options: how a source is sketched, None as a conversion does by default
    """
    subject = _open(model, calibration, dtype, device, options, progress)
    runs = run_jobs(subject, windows, list(grid.jobs()), base, progress)
    if MATCHED in grid.keeps:
        runs += run_jobs(subject, windows, matched(runs), base, progress)
    return [run for run in runs if run.keep_name in grid.keeps]
