"""What a read costs, in the 32-byte sectors that DRAM is charged in, and how many channels a budget buys.

reads = sectors touched / sectors of the K routed experts' gate, up and down weights.
"""

# K routed experts of a token, H hidden size, I channels of an expert, B block, nb = ceil(H/B) blocks, r stored rank

import math
from collections.abc import Callable
from dataclasses import dataclass

from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions
from mreader.formats.codes import Code, count_blocks
from mreader.kernels.score import get_score
from mreader.reader import ReadSettings

SECTOR = 32

# Of a channel: the reads that count_reads printed for a k have to buy that k again, whatever the last bit of a float.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Layout:
    """How a runtime stores the sketch of an expert of I channels.

    code_runs:       (code, I) -> bytes of each run that holds one coordinate's gate and up codes
    stored_channels: I -> channels that a block's scales are stored for
    norm_bytes:      of a channel: ||d_j||, and what belongs to it
    """

    name: str
    code_runs: Callable[[Code, int], tuple[int, ...]]
    stored_channels: Callable[[int], int]
    norm_bytes: int


def _disk_runs(code: Code, channels: int) -> tuple[int, ...]:
    return (code.row_bytes(channels),) * 2


def _as_they_are(channels: int) -> int:
    return channels


DISK = Layout("disk", _disk_runs, _as_they_are, norm_bytes=2)


@dataclass(frozen=True)
class BlockShape:
    """One routed layer as a token sees it.

    hidden:       H
    channels:     I
    routed:       K
    rank:         r, the stored rank of the recovery map
    code:         the sketch's code
    element_size: bytes of a native weight
    layout:       how the running device stores the codes
    biased:       whether experts have biases, all of which are read in any case
    """

    hidden: int
    channels: int
    routed: int
    rank: int
    code: Code
    element_size: int = 2
    layout: Layout = DISK
    biased: bool = False

    @property
    def candidates(self) -> int:
        """K*I."""
        return self.routed * self.channels

    @property
    def native_sectors(self) -> float:
        """Sectors of the K experts' gate, up and down matrices and biases, each a run: what a dense decode reads."""
        return self.matrix_sectors + self.bias_sectors

    @property
    def matrix_sectors(self) -> float:
        matrix = self.channels * self.hidden * self.element_size
        return 3 * self.routed * _run_sectors(matrix, matrix)

    @property
    def bias_sectors(self) -> float:
        runs = (2 * self.channels * self.element_size, self.hidden * self.element_size) if self.biased else ()
        return self.routed * sum(_run_sectors(run, run) for run in runs)

    @property
    def native_bytes(self) -> int:
        """Bytes of a dense read: the K experts' weights in whole sectors."""
        return round(SECTOR * self.native_sectors)

    @property
    def channel_sectors(self) -> float:
        """Sectors of one kept channel: a row each of gate, up and transposed down."""
        row = self.hidden * self.element_size
        return 3 * _run_sectors(row, row)


@dataclass(frozen=True)
class Reads:
    """Reads of one token in one layer, by part, as fractions of the dense read; `bytes` is the sum of their sectors."""

    sketch: float
    exact: float
    recovery: float
    bytes: int

    @property
    def total(self) -> float:
        return self.sketch + self.exact + self.recovery


