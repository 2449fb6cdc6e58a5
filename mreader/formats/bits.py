"""Tensors as bits: all that it takes to move weights and to find what is not finite, without torch.

torch takes seconds to import, and a conversion moves nine tenths of what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mreader.errors import SourceError
from mreader.formats.safetensors_file import Header

Bits = NDArray[np.unsignedinteger[Any]]

# All of these bits are set in NaN and infinity, and in no other number.
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}
_AT_ONCE = 1 << 19  # numbers looked at side by side
_TILE = (64, 256)  # rows and columns written, 32 KB of 16 bits: what is read and written of one stays in the cache


class MappedBits(Mapping[str, Bits]):
    """Memory-mapped tensors by name, as read-only unsigned integers of their item size; a context manager.

    A type with several numbers a byte has one axis of bytes. Pages that were looked at count as resident until the end
    of the block.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Header], where: Mapping[str, str]) -> None:
        self._folder, self._headers, self._where = folder, headers, where
        self._open: dict[str, NDArray[np.uint8]] = {}

    def __enter__(self) -> MappedBits:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def __getitem__(self, name: str) -> Bits:
        file = self._where[name]
        if file not in self._open:
            self._open[file] = np.asarray(np.memmap(self._folder / file, np.uint8, "r"))
        header = self._headers[file]
        spec, begin = header.tensors[name], header.begins[name]
        bits: Bits = self._open[file][begin : begin + spec.nbytes].view(f"u{spec.alignment}")
        return bits.reshape(spec.shape) if spec.is_whole_bytes else bits

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def row_major(bits: Bits) -> Bits:
    """The same numbers, one row after the other in memory. What has its rows elsewhere is copied, tile by tile."""
    if bits.ndim != 2 or bits.flags.c_contiguous:
        return np.ascontiguousarray(bits)
    copy = np.empty_like(bits, order="C")
    rows, columns = _TILE
    for row in range(0, bits.shape[0], rows):
        for column in range(0, bits.shape[1], columns):
            tile = slice(row, row + rows), slice(column, column + columns)
            copy[tile] = bits[tile]
    return copy


def non_finite_row(bits: Bits, dtype: str) -> int | None:
    """The first row (of a vector: element) with NaN or infinity; None for none, and for a type that has neither.

    dtype: safetensors' name of the numbers' type
    """
    if dtype not in _EXPONENT:
        return None
    exponent, flat = bits.dtype.type(_EXPONENT[dtype]), bits.reshape(-1)
    for first in range(0, flat.size, _AT_ONCE):
        exponents = flat[first : first + _AT_ONCE] & exponent
        if exponents.max() == exponent:
            return (first + int(exponents.argmax())) // (bits.shape[-1] if bits.ndim > 1 else 1)
    return None


def refuse_non_finite(name: str, bits: Bits, dtype: str) -> None:
    """SourceError where `non_finite_row` finds one."""
    if (row := non_finite_row(bits, dtype)) is not None:
        raise non_finite(name, f"row {row}")


def non_finite(name: str, where: str) -> SourceError:
    """The error of a tensor that holds NaN or infinity."""
    return SourceError(
        f"{name} holds NaN or infinity ({where})", "the checkpoint is damaged; download it again or ask its author"
    )
