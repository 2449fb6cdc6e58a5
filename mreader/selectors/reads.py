"""What each selector reads, in the 32-byte sectors of the layout that serves it best, and what a budget buys it.

sectors of a token in one layer = fixed + unit * units + channel * kept channels

Inside a row, element by element, nothing is saved: a quarter of a BF16 row's elements touches 99 % of its sectors. So
methods that skip inputs are charged with matrices stored by input coordinate, those that skip channels with
rows.
"""

# K routed experts of a token, H hidden size, I channels of an expert, R rank of low-rank factors, r of a recovery map

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mreader.budget import SECTOR, BlockShape, count_reads
from mreader.errors import UsageError

_ROUNDING = 1e-6  # of a channel, for the last bit of a float
PROXY_BITS = 4
NOMINATION_BITS = 2
_HALF = 2  # bytes of a stored norm, scale or factor


class InfeasibleError(UsageError):
    """What a selector cannot do: keep to a budget, or recover what it knows nothing of."""


@dataclass(frozen=True)
class Plan:
    """How a selector spends its budget.

    k:           channels kept of a token, over all K experts
    gate, up:    share of the input coordinates read of gate and up, where inputs are skipped
    nominated:   channels whose gate and up are read for each one that is kept, where an approximation nominates
    factor_rank: R of low-rank factors that take the skipped inputs
    coordinates: screened in each block of a rotated sketch
    score:       ranking of the sketch, a name in mreader.kernels.score.SCORES
    rank:        columns of the recovery map in use, 0 for none
    """

    k: int = 0
    gate: float = 1.0
    up: float = 1.0
    nominated: float = 2.0
    factor_rank: int = 0
    coordinates: int = 80
    score: str = "variance"
    rank: int = 0

    def inputs(self, hidden: int) -> tuple[int, int]:
        """Input coordinates read of gate and of up."""
        return round(self.gate * hidden), round(self.up * hidden)


@dataclass(frozen=True)
class Cost:
    """Sectors of a token in one layer.

    fixed:   read whatever is skipped
    unit:    one row that a selector reads to decide, or one matrix's row of an input coordinate
    units:   how many of them the plan means
    channel: a kept channel
    """

    fixed: float
    unit: float
    units: float
    channel: float

    @property
    def before(self) -> float:
        """Sectors before the first kept channel."""
        return self.fixed + self.unit * self.units

    def sectors(self, kept: float) -> float:
        return self.before + self.channel * kept


CostOf = Callable[[BlockShape, Plan], Cost]


def run_sectors(length: int, stride: int) -> float:
    """(length + 32 - gcd(stride, 32)) / 32: sectors of a run of bytes at any multiple of its stride, on average."""
    return (length + SECTOR - math.gcd(stride, SECTOR)) / SECTOR


def reader_cost(shape: BlockShape, plan: Plan) -> Cost:
    """Codes of the screened coordinates, scales, down norms; three rows a kept channel."""
    fixed = count_reads(shape, 0, plan.coordinates, plan.score, 0).sketch * shape.native_sectors
    return Cost(fixed + recovery_sectors(shape, plan.rank), 0.0, 0, 3 * _row(shape))


def gate_first_cost(shape: BlockShape, plan: Plan) -> Cost:
    """One matrix of every expert, gate or up, and two rows a kept channel: (1 + 2 kappa) / 3 of everything."""
    fixed = shape.routed * _matrix(shape) + recovery_sectors(shape, plan.rank)
    return Cost(fixed, 0.0, 0, 2 * _row(shape))


def inputs_cost(shape: BlockShape, plan: Plan) -> Cost:
    """Gate and up stored by input coordinate: a run of I weights each; down by channel."""
    return Cost(recovery_sectors(shape, plan.rank), _by_input(shape), _units(shape, plan), _row(shape))


def weighted_inputs_cost(shape: BlockShape, plan: Plan) -> Cost:
    """As `inputs_cost`, and FP16 norms of every column of gate, up and down."""
    vectors = (shape.hidden, shape.hidden, shape.channels)
    norms = shape.routed * sum(run_sectors(_HALF * n, _HALF * n) for n in vectors)
    cost = inputs_cost(shape, plan)
    return replace(cost, fixed=cost.fixed + norms)


