"""The decode block beside its dense peers, at several batches: one run, the same weights, tokens and routings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mreader.bench.layers import Call, draw_calls, make_layers
from mreader.bench.peers import Peer, find_peers
from mreader.bench.target import Target
from mreader.bench.timing import measure_copy_bandwidth, require_cuda, time_calls
from mreader.bench.traffic import find_touched, touched_bytes
from mreader.budget import Budget, count_reads
from mreader.kernels.tuning import device_name, largest_sparse_batch
from mreader.progress import Progress
from mreader.reader import ExpertLayer, ReadSettings

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class BlockRow:
    """One batch.

    microseconds: of a sparse call
    peers:        name -> microseconds of a dense call, or None where it was not measured
    bytes:        that a sparse call has to fetch
    floor:        microseconds that a copy at the device's copy bandwidth takes for them
    runtime:      "sparse" or "dense": what the runtime takes at this batch
    """

    batch: int
    microseconds: float
    peers: dict[str, float | None]
    bytes: int
    floor: float
    runtime: str

    @property
    def ratios(self) -> dict[str, float | None]:
        """How many times as long each peer takes."""
        return {name: None if time is None else time / self.microseconds for name, time in self.peers.items()}

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes / self.microseconds * 1e6


@dataclass(frozen=True)
class BlockBench:
    """A whole measurement.

    k, candidates:  channels kept of each token, of how many
    reads:          of a token alone, as a fraction of the dense reads
    copy_bandwidth: bytes read and written a second
    layers, calls:  taken in turn; calls of one graph
    cached:         whether the layers fit the L2 cache together, so that times are not those of DRAM
    """

    device: str
    target: str
    codes: str
    settings: ReadSettings
    candidates: int
    reads: float
    copy_bandwidth: float
    layers: int
    calls: int
    cached: bool
    rows: list[BlockRow]

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        settings = vars(self.settings)
        facts = {name: value for name, value in vars(self).items() if name not in ("settings", "rows")}
        rows = [{**vars(row), "ratios": row.ratios, "bandwidth": row.bandwidth} for row in self.rows]
        return {**facts, **settings, "rows": rows}


def make_row(
    batch: int,
    microseconds: float,
    peers: dict[str, float | None],
    nbytes: int,
    copy_bandwidth: float,
    sparse_up_to: int,
) -> BlockRow:
    """The row of a batch, from what was measured.

    copy_bandwidth: bytes read and written a second
    sparse_up_to:   largest batch at which the runtime takes the sparse block
    """
    floor = nbytes / copy_bandwidth * 1e6
    return BlockRow(batch, microseconds, peers, nbytes, floor, "sparse" if batch <= sparse_up_to else "dense")


def bench_block(target: Target, budget: Budget, batches: Sequence[int], progress: Progress) -> BlockBench:
    """Measure the block and its peers. UsageError without a CUDA device, or where the layers do not fit its memory."""
    device = require_cuda()
    from mreader.kernels.layout import GPU

    shape = target.block_shape(GPU)
    settings = budget.resolve(shape)
    layers = make_layers(target, device, progress)
    name = device_name(device)
    sparse_up_to = largest_sparse_batch(name, target.layer)
    sparse = sparse_block(layers, settings)
    peers = find_peers(layers, progress)
    copy_bandwidth = measure_copy_bandwidth(device)
    progress.begin("batches", len(batches), "batches")
    rows = []
    for batch in batches:
        calls = draw_calls(target.layer, batch, len(layers), layers[0].down)
        microseconds = time_calls([sparse(call) for call in calls])
        times = {peer.name: _time_peer(peer, calls) for peer in peers}
        nbytes = touched_bytes(shape, find_touched(layers[0], calls[0], settings), settings)
        rows.append(make_row(batch, microseconds, times, nbytes, copy_bandwidth, sparse_up_to))
        progress.advance(1)
    reads = count_reads(shape, settings.k, settings.coordinates, settings.score, settings.rank)
    return BlockBench(
        device=name,
        target=target.name,
        codes=shape.code.name,
        settings=settings,
        candidates=shape.candidates,
        reads=reads.total,
        copy_bandwidth=copy_bandwidth,
        layers=len(layers),
        calls=len(calls),
        cached=len(layers) * target.native_bytes < torch.cuda.get_device_properties(device).L2_cache_size,
        rows=rows,
    )


def sparse_block(layers: Sequence[ExpertLayer], settings: ReadSettings) -> Callable[[Call], Callable[[], Tensor]]:
    """A call -> the function that runs it sparsely."""
    from mreader.kernels.decode import decode, repack

    repacked = [repack(layer) for layer in layers]

    def prepare(call: Call) -> Callable[[], Tensor]:
        return lambda: decode(call.x, call.ids, call.weights, repacked[call.layer], settings)

    return prepare


def _time_peer(peer: Peer, calls: Sequence[Call]) -> float | None:
    """Microseconds of a call, or None where the peer needs more memory than is free."""
    torch.cuda.empty_cache()
    if not peer.fits(calls[0]):
        return None
    return time_calls([peer.prepare(call) for call in calls])
