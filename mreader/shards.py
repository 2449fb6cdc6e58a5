"""Writing one shard of a plan: its tensors copied or computed, hashed and written in the background."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

import torch

from mreader.augment import LayerAugmenter, refuse_non_finite
from mreader.background import BackgroundWriter
from mreader.errors import MreaderError, SourceError
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import layer_tensors
from mreader.formats.safetensors_file import FileRecord, HashingFile, data_order, encode_header
from mreader.formats.tensors import LazyTensors, as_bytes
from mreader.plan import SHARD_METADATA, Plan, Shard
from mreader.progress import Progress

_NATIVE = (".gate_up_proj", ".down_proj")


class ShardWriter:
    """Writes shards of `plan`, computing on `device`."""

    def __init__(self, plan: Plan, device: torch.device, progress: Progress) -> None:
        self._plan, self._device, self._progress = plan, device, progress
        self._source = plan.source
        self._layers = {
            f"{layer.prefix}.{part}": layer
            for layer in plan.architecture.layers
            for part in layer_tensors(layer, plan.options)
        }

    def write(self, shard: Shard, scratch: Path, target: Path, pool: Executor) -> FileRecord:
        """Write `shard` to `scratch`, experts side by side in `pool`; it appears at `target` when it is whole and on
        the disk.
        """
        with HashingFile(scratch, target) as file:
            with BackgroundWriter(file, self._queued_bytes, self._progress.advance) as writer:
                writer.put(encode_header(shard.tensors, SHARD_METADATA))
                for run in self._runs(data_order(shard.tensors)):
                    self._write_run(writer, run, pool)
            return file.commit()

    def origins(self, shard: Shard) -> list[str]:
        """The source files that `shard` is made from."""
        found: dict[str, None] = {}
        for name in shard.tensors:
            layer = self._layer_of(name)
            found |= dict.fromkeys(self._source.where[tensor] for tensor in (layer.tensors if layer else [name]))
        return list(found)

    @property
    def _queued_bytes(self) -> int:
        """What may wait to be written: one layer, most of it views of the mapped source."""
        return max(
            sum(self._source.spec(name).nbytes for name in layer.tensors) for layer in self._plan.architecture.layers
        )

    def _layer_of(self, name: str) -> RoutedLayer | None:
        """The layer that the augmented tensor `name` belongs to; None for a copied tensor."""
        return self._layers.get(name)

    def _runs(self, names: Sequence[str]) -> Iterator[list[str]]:
        """`names` cut where the layer changes; copied tensors stand alone."""
        run: list[str] = []
        for name in names:
            if run and (self._layer_of(name) is None or self._layer_of(name) is not self._layer_of(run[0])):
                yield run
                run = []
            run.append(name)
        if run:
            yield run

    def _write_run(self, writer: BackgroundWriter, run: Sequence[str], pool: Executor) -> None:
        """Tensors of one layer, or one copied tensor."""
        layer = self._layer_of(run[0])
        with LazyTensors(self._source.path, self._source.where) as tensors:
            if layer is None:
                refuse_non_finite(run[0], tensors[run[0]])
                writer.put(as_bytes(tensors[run[0]]))
                return
            self._progress.layer(layer.ordinal + 1, len(self._plan.architecture.layers))
            try:
                for piece in self._pieces(layer, run, tensors, pool):
                    writer.put(as_bytes(piece))
            except (MreaderError, RuntimeError) as error:  # RuntimeError: torch's of a decomposition that fails
                _refuse_non_finite_layer(layer, tensors)  # a better explanation of whatever could not be computed
                if isinstance(error, MreaderError):
                    raise type(error)(f"{layer.prefix}: {error.cause}", error.remedy) from error
                raise

    def _pieces(
        self, layer: RoutedLayer, run: Sequence[str], tensors: LazyTensors, pool: Executor
    ) -> Iterator[torch.Tensor]:
        augmenter = LayerAugmenter(layer, tensors, self._plan.options, self._device, pool)
        for name in run:
            for piece in augmenter.pieces(name.rpartition(".")[2]):
                if not name.endswith(_NATIVE):  # those are large, and what is computed from them tells as much
                    refuse_non_finite(name, piece)
                yield piece


def _refuse_non_finite_layer(layer: RoutedLayer, tensors: Mapping[str, torch.Tensor]) -> None:
    """SourceError, naming tensor, expert and row, where a weight of `layer` is NaN or infinite."""
    for matrices in (layer.gate, layer.up, layer.down):
        for expert, matrix in enumerate(matrices):
            finite = torch.isfinite(matrix.read(tensors)).all(dim=1)
            if not bool(finite.all()):
                row = matrix.first + int((~finite).nonzero()[0])
                raise SourceError(
                    f"{matrix.tensor} holds NaN or infinity (expert {expert}, row {row})",
                    "the checkpoint is damaged; download it again or ask its author",
                )
