"""What `verify` and `restore` share: opening a checkpoint that may be damaged, and the source's matrices in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mreader.errors import MreaderError, SourceError, UsageError, VerifyError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import MANIFEST, SOURCE, Augmented, is_augmented, open_augmented
from mreader.formats.checkpoint import CONFIG, is_safe_name
from mreader.formats.safetensors_file import FileRecord
from mreader.formats.tensors import LazyTensors


def open_to_verify(folder: Path) -> Augmented:
    """`open_augmented`, with damage as VerifyError, and no file name that leads out of the folder."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder", "name the folder of an augmented checkpoint")
    try:
        augmented = open_augmented(folder)
        _refuse_bad_records({**augmented.manifest["source"]["files"], **augmented.manifest["files"]})
    except (SourceError, UsageError) as error:
        if isinstance(error, UsageError) and not is_augmented(folder):
            raise
        raise VerifyError(error.cause, error.remedy) from error
    except MreaderError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise VerifyError(
            f"{CONFIG}, {MANIFEST} or {SOURCE} holds what does not belong there: {error}", "convert the source again"
        ) from error
    return augmented


def _refuse_bad_records(entries: Mapping[str, Any]) -> None:
    for name, entry in entries.items():
        if not is_safe_name(name):
            raise VerifyError(f"{MANIFEST} names {name!r}, which lies outside the checkpoint", "do not trust it")
        FileRecord.of(entry)


@dataclass(frozen=True)
class Piece:
    """A source tensor, or one expert's slice of a fused one: the matrices that it is made of.

    matrices: with their kinds, as in `RoutedLayer.matrices`; one that fills the piece, or those that share its rows
    """

    layer: RoutedLayer
    expert: int
    matrices: tuple[tuple[str, Matrix], ...]

    def data(self, tensors: LazyTensors) -> Tensor:
        """The piece as it lay in the source."""
        natives = [native_matrix(tensors, self.layer, kind, self.expert) for kind, _ in self.matrices]
        first = self.matrices[0][1]
        whole = natives[0] if len(natives) == 1 else _joined(natives, first.step)
        return whole.T if first.transposed else whole


def _joined(natives: list[Tensor], step: int) -> Tensor:
    """Their rows one after the other, or in turns."""
    return torch.cat(natives) if step == 1 else torch.stack(natives, 1).flatten(0, 1)


def source_pieces(layers: tuple[RoutedLayer, ...]) -> dict[str, list[Piece]]:
    """Source tensor -> its pieces, in its order."""
    placed: dict[str, list[Piece]] = {}
    for layer in layers:
        for expert in range(layer.experts):
            by_tensor: dict[str, list[tuple[str, Matrix]]] = {}
            for kind, matrices in layer.matrices.items():
                by_tensor.setdefault(matrices[expert].tensor, []).append((kind, matrices[expert]))
            for tensor, parts in by_tensor.items():
                placed.setdefault(tensor, []).append(Piece(layer, expert, tuple(parts)))
    return placed


def native_matrix(tensors: LazyTensors, layer: RoutedLayer, kind: str, expert: int) -> Tensor:
    """One expert's matrix in the source's orientation: gate, up (I, H); down (H, I); biases of them (I,) and (H,)."""
    part, _, bias = kind.partition("_")
    suffix = "_bias" if bias else ""
    if part == "down":
        stored = tensors[f"{layer.prefix}.down_proj{suffix}"][expert]
        return stored if bias else stored.T
    return tensors[f"{layer.prefix}.gate_up_proj{suffix}"][expert][("gate", "up").index(part)]
