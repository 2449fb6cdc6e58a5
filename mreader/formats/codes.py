"""The few-level codes of a block of rotated weights, by name: what a plan needs to know. coding.py works with them.

I channels of an expert, n channels a byte.
"""

import math
from dataclasses import dataclass

from mreader.errors import UsageError

BLOCK = 128  # coordinates that share a scale
ROW_ALIGNMENT = 32  # bytes: DRAM is read in sectors of this size


def count_blocks(hidden: int) -> int:
    """nb = ceil(H / 128)."""
    return -(-hidden // BLOCK)


@dataclass(frozen=True)
class Code:
    """w ~ s * levels[index], one scale s a block of B weights.

    levels:       the values of a code in units of s, ascending; a code is stored as the index of its level
    per_byte:     channels that share a byte, as digits in base len(levels)
    noise_read:   rho / s^2 of Gaussian weights, rho the mean squared error of a block
    noise_unread: E[w^2] / s^2 of Gaussian weights: the error where the code is not read
    """

    name: str
    levels: tuple[float, ...]
    per_byte: int
    noise_read: float
    noise_unread: float

    @property
    def base(self) -> int:
        return len(self.levels)

    def used_bytes(self, channels: int) -> int:
        """Bytes of a row that hold codes, ceil(I / n)."""
        return math.ceil(channels / self.per_byte)

    def row_bytes(self, channels: int) -> int:
        """Bytes of a stored row: the used ones, rounded up to whole sectors."""
        return math.ceil(self.used_bytes(channels) / ROW_ALIGNMENT) * ROW_ALIGNMENT


TERNARY = Code("ternary", (-1.0, 0.0, 1.0), per_byte=5, noise_read=0.127, noise_unread=0.667)
QUATERNARY = Code("quaternary", (-1.5, -0.5, 0.5, 1.5), per_byte=4, noise_read=0.117, noise_unread=1.012)
CODES: dict[str, Code] = {code.name: code for code in (TERNARY, QUATERNARY)}


def get_code(name: str) -> Code:
    """The code of that name. Raises UsageError that lists the known ones."""
    try:
        return CODES[name]
    except KeyError:
        raise UsageError(f"unknown codes {name!r}", f"choose one of {', '.join(CODES)}") from None
