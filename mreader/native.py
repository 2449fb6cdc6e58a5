"""What `verify` and `restore` share: opening a checkpoint that may be damaged, and the source's matrices in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mreader.errors import MreaderError, SourceError, UsageError, VerifyError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import MANIFEST, SOURCE, Augmented, is_augmented, open_augmented
from mreader.formats.checkpoint import CONFIG, is_safe_name
from mreader.formats.safetensors_file import FileRecord, LazyTensors


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


def source_pieces(layers: tuple[RoutedLayer, ...]) -> dict[str, list[tuple[RoutedLayer, str, int]]]:
    """Source tensor -> the matrices that it is made of, in its order: (layer, "gate", "up" or "down", expert)."""
    placed: dict[str, list[tuple[int, int, RoutedLayer, str, int]]] = {}
    for layer in layers:
        for kind, matrices in (("gate", layer.gate), ("up", layer.up), ("down", layer.down)):
            for expert, matrix in enumerate(matrices):
                placed.setdefault(matrix.tensor, []).append(_place(matrix, layer, kind, expert))
    return {
        name: [piece[2:] for piece in sorted(pieces, key=lambda piece: piece[:2])] for name, pieces in placed.items()
    }


def _place(matrix: Matrix, layer: RoutedLayer, kind: str, expert: int) -> tuple[int, int, RoutedLayer, str, int]:
    return matrix.expert or 0, matrix.first, layer, kind, expert


def native_matrix(tensors: LazyTensors, layer: RoutedLayer, kind: str, expert: int) -> Tensor:
    """One expert's matrix in the source's orientation: gate, up (I, H); down (H, I)."""
    if kind == "down":
        return tensors[f"{layer.prefix}.down_proj"][expert].T
    return tensors[f"{layer.prefix}.gate_up_proj"][expert][("gate", "up").index(kind)]
