"""Which launch parameters are fastest on this GPU: kernel after kernel, every candidate, the whole block timed.

Between blocks runs an ordinary kernel, as in a model: parameters that are alike in a row of blocks, whose kernels start
while those before them end, may be a microsecond apart there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from mreader.bench.block import sparse_block
from mreader.bench.layers import Call, draw_calls, make_layers
from mreader.bench.peers import own_dense
from mreader.bench.target import Target
from mreader.bench.timing import require_cuda, time_calls
from mreader.budget import Budget
from mreader.kernels.tuning import LayerShape, Measured, Parameters, Tuning, device_name, known_tuning, trial
from mreader.progress import Progress

_REPLAYS = 10
_WORTH = 0.995  # of the time so far: what gains less is noise, and a first choice stays
_GAP = 2  # batches further apart do not tell where sparse and dense cross

Prepare = Callable[[Call], Callable[[], Tensor]]


@dataclass(frozen=True)
class TunedRow:
    """One batch: microseconds of the block with the parameters known before and with the best ones found.

    dense:      the same of our own dense block
    parameters: kernel -> the best found
    """

    batch: int
    before: float
    sparse: float
    dense: float
    parameters: dict[str, Parameters]


def tune(target: Target, budget: Budget, batches: Sequence[int], progress: Progress) -> list[TunedRow]:
    """Try every candidate at every batch. UsageError without a CUDA device, or where layers do not fit its memory."""
    device = require_cuda()
    from mreader.kernels.layout import GPU

    settings = budget.resolve(target.block_shape(GPU))
    layers = make_layers(target, device, progress)
    blocks = {"sparse": sparse_block(layers, settings), "dense": own_dense(layers).prepare}
    known, name = known_tuning(), device_name(device)
    candidates = {kernel: combinations(values) for kernel, values in known.candidates.items()}
    tries = sum(1 + len(some) for some in candidates.values())
    progress.begin("candidates", len(batches) * tries, "candidates")
    rows = []
    for batch in batches:
        calls = draw_calls(target.layer, batch, len(layers), layers[0].down)
        rows.append(_tune_batch(known, name, target.layer, calls, blocks, candidates, progress))
    return rows


def as_measured(rows: Sequence[TunedRow], device: str, shape: LayerShape) -> Measured:
    """The entry for the tuning file."""
    times = {row.batch: (row.sparse, row.dense) for row in rows}
    return Measured(device, shape, crossing(times), {row.batch: row.parameters for row in rows})


def crossing(times: Mapping[int, tuple[float, float]]) -> int | None:
    """The largest batch up to which the sparse block is no slower than the dense one; 0 where it never is.

    times: batch -> microseconds, sparse and dense

    None where the batches do not tell: the sparse block is ahead at all of them, or they lie too far apart.
    """
    ahead = 0
    for batch, (sparse, dense) in sorted(times.items()):
        if sparse > dense:
            return ahead if batch <= max(_GAP * ahead, 1) else None
        ahead = batch
    return None


def combinations(values: Mapping[str, Sequence[int]]) -> list[Parameters]:
    """Every choice of one value a name."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def search(
    start: Mapping[str, Parameters],
    candidates: Mapping[str, Sequence[Parameters]],
    measure: Callable[[str, Mapping[str, Parameters]], float | None],
) -> dict[str, Parameters]:
    """The best parameters, one kernel after the other, those before it at their best.

    start:   kernel -> parameters to begin with
    measure: the kernel that changes, all parameters -> time, or None where the GPU lacks the resources
    """
    best = {kernel: dict(parameters) for kernel, parameters in start.items()}
    for kernel, some in candidates.items():
        least = measure(kernel, best)
        for parameters in some:
            time = measure(kernel, {**best, kernel: parameters})
            if time is not None and (least is None or time < _WORTH * least):
                least, best[kernel] = time, parameters
    return best


def _tune_batch(
    known: Tuning,
    device: str,
    shape: LayerShape,
    calls: Sequence[Call],
    blocks: Mapping[str, Prepare],
    candidates: Mapping[str, Sequence[Parameters]],
    progress: Progress,
) -> TunedRow:
    batch = len(calls[0].x)
    start = {kernel: known.parameters(kernel, device, shape, batch) for kernel in candidates}
    ordinary = calls[0].x.clone().neg_

    def measure(kernel: str, parameters: Mapping[str, Parameters]) -> float | None:
        progress.advance(1)
        block = blocks["dense" if kernel.startswith("dense") else "sparse"]
        with trial(parameters):
            return _time_or_none([run for call in calls for run in (block(call), ordinary)])

    best = search(start, candidates, measure)
    before = time_calls([blocks["sparse"](call) for call in calls])
    with trial(best):
        sparse, dense = (time_calls([blocks[block](call) for call in calls]) for block in ("sparse", "dense"))
    return TunedRow(batch, before, sparse, dense, best)


def _time_or_none(calls: Sequence[Callable[[], Tensor]]) -> float | None:
    """Mean microseconds of a call, or None where a kernel wants more shared memory or registers than the GPU has."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_calls(calls, _REPLAYS)
    except OutOfResources:
        return None