def low_rank_cost(shape: BlockShape, plan: Plan) -> Cost:
    """As `weighted_inputs_cost`, and factors R x H and I x R of every matrix."""
    factors = 3 * sum(_run(_HALF * plan.factor_rank * n) for n in (shape.hidden, shape.channels))
    cost = weighted_inputs_cost(shape, plan)
    return replace(cost, fixed=cost.fixed + shape.routed * factors)


def nominating_cost(shape: BlockShape, plan: Plan) -> Cost:
    """2-bit gate and up rows with a scale each; two rows a nominated channel, one a kept one.

    The nominated ones are the units of the account, and grow with k; so a kept channel is charged with its share.
    """
    copy = 2 * (_run(shape.channels * shape.hidden * NOMINATION_BITS // 8) + _run(_HALF * shape.channels))
    fixed = shape.routed * copy + recovery_sectors(shape, plan.rank)
    return Cost(fixed, 2 * _row(shape), plan.nominated * plan.k, _row(shape))


def proxy_cost(shape: BlockShape, plan: Plan) -> Cost:
    """INT4 gate and up stored by input coordinate, a scale a channel; three rows a kept channel."""
    run = math.ceil(shape.channels * PROXY_BITS / 8)
    fixed = shape.routed * 2 * _run(_HALF * shape.channels) + recovery_sectors(shape, plan.rank)
    return Cost(fixed, run_sectors(run, run), _units(shape, plan), 3 * _row(shape))


def free_cost(shape: BlockShape, plan: Plan) -> Cost:
    """Three rows a kept channel: what knowing the scores for nothing would cost."""
    return Cost(recovery_sectors(shape, plan.rank), 0.0, 0, 3 * _row(shape))


def recovery_sectors(shape: BlockShape, rank: int) -> float:
    """U once, and b_j of every channel of the K experts."""
    return count_reads(shape, 0, 1, "norm", rank).recovery * shape.native_sectors


def fit_channels(name: str, shape: BlockShape, reads: float, plan: Plan, cost: CostOf) -> Plan:
    """The plan with the largest k whose sectors do not exceed `reads` of the dense ones. InfeasibleError for none."""
    if not 0 < reads <= 1:
        raise UsageError(f"reads of {reads:g} asked for", "give a fraction above 0, up to 1")
    none, one = (cost(shape, replace(plan, k=k)) for k in (0, 1))
    channel = one.sectors(1) - none.sectors(0)
    room = (reads * shape.native_sectors - none.sectors(0)) / channel
    if room < -_ROUNDING:
        least = none.sectors(0) / shape.native_sectors
        raise InfeasibleError(
            f"{name} cannot read {100 * reads:.4g} %", f"it reads {100 * least:.2f} % before it keeps anything"
        )
    return replace(plan, k=min(math.floor(room + _ROUNDING), shape.candidates))


def to_nearest(shape: BlockShape, reads: float, plan: Plan, cost: CostOf) -> Plan:
    """One channel more than fit, where that is nearer to `reads`: two selectors are to read the same, not one less."""
    more = replace(plan, k=min(plan.k + 1, shape.candidates))
    return min((plan, more), key=lambda p: abs(cost(shape, p).sectors(p.k) - reads * shape.native_sectors))


def _row(shape: BlockShape) -> float:
    row = shape.hidden * shape.element_size
    return run_sectors(row, row)


def _by_input(shape: BlockShape) -> float:
    run = shape.channels * shape.element_size
    return run_sectors(run, run)


def _matrix(shape: BlockShape) -> float:
    return _run(shape.channels * shape.hidden * shape.element_size)


def _run(nbytes: int) -> float:
    return run_sectors(nbytes, nbytes) if nbytes else 0.0


def _units(shape: BlockShape, plan: Plan) -> int:
    return shape.routed * sum(plan.inputs(shape.hidden))
