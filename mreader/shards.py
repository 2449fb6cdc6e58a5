"""Writing the shards of a plan: threads move the weights that stay as they are, while the rest is computed.

Moving takes no torch, so it begins before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from mreader.errors import MreaderError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import layer_tensors
from mreader.formats.bits import Bits, non_finite, non_finite_row, refuse_non_finite, row_major
from mreader.formats.checkpoint import Checkpoint
from mreader.formats.safetensors_file import FileRecord, HashingFile, data_begins, encode_header
from mreader.plan import MOVED_AT_ONCE, MOVERS, RECOVERY, SHARD_METADATA, SKETCH, Plan, Shard
from mreader.progress import Progress

if TYPE_CHECKING:
    import torch

_Read = Callable[[Mapping[str, Bits]], Bits]


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
class _Step:
    """What a shard holds of a layer's sketch, or of its norms and recovery map: part -> its first byte there."""

    layer: RoutedLayer
    begins: dict[str, int]


@dataclass(frozen=True)
class _Begun:
    """A shard that is not whole yet.

    moved: done when the weights that stay as they are are in its file
    """

    file: HashingFile
    moved: Future[None]


class ShardWriter:
    """Writes shards of `plan`, one after the other: threads move their weights, the caller has the rest computed.

    shards:  those to write, in order
    scratch: folder for what is not whole yet
    target:  folder where it appears when it is whole and on the disk

    Moving is one shard ahead, so that the disk has something to do while the last layers of a shard are computed.
    Leaving the `with` block abandons what is not finished.
    """

    def __init__(self, plan: Plan, shards: Sequence[Shard], scratch: Path, target: Path, progress: Progress) -> None:
        self._plan, self._shards, self._progress = plan, shards, progress
        self._source, self._scratch, self._target = plan.source, scratch, target
        self._layers = {
            f"{layer.prefix}.{part}": layer
            for layer in plan.architecture.layers
            for part in layer_tensors(layer, plan.options)
        }
        self._begun: dict[int, _Begun] = {}
        self._files = ExitStack()
        self._movers = ThreadPoolExecutor(MOVERS)
        self._left = Event()

    def __enter__(self) -> ShardWriter:
        return self

    def begin(self, number: int) -> None:
        """Start moving weights into shard `number` (from 0), and after that into the next."""
        for i in range(number, min(number + 2, len(self._shards))):
            if i not in self._begun:
                self._begun[i] = self._open(self._shards[i])

    def compute(self, number: int, device: torch.device) -> None:
        """Compute what moving does not bring into shard `number`, which was begun, on `device`."""
        if steps := self._steps(self._shards[number]):
            self._compute(steps, self._begun[number], device)

    def finish(self, number: int) -> FileRecord:
        """Wait until shard `number`, which was computed, is whole and on the disk. It appears under its name then."""
        self._begun[number].moved.result()
        return self._begun[number].file.commit()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._movers.shutdown(cancel_futures=True)
        self._files.close()

    def origins(self, shard: Shard) -> list[str]:
        """The source files that `shard` is made from."""
        found: dict[str, None] = {}
        for name in shard.tensors:
            layer = self._layers.get(name)
            stored = chain.from_iterable(map(self._source.stored, layer.tensors if layer else [name]))
            found |= dict.fromkeys(self._source.on_disk.where[tensor] for tensor in stored)
        return list(found)

    def _open(self, shard: Shard) -> _Begun:
        file = HashingFile(self._scratch / f"{shard.name}.part", self._target / shard.name)
        self._files.enter_context(file)
        return _Begun(file, self._movers.submit(self._move, shard, file))

    def _move(self, shard: Shard, file: HashingFile) -> None:
        header = encode_header(shard.tensors, SHARD_METADATA)
        file.write_at(0, [header])
        self._progress.advance(len(header))
        for run in _runs(self._pieces(shard)):
            if self._left.is_set():
                return
            with _open_bits(self._source) as bits:
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
        if part == "gate_up_proj_bias":
            biases = [matrix for pair in zip(layer.gate_bias, layer.up_bias, strict=True) for matrix in pair]
            return [partial(_read_finite_bias, matrix, dtype) for matrix in biases]
        if part == "down_proj_bias":
            return [partial(_read_finite_bias, matrix, dtype) for matrix in layer.down_bias]
        return []

    def _steps(self, shard: Shard) -> list[_Step]:
        """What is computed, layer by layer."""
        begins = data_begins(shard.tensors, SHARD_METADATA)
        layers = {layer.prefix: layer for name in begins if (layer := self._layers.get(name))}
        return [
            _Step(layer, {part: begins[f"{prefix}.{part}"] for part in parts})
            for prefix, layer in layers.items()
            for parts in (SKETCH, RECOVERY)
            if f"{prefix}.{parts[0]}" in begins
        ]

    def _compute(self, steps: Sequence[_Step], begun: _Begun, device: torch.device) -> None:
        from mreader.augment import experts_side_by_side, steps_side_by_side

        with steps_side_by_side() as threads, experts_side_by_side(device) as pool:
            for _ in threads.map(lambda step: self._compute_step(step, begun.file, device, pool), steps):
                if begun.moved.done():
                    begun.moved.result()  # ends the work if it has failed

    def _compute_step(self, step: _Step, file: HashingFile, device: torch.device, pool: Executor) -> None:
        import torch

        from mreader.augment import LayerAugmenter
        from mreader.dequantize import open_tensors
        from mreader.formats.tensors import DTYPE_NAMES, as_bits, as_bytes

        layer = step.layer
        self._progress.layer(layer.ordinal + 1, len(self._plan.architecture.layers))
        with open_tensors(self._source) as tensors:
            augmenter = LayerAugmenter(layer, tensors, self._plan.options, device, pool)
            try:
                for part, begin in step.begins.items():
                    tensor = augmenter.part(part)
                    refuse_non_finite(f"{layer.prefix}.{part}", as_bits(tensor), DTYPE_NAMES[tensor.dtype])
                    file.write_at(begin, [as_bytes(tensor)])
                    self._progress.advance(tensor.nbytes)
            except (MreaderError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                _refuse_non_finite_layer(layer, self._source)  # better explains whatever could not be computed
                if isinstance(error, MreaderError):
                    raise type(error)(f"{layer.prefix}: {error.cause}", error.remedy) from error
                raise


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


def _read_finite(name: str, dtype: str, bits: Mapping[str, Bits]) -> Bits:
    whole = bits[name]
    refuse_non_finite(name, whole, dtype)
    return whole


def _read_finite_bias(matrix: Matrix, dtype: str, bits: Mapping[str, Bits]) -> Bits:
    """A bias shows in nothing that is computed."""
    bias = matrix.read(bits)
    if (row := non_finite_row(bias, dtype)) is not None:
        raise non_finite(matrix.tensor, f"expert {matrix.expert}, row {matrix.row(row)}")
    return bias


def _read_transposed(matrix: Matrix, bits: Mapping[str, Bits]) -> Bits:
    return matrix.read(bits).T


def _refuse_non_finite_layer(layer: RoutedLayer, source: Checkpoint) -> None:
    """SourceError, naming tensor, expert and row, where a weight of `layer` is NaN or infinite."""
    with _open_bits(source) as bits:
        for matrices in layer.matrices.values():
            for expert, matrix in enumerate(matrices):
                if (row := non_finite_row(matrix.read(bits), layer.dtype)) is not None:
                    raise non_finite(matrix.tensor, f"expert {expert}, row {matrix.row(row)}")


def _open_bits(source: Checkpoint) -> AbstractContextManager[Mapping[str, Bits]]:
    """The source's tensors as bits; those of quantized ones need torch."""
    if not source.packed:
        return source.bits()
    from mreader.dequantize import DequantizedBits

    return DequantizedBits(source)
