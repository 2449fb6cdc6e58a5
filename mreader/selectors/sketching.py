"""The reader's sketch of a layer, made from its native weights: as a conversion makes it, or otherwise."""

# E experts, H hidden size, I channels of an expert, B block, nb = ceil(H/B) blocks, C = nb * B coordinates

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mreader.activations import Activation
from mreader.augment import LayerAugmenter, experts_side_by_side
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import DEFAULT_OPTIONS, FormatOptions
from mreader.formats.codes import BLOCK
from mreader.kernels.rotate import rotate
from mreader.sketch import sketch_unrotated


@dataclass(frozen=True)
class Native:
    """A layer's weights.

    gate_up: (E, 2, I, H) native dtype - gate first
    down:    (E, I, H) native dtype - a channel's down weights are one row
    """

    gate_up: Tensor
    down: Tensor
    activation: Activation


@dataclass(frozen=True)
class Sketching:
    """How a layer is sketched.

    codes, rank, seed: as mreader.formats.augmented.FormatOptions
    rotated:           whether rows and tokens are rotated before; a conversion always does that
    """

    codes: str = DEFAULT_OPTIONS.codes
    rank: int = DEFAULT_OPTIONS.rank
    seed: int = DEFAULT_OPTIONS.seed
    rotated: bool = True

    @classmethod
    def of(cls, options: FormatOptions) -> Sketching:
        """That of a conversion."""
        return cls(options.codes, options.rank, options.seed)

    @property
    def options(self) -> FormatOptions:
        """Those under which a conversion does the same, rotation aside."""
        return FormatOptions(codes=self.codes, rank=self.rank, seed=self.seed)

    def rotate(self, x: Tensor, signs: Tensor) -> Tensor:
        """Rx by blocks, or x by blocks where nothing is rotated: (N, nb, B) float32 of (N, H)."""
        if self.rotated:
            return rotate(x, signs)
        padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCK))
        return padded.view(len(x), -1, BLOCK)


def sketch_layer(native: Native, sketching: Sketching, ordinal: int) -> dict[str, Tensor]:
    """The tensors of sketch and recovery map, under their names in the format, on the weights' device.

    ordinal: the layer's place among those with routed experts, which chooses its rotation
    """
    E, I, H = native.down.shape
    layer = RoutedLayer(
        number=ordinal,
        ordinal=ordinal,
        prefix="",
        experts=E,
        channels=I,
        hidden=H,
        dtype="",
        gate=tuple(Matrix("gate", expert) for expert in range(E)),
        up=tuple(Matrix("up", expert) for expert in range(E)),
        down=tuple(Matrix("down", expert) for expert in range(E)),
    )
    gate, up = native.gate_up.unbind(1)
    tensors = {"gate": gate, "up": up, "down": native.down.mT}
    device = native.down.device
    with experts_side_by_side(device) as pool:
        augmenter = LayerAugmenter(layer, tensors, sketching.options, device, pool)
        parts = {**augmenter.sketch, **augmenter.recovery}
    if not sketching.rotated:
        parts |= _unrotated(native, sketching)
    return {name: part.to(device) for name, part in parts.items()}


def _unrotated(native: Native, sketching: Sketching) -> dict[str, Tensor]:
    pairs = [sketch_unrotated(list(matrices), sketching.options.code) for matrices in native.gate_up]
    return {
        f"sketch_{part}": torch.stack([getattr(pair, part) for pair in pairs]) for part in ("codes", "scales", "errors")
    }
