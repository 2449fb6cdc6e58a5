"""What takes long to make and is wanted again: kept while it fits, made again where it does not."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

LIMIT = 2 << 30  # bytes beside the model, however large that is

T = TypeVar("T")


class Kept:
    """Values by kind and number: of a kind one a layer, for instance.

    limit: bytes of tensors. A kind that does not fit as a whole keeps its first values; for it, the kinds that were not
           asked for longest are dropped. What does not fit stays until another number is asked for.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kinds: dict[Hashable, dict[int, Any]] = {}
        self._bytes: dict[Hashable, int] = {}
        self._passing: dict[tuple[Hashable, int], Any] = {}

    @property
    def nbytes(self) -> int:
        """Of all that is kept."""
        return sum(self._bytes.values())

    def get(self, kind: Hashable, number: int, make: Callable[[], T]) -> T:
        """The value that `make` makes, or made before."""
        self._kinds[kind] = values = self._kinds.pop(kind, {})  # last: asked for just now
        if number in values:
            kept: T = values[number]
            return kept
        if (kind, number) not in self._passing:
            self._add(kind, number, make())
        found: T = values[number] if number in values else self._passing[kind, number]
        return found

    def _add(self, kind: Hashable, number: int, value: Any) -> None:
        size = nbytes_of(value)
        if size <= self._limit:
            self._make_room(kind, size)
        if self.nbytes + size <= self._limit:
            self._kinds[kind][number] = value
            self._bytes[kind] = self._bytes.get(kind, 0) + size
        else:
            self._passing = {key: other for key, other in self._passing.items() if key[1] == number}
            self._passing[kind, number] = value

    def _make_room(self, kind: Hashable, size: int) -> None:
        """Drop other kinds, the one not asked for longest first, until so many bytes fit."""
        for other in [other for other in self._kinds if other != kind]:
            if self.nbytes + size > self._limit:
                del self._kinds[other]
                self._bytes.pop(other, None)


def nbytes_of(value: Any) -> int:
    """Bytes of the tensors in it: in the fields of a dataclass, in a mapping, a list or a tuple."""
    if isinstance(value, Tensor):
        return value.nbytes
    if is_dataclass(value):
        return sum(nbytes_of(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return sum(map(nbytes_of, value.values()))
    return sum(map(nbytes_of, value)) if isinstance(value, list | tuple) else 0