@dataclass(frozen=True)
class Budget:
    """How much to read, as a user says it: `channels` or `reads`, never both.

    channels:    fraction of the K*I candidates, or None
    reads:       fraction of the dense reads, or None
    coordinates: screened in each block
    score:       a name in mreader.kernels.score.SCORES
    rank:        columns of the recovery map in use

    Raises UsageError for a value of another kind; whether it is in range, a layer decides: `resolve`.
    """

    channels: float | None
    reads: float | None
    coordinates: int
    score: str
    rank: int

    def __post_init__(self) -> None:
        for name in ("channels", "reads"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise UsageError(f"{name} is {value!r}", "give a fraction above 0, up to 1")
        for name in ("coordinates", "rank"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name} is {value!r}", "give a whole number")
        if not isinstance(self.score, str):
            raise UsageError(f"score is {self.score!r}", "give the name of a score")

    @classmethod
    def of(cls, options: FormatOptions) -> "Budget":
        """The default of a checkpoint."""
        return cls(options.channels, None, options.coordinates, options.score, options.rank)

    def change(
        self,
        *,
        channels: float | None = None,
        reads: float | None = None,
        coordinates: int | None = None,
        score: str | None = None,
        rank: int | None = None,
    ) -> "Budget":
        """This budget with what is given in place of what it says. UsageError for both of channels and reads."""
        if channels is not None and reads is not None:
            raise UsageError("both channels and reads are given", "give one of them: each sets the budget alone")
        if channels is None and reads is None:
            channels, reads = self.channels, self.reads
        return Budget(
            channels,
            reads,
            self.coordinates if coordinates is None else coordinates,
            self.score if score is None else score,
            self.rank if rank is None else rank,
        )

    def resolve(self, shape: BlockShape) -> ReadSettings:
        """The settings that this budget means for a layer. UsageError for a value out of range."""
        _check_rank(shape, self.rank)
        if self.reads is not None:
            k = reads_to_k(shape, self.reads, self.coordinates, self.score, self.rank)
        else:
            k = channels_to_k(shape, self.channels or 0.0)
        return ReadSettings(k, self.coordinates, self.score, self.rank)


def count_reads(shape: BlockShape, k: int, coordinates: int, score: str, rank: int) -> Reads:
    """Sectors that a token touches in one layer over those of a dense read, by part.

    k:           channels read exactly, over all K experts
    coordinates: codes read in each block
    score:       only `rho` reads the stored errors
    rank:        columns of the recovery map in use; 0 reads none of it

    Raises UsageError for an unknown score or a rank above the stored one.
    """
    native = shape.native_sectors
    sketch, recovery = _sketch_sectors(shape, coordinates, score), _recovery_sectors(shape, rank)
    # Rows that are no whole sectors share some with their neighbours; all rows together are the matrices, not more.
    exact = min(k * shape.channel_sectors, shape.matrix_sectors) + shape.bias_sectors
    return Reads(sketch / native, exact / native, recovery / native, round(SECTOR * (sketch + exact + recovery)))


def channels_to_k(shape: BlockShape, channels: float) -> int:
    """k = round(channels * K * I), kept within 0..K*I.

    Raises UsageError unless 0 < channels <= 1.
    """
    _check_fraction(channels, "channels")
    return min(max(round(channels * shape.candidates), 0), shape.candidates)


def reads_to_k(shape: BlockShape, reads: float, coordinates: int, score: str, rank: int) -> int:
    """The largest k <= K*I whose counted reads do not exceed `reads`.

    Raises UsageError unless 0 < reads <= 1, and for a budget that sketch and recovery alone exceed, naming the least.
    """
    _check_fraction(reads, "reads")
    fixed = _sketch_sectors(shape, coordinates, score) + _recovery_sectors(shape, rank) + shape.bias_sectors
    room = (reads * shape.native_sectors - fixed) / shape.channel_sectors
    if room < -_ROUNDING:
        least = _percent_up(fixed / shape.native_sectors)
        raise UsageError(
            f"reads of {100 * reads:.4g} % are less than sketch and recovery alone need here",
            f"the least possible is {least} %; fewer coordinates or a lower rank need less",
        )
    return min(max(math.floor(room + _ROUNDING), 0), shape.candidates)


def _sketch_sectors(shape: BlockShape, coordinates: int, score: str) -> float:
    blocks = count_blocks(shape.hidden)
    runs = shape.layout.code_runs(shape.code, shape.channels)
    block_values = 2 * blocks * shape.layout.stored_channels(shape.channels)
    of_blocks = 2 * _run_sectors(block_values, block_values) * (2 if get_score(score).reads_errors else 1)
    norms = shape.layout.norm_bytes * shape.channels
    codes = blocks * coordinates * sum(_run_sectors(run, run) for run in runs)
    return shape.routed * (codes + of_blocks + _run_sectors(norms, norms))


def _recovery_sectors(shape: BlockShape, rank: int) -> float:
    _check_rank(shape, rank)
    if rank == 0:
        return 0.0
    coeffs = _table_sectors(shape.channels, 2 * rank, 2 * shape.rank)
    return shape.routed * coeffs + _table_sectors(shape.hidden, 2 * rank, 2 * shape.rank)


def _run_sectors(length: int, stride: int) -> float:
    """(length + 32 - gcd(stride, 32)) / 32: sectors of a run of bytes at any multiple of its stride, on average."""
    return (length + SECTOR - math.gcd(stride, SECTOR)) / SECTOR


def _table_sectors(rows: int, length: int, stride: int) -> float:
    """Distinct sectors touched by the first `length` bytes of every row of a table of `rows` rows of `stride` bytes."""
    if length == stride:
        return _run_sectors(rows * stride, rows * stride)
    period = SECTOR // math.gcd(stride, SECTOR)
    starts = [row * stride for row in range(period)]
    touched = {sector for start in starts for sector in range(start // SECTOR, (start + length - 1) // SECTOR + 1)}
    return rows * len(touched) / period


def _check_rank(shape: BlockShape, rank: int) -> None:
    if rank > shape.rank:
        raise UsageError(f"rank {rank} asked for, but rank {shape.rank} is stored", f"choose 0 to {shape.rank}")


def _check_fraction(value: float, name: str) -> None:
    if not 0 < value <= 1:
        raise UsageError(f"{name} of {value:g} asked for", "give a fraction above 0, up to 1")


def _percent_up(fraction: float) -> str:
    """Two decimals, rounded up, so that the printed budget is really enough."""
    return f"{math.ceil(fraction * 1e4 - 1e-9) / 100:.2f}"
