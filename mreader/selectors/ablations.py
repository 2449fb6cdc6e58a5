"""The reader with one thing changed at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mreader.formats.augmented import SCORES
from mreader.formats.codes import CODES
from mreader.selectors.jobs import Job, Reader
from mreader.selectors.pairs import Pair, compare_windowwise
from mreader.selectors.runs import Run

COORDINATES = (48, 64, 80, 96, 112, 128)
RANKS = (0, 8, 16, 32, 64)


def ablations(reader: Reader, reads: Sequence[float]) -> Iterator[Job]:
    """At every budget the reader as it is, and then each of its variants, with all else as it was.

    Codes that are not the checkpoint's, rows that are not rotated and maps of another rank are made from the weights.
    """
    for budget in reads:
        asked = Job("reader", "topk", "map" if reader.rank else "none", budget, reader=reader)
        yield asked
        yield replace(asked, keep="topk-expert", variant="k of every expert alike")
        for variant, changed in _variants(reader):
            yield replace(asked, recovery="map" if changed.rank else "none", reader=changed, variant=variant)


def _variants(reader: Reader) -> Iterator[tuple[str, Reader]]:
    yield "rotation off", replace(reader, rotated=False)
    for coordinates in COORDINATES:
        if coordinates != reader.coordinates:
            yield f"{coordinates} coordinates", replace(reader, coordinates=coordinates)
    for rank in RANKS:
        if rank != reader.rank:
            yield f"rank {rank}" if rank else "recovery off", replace(reader, rank=rank, stored=rank or None)
    for score in SCORES:
        if score != reader.score:
            yield f"score {score}", replace(reader, score=score)
    for codes in CODES:
        if codes != reader.codes:
            yield f"{codes} codes", replace(reader, codes=codes)


def ablation_pairs(runs: Sequence[Run]) -> list[Pair]:
    """Every variant beside the reader as it is at the same budget, where both keep to it."""
    as_it_is = {run.budget: run for run in runs if not run.job.variant}
    variants = [run for run in runs if run.job.variant and run.budget in as_it_is]
    pairs = [compare_windowwise(run, as_it_is[run.budget]) for run in variants]
    return [pair for pair in pairs if pair is not None]
