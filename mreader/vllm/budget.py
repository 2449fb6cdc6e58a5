"""The budget that a server reads by, from what its user says."""

from collections.abc import Mapping
from typing import Any

from mreader.budget import Budget
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions

READS = "MREADER_READS"
DENSE = "dense"
_KEYS = ("channels", "reads", "coordinates", "score", "rank")


def choose_budget(options: FormatOptions, environment: Mapping[str, str], override: Any) -> Budget | None:
    """The checkpoint's budget, changed by MREADER_READS and then by the override; None for dense.

    environment: MREADER_READS is a fraction of the dense reads, or `dense`
    override:    the same as a number or string, or a table of channels, reads, coordinates, score and rank; or None

    Raises UsageError for anything else.
    """
    budget: Budget | None = Budget.of(options)
    for where, said in ((READS, environment.get(READS)), ("mreader in hf_overrides", override)):
        if said is not None and said != "":
            budget = _changed(Budget.of(options) if budget is None else budget, said, where)
    return budget


def _changed(budget: Budget, said: Any, where: str) -> Budget | None:
    if said == DENSE:
        return None
    if isinstance(said, Mapping):
        unknown = next((key for key in said if key not in _KEYS), None)
        if unknown is not None:
            raise UsageError(f"{where} has a key {unknown!r}", f"known: {', '.join(_KEYS)}")
        return budget.change(**said)
    try:
        reads = float(said)
    except (TypeError, ValueError):
        raise UsageError(f"{where} is {said!r}", "give a fraction of the dense reads, like 0.178, or dense") from None
    return budget.change(reads=reads)
