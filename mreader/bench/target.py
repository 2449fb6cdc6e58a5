"""What is measured: a known shape with random weights, or the layers of an augmented checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from mreader.bench.shapes import ModelShape, get_shape
from mreader.budget import DISK, BlockShape, Budget, Layout
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions, open_augmented
from mreader.inspection import block_shape
from mreader.kernels.tuning import LayerShape

DEFAULT_SHAPE = "qwen3-30b-a3b"
DEFAULT_CHANNELS = 0.115  # 18 % of the dense reads of Qwen3-30B-A3B, codes of 2 bits and 80 coordinates


@dataclass(frozen=True)
class Target:
    """A routed layer to measure.

    layers:       routed layers of the model
    activation:   Hugging Face name
    options:      code, stored rank, and the default budget
    element_size: bytes of a native weight
    folder:       of the checkpoint, or None for random weights
    model:        the known shape, or None for a checkpoint
    """

    name: str
    layer: LayerShape
    layers: int
    activation: str
    options: FormatOptions
    element_size: int
    folder: Path | None
    model: ModelShape | None

    def block_shape(self, layout: Layout = DISK) -> BlockShape:
        """A layer as a token sees it, its codes in the given layout."""
        layer = self.layer
        return BlockShape(
            layer.hidden,
            layer.channels,
            layer.routed,
            self.options.rank,
            self.options.code,
            self.element_size,
            layout,
        )

    @property
    def native_bytes(self) -> int:
        """Bytes of one layer's gate, up and down weights."""
        layer = self.layer
        return 3 * layer.experts * layer.channels * layer.hidden * self.element_size

    @property
    def budget(self) -> Budget:
        """The default budget."""
        return Budget.of(self.options)


def find_target(
    shape: str | None, checkpoint: Path | None, codes: str | None = None, rank: int | None = None
) -> Target:
    """The target that the options name; by default the first known shape.

    codes: code of random weights; a checkpoint has its own
    rank:  stored rank of random weights; of a checkpoint at most its own is used

    Raises UsageError for contradicting options, and what `open_augmented` raises.
    """
    if shape is not None and checkpoint is not None:
        raise UsageError("both a shape and a checkpoint are given", "give one of them")
    if checkpoint is None:
        return _shape_target(get_shape(shape or DEFAULT_SHAPE), codes, rank)
    if codes is not None:
        raise UsageError("codes are given, but a checkpoint has its own", "leave --codes out, or give a --shape")
    return _checkpoint_target(checkpoint)


def _shape_target(model: ModelShape, codes: str | None, rank: int | None) -> Target:
    default = FormatOptions(channels=DEFAULT_CHANNELS)
    options = FormatOptions(
        codes=default.codes if codes is None else codes,
        rank=default.rank if rank is None else rank,
        channels=default.channels,
    )
    return Target(model.name, model.layer, model.layers, model.activation, options, 2, None, model)


def _checkpoint_target(folder: Path) -> Target:
    augmented = open_augmented(folder)
    architecture, block = augmented.architecture, block_shape(augmented)
    layer = LayerShape(architecture.layers[0].experts, block.routed, block.hidden, block.channels)
    return Target(
        str(folder),
        layer,
        len(architecture.layers),
        architecture.activation,
        augmented.options,
        block.element_size,
        folder,
        None,
    )
