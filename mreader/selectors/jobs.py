"""What is to be run: one selector at one budget, all that changes its figures in one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mreader.errors import UsageError
from mreader.formats.augmented import DEFAULT_OPTIONS
from mreader.formats.codes import get_code
from mreader.reader import ReadSettings
from mreader.selectors.reads import Plan
from mreader.selectors.scores import get_score
from mreader.selectors.sketching import Sketching

KEEPS = ("topk", "topk-expert", "threshold")
MATCHED = "matched"  # top-k at the reads that a threshold really used
RECOVERIES = ("none", "map", "fitted")


@dataclass(frozen=True)
class Reader:
    """The reader but for its budget; other selectors take the rank of their recovery map from it.

    coordinates, score, rank: as mreader.reader.ReadSettings
    codes:   of the sketch
    stored:  rank that the map is stored with; None is the checkpoint's own, or `rank` where that is higher
    rotated: whether rows and tokens are rotated before they are coded

    A sketch that the checkpoint does not hold is made from its native weights.

    Raises UsageError for a value out of range.
    """

    coordinates: int = DEFAULT_OPTIONS.coordinates
    score: str = DEFAULT_OPTIONS.score
    rank: int = DEFAULT_OPTIONS.rank
    codes: str = DEFAULT_OPTIONS.codes
    stored: int | None = None
    rotated: bool = True

    def __post_init__(self) -> None:
        ReadSettings(0, self.coordinates, self.score, self.rank)
        get_code(self.codes)

    def sketching(self, own: Sketching) -> Sketching:
        """How a layer is sketched for it whose checkpoint has, or would get, the sketch `own`."""
        rank = max(self.rank, own.rank) if self.stored is None else self.stored
        return replace(own, codes=self.codes, rank=rank, rotated=self.rotated)

    def plan(self, recovery: str) -> Plan:
        """Its part of a plan; what is not recovered reads no map."""
        return Plan(coordinates=self.coordinates, score=self.score, rank=0 if recovery == "none" else self.rank)


@dataclass(frozen=True)
class Job:
    """One selector at one budget.

    reads:   fraction of the dense reads asked for
    budget:  what a threshold asked for, where `reads` is what it really used and this job is to match
    variant: what is different from the reader as it is, in words
    """

    selector: str
    keep: str
    recovery: str
    reads: float
    budget: float | None = None
    reader: Reader = Reader()
    variant: str = ""

    def __post_init__(self) -> None:
        get_score(self.selector)
        for name, value, known in (("keep rule", self.keep, KEEPS), ("recovery", self.recovery, RECOVERIES)):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}", f"known: {', '.join(known)}")

    @property
    def needs_calibration(self) -> bool:
        score = get_score(self.selector)
        return score.calibrated or score.inputs == "split" or self.keep == "threshold" or self.recovery == "fitted"
