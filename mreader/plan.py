"""What a conversion will write, from headers alone: shards, sizes, memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from mreader.activations import get_activation
from mreader.formats.architectures import Architecture, RoutedLayer, find_architecture
from mreader.formats.augmented import FormatOptions, augmented_tensors, layer_tensors
from mreader.formats.checkpoint import SINGLE, Checkpoint
from mreader.formats.safetensors_file import HASHED_AT_ONCE, TensorSpec, encode_header

MAX_SHARD_BYTES = 5_000_000_000  # the Hub's own default
MOVED_AT_ONCE = 1 << 26  # bytes of weights that are written as they are
# Threads that move weights, each in a shard of its own: one alone transposes no faster than a disk writes, and two
# would be in the way of what is computed where there are no more cores.
MOVERS = 2 if len(os.sched_getaffinity(0)) > 2 else 1
# What a process takes that converts a layer of no size: Python, torch, float32 chunks of an expert a thread; weights
# that move, mapped and transposed; what the threads hash: eight of the source, three of shards that are not whole yet.
_BASE_MEMORY = 700_000_000 + 2 * MOVERS * MOVED_AT_ONCE + 11 * HASHED_AT_ONCE
# Of quantized weights: experts on their way through `mreader.augment`, its threads' last ones included, and what is
# needed beside a dequantized tensor, in its own size.
_EXPERTS_ON_THE_WAY, _DEQUANTIZING_COPIES = 32, 3
# Results are joined from the experts' parts; those of the recovery map are float32 first.
_SKETCH_COPIES, _RECOVERY_COPIES = 2, 5
# Tensors that are computed together stay in one shard, so that a resumed run computes nothing twice.
SKETCH = ("sketch_codes", "sketch_scales", "sketch_errors", "sketch_signs")
RECOVERY = ("down_norms", "recovery_basis", "recovery_coeffs")
STEPS = (("gate_up_proj",), ("down_proj",), ("gate_up_proj_bias", "down_proj_bias"), SKETCH, RECOVERY)


@dataclass(frozen=True)
class Shard:
    """One file to write."""

    name: str
    tensors: dict[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        return len(encode_header(self.tensors, SHARD_METADATA)) + sum(spec.nbytes for spec in self.tensors.values())


SHARD_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Plan:
    """A conversion of `source`.

    shards: the files to write, in order
    """

    source: Checkpoint
    architecture: Architecture
    options: FormatOptions
    shards: tuple[Shard, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the conversion writes: shards and copied files."""
        return sum(shard.nbytes for shard in self.shards) + sum(self.source.files.values()) + self._record_bytes

    @property
    def _record_bytes(self) -> int:
        """Config, index, manifest and source record: at most twice the source's headers and texts, escaped as JSON."""
        source = self.source.on_disk
        headers = sum(len(header.text) for header in source.headers.values())
        return 2 * (headers + sum(len(text) for text in source.texts.values())) + 100_000

    @property
    def added_bytes(self) -> int:
        """What sketch, norms and recovery add to the weights."""
        return sum(shard.nbytes for shard in self.shards) - self.source.nbytes

    @property
    def memory(self) -> int:
        """An upper estimate of the resident memory: the largest layer, still to be written, and the largest copied
        tensor, which may be looked at in the meantime.
        """
        transformed = self.architecture.transformed
        copied = [self._copied_memory(name) for name in self.source.tensors if name not in transformed]
        layers = [self._layer_memory(layer) for layer in self.architecture.layers]
        return max(layers) + max(copied, default=0) + _BASE_MEMORY

    def _copied_memory(self, name: str) -> int:
        if name not in self.source.packed:
            return self.source.spec(name).nbytes
        return self.source.stored_bytes(name) + (1 + _DEQUANTIZING_COPIES) * self.source.spec(name).nbytes

    def _layer_memory(self, layer: RoutedLayer) -> int:
        """Mapped pages and results of a step of the layer and of one beside it, be it the next layer's.

        What is dequantized is in no file: experts on their way, and all down projections, for the recovery map.
        """
        mapped = sum(map(self.source.stored_bytes, layer.tensors))
        nbytes = {part: spec.nbytes for part, spec in layer_tensors(layer, self.options).items()}
        dequantized = 0
        if not self.source.packed.keys().isdisjoint(layer.tensors):
            expert = (nbytes["gate_up_proj"] + nbytes["down_proj"]) // layer.experts
            dequantized = nbytes["down_proj"] + _EXPERTS_ON_THE_WAY * expert
        return (
            mapped
            + dequantized
            + _SKETCH_COPIES * sum(nbytes[part] for part in SKETCH)
            + _RECOVERY_COPIES * sum(nbytes[part] for part in RECOVERY)
        )


def make_plan(source: Checkpoint, options: FormatOptions, max_shard_bytes: int = MAX_SHARD_BYTES) -> Plan:
    """The plan of converting `source`; raises what `find_architecture` raises, and for an unknown activation."""
    architecture = find_architecture(source)
    get_activation(architecture.activation)  # a runtime will need it: better known now than after the work
    groups: list[dict[str, TensorSpec]] = [{}]
    for unit in _units(source, architecture, options):
        if groups[-1] and _nbytes(groups[-1]) + _nbytes(unit) > max_shard_bytes:
            groups.append({})
        groups[-1] |= unit
    return Plan(source, architecture, options, tuple(_name_shards(groups)))


def _units(source: Checkpoint, architecture: Architecture, options: FormatOptions) -> Iterator[dict[str, TensorSpec]]:
    """Tensors that must share a shard, in the order of the source."""
    tensors = augmented_tensors(source, architecture, options)
    steps = {f"{layer.prefix}.{step[0]}": (layer.prefix, step) for layer in architecture.layers for step in STEPS}
    placed: set[str] = set()
    for name, spec in tensors.items():
        if name in placed:
            continue
        prefix, step = steps.get(name, ("", ()))
        unit = {f"{prefix}.{part}": tensors[f"{prefix}.{part}"] for part in step} or {name: spec}
        placed |= unit.keys()
        yield unit


def _nbytes(tensors: dict[str, TensorSpec]) -> int:
    return sum(spec.nbytes for spec in tensors.values())


def _name_shards(groups: list[dict[str, TensorSpec]]) -> Iterator[Shard]:
    for i, tensors in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        yield Shard(name, _moving_first(tensors))


def _moving_first(tensors: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What is computed stands behind what only moves: a file is hashed as it grows, and would wait at a gap."""
    return dict(sorted(tensors.items(), key=lambda item: item[0].rpartition(".")[2] in SKETCH + RECOVERY))
