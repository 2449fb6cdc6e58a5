"""Writing one shard of a plan: a thread moves the weights that stay as they are, while the rest is computed.

Moving takes no torch, so it begins before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from mreader.errors import MreaderError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import layer_tensors
from mreader.formats.bits import Bits, MappedBits, non_finite, non_finite_row, refuse_non_finite, row_major
from mreader.formats.checkpoint import Checkpoint
from mreader.formats.safetensors_file import FileRecord, HashingFile, data_begins, encode_header
from mreader.plan import MOVED_AT_ONCE, SHARD_METADATA, Plan, Shard
from mreader.progress import Progress

if TYPE_CHECKING:
    import torch

_Read = Callable[[MappedBits], Bits]


@dataclass(frozen=True)
class _Piece:
    """Part of a shard that only moves: its first byte there, its size, and how to get it."""

    begin: int
    nbytes: int
    read: _Read

    @property
    def end(self) -> int:
        return self.begin + self.nbytes


@dataclass(frozen=True)
class _Computed:
    """What a shard holds of a layer that has to be computed: name -> its first byte there."""

    layer: RoutedLayer
    begins: dict[str, int]


class ShardWriter:
    """Writes the shards of `plan`."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._source = plan.source
        self._layers = {
            f"{layer.prefix}.{part}": layer
            for layer in plan.architecture.layers
            for part in layer_tensors(layer, plan.options)
        }

    @contextmanager
    def begun(self, shard: Shard, scratch: Path, target: Path) -> Iterator[BegunShard]:
        """`shard` in the file `scratch`, into which a thread moves the weights that stay as they are."""
        left = Event()
        with HashingFile(scratch, target) as file, ThreadPoolExecutor(2) as threads:
            header = encode_header(shard.tensors, SHARD_METADATA)
            file.write(header)
            self._progress.advance(len(header))
            moved = threads.submit(self._move, shard, file, left)
            try:
                yield BegunShard(self._plan, self._computed(shard), file, threads, moved, self._progress)
            finally:
                left.set()

    def origins(self, shard: Shard) -> list[str]:
        """The source files that `shard` is made from."""
        found: dict[str, None] = {}
        for name in shard.tensors:
            layer = self._layers.get(name)
            found |= dict.fromkeys(self._source.where[tensor] for tensor in (layer.tensors if layer else [name]))
        return list(found)

    def _move(self, shard: Shard, file: HashingFile, left: Event) -> None:
        for run in _runs(self._pieces(shard)):
            if left.is_set():
                return
            with self._source.bits() as bits:
                file.write_at(run[0].begin, [row_major(piece.read(bits)).data for piece in run])
            self._progress.advance(run[-1].end - run[0].begin)

    def _pieces(self, shard: Shard) -> Iterator[_Piece]:
        """What moves, in the order of the file."""
        for name, begin in data_begins(shard.tensors, SHARD_METADATA).items():
            reads = self._reads(name, shard.tensors[name].dtype)
            for i, read in enumerate(reads):
                nbytes = shard.tensors[name].nbytes // len(reads)
                yield _Piece(begin + i * nbytes, nbytes, read)

    def _reads(self, name: str, dtype: str) -> list[_Read]:
        """How to get the parts of a tensor that moves, all of one size; none of one that is computed."""
        layer, part = self._layers.get(name), name.rpartition(".")[2]
        if layer is None:
            return [partial(_read_finite, name, dtype)]
        if part == "gate_up_proj":
            return [matrix.read for pair in zip(layer.gate, layer.up, strict=True) for matrix in pair]
        if part == "down_proj":
            return [partial(_read_transposed, matrix) for matrix in layer.down]
        return []

    def _computed(self, shard: Shard) -> list[_Computed]:
        """What is computed, layer by layer."""
        found: dict[str, _Computed] = {}
        for name, begin in data_begins(shard.tensors, SHARD_METADATA).items():
            layer = self._layers.get(name)
            if layer is not None and not self._reads(name, layer.dtype):
                found.setdefault(layer.prefix, _Computed(layer, {})).begins[name] = begin
        return list(found.values())


@dataclass(frozen=True)
class BegunShard:
    """A shard whose weights are being moved into place."""

    _plan: Plan
    _computed: list[_Computed]
    _file: HashingFile
    _threads: Executor
    _moved: Future[None]
    _progress: Progress

    def finish(self, device: torch.device) -> FileRecord:
        """Compute the rest on `device`. The shard appears under its name when it is whole and on the disk."""
        if self._computed:
            self._compute(device)
        self._moved.result()
        return self._file.commit()

    def _compute(self, device: torch.device) -> None:
        from mreader.augment import experts_side_by_side

        with experts_side_by_side(device) as pool:
            written: Future[None] | None = None
            for computed in self._computed:
                if self._moved.done():
                    self._moved.result()  # has failed, or is done
                parts = self._parts(computed, device, pool)
                if written is not None:
                    written.result()  # so that no more than two layers are in memory
                written = self._threads.submit(self._write, parts)
            if written is not None:
                written.result()

    def _write(self, parts: dict[int, memoryview]) -> None:
        for begin, data in parts.items():
            self._file.write_at(begin, [data])
            self._progress.advance(len(data))

    def _parts(self, computed: _Computed, device: torch.device, pool: Executor) -> dict[int, memoryview]:
        """First byte in the shard -> data."""
        from mreader.augment import LayerAugmenter
        from mreader.formats.tensors import DTYPE_NAMES, LazyTensors, as_bits, as_bytes

        layer, parts = computed.layer, {}
        self._progress.layer(layer.ordinal + 1, len(self._plan.architecture.layers))
        with LazyTensors(self._plan.source.path, self._plan.source.where) as tensors:
            augmenter = LayerAugmenter(layer, tensors, self._plan.options, device, pool)
            try:
                for name, begin in computed.begins.items():
                    tensor = augmenter.part(name.rpartition(".")[2])
                    refuse_non_finite(name, as_bits(tensor), DTYPE_NAMES[tensor.dtype])
                    parts[begin] = as_bytes(tensor)
            except (MreaderError, RuntimeError) as error:  # RuntimeError: torch's of a decomposition that fails
                _refuse_non_finite_layer(layer, self._plan.source)  # better explains whatever could not be computed
                if isinstance(error, MreaderError):
                    raise type(error)(f"{layer.prefix}: {error.cause}", error.remedy) from error
                raise
        return parts


def _runs(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that follow one another, up to a good size to write at once."""
    run: list[_Piece] = []
    for piece in pieces:
        if run and (run[-1].end != piece.begin or piece.end - run[0].begin > MOVED_AT_ONCE):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _read_finite(name: str, dtype: str, bits: MappedBits) -> Bits:
    refuse_non_finite(name, bits[name], dtype)
    return bits[name]


def _read_transposed(matrix: Matrix, bits: MappedBits) -> Bits:
    return matrix.read(bits).T


def _refuse_non_finite_layer(layer: RoutedLayer, source: Checkpoint) -> None:
    """SourceError, naming tensor, expert and row, where a weight of `layer` is NaN or infinite."""
    with source.bits() as bits:
        for matrices in (layer.gate, layer.up, layer.down):
            for expert, matrix in enumerate(matrices):
                if (row := non_finite_row(matrix.read(bits), layer.dtype)) is not None:
                    raise non_finite(matrix.tensor, f"expert {expert}, row {matrix.first + row}")
