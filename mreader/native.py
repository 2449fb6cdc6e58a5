"""What `verify` and `restore` share: opening a checkpoint that may be damaged, and the source's matrices in it."""

from pathlib import Path

from torch import Tensor

from mreader.errors import SourceError, VerifyError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import Augmented, open_augmented
from mreader.formats.checkpoint import is_safe_name
from mreader.formats.safetensors_file import LazyTensors


def open_to_verify(folder: Path) -> Augmented:
    """`open_augmented`, with damage as VerifyError, and no file name that leads out of the folder."""
    if not folder.is_dir():
        raise SourceError(f"{folder} is no folder", "name the folder of an augmented checkpoint")
    try:
        augmented = open_augmented(folder)
        names = [*augmented.manifest["files"], *augmented.manifest["source"]["files"]]
    except (KeyError, TypeError) as error:
        raise VerifyError(f"the manifest lacks {error}", "convert the source again") from error
    except SourceError as error:
        raise VerifyError(error.cause, error.remedy) from error
    for name in names:
        if not is_safe_name(name):
            raise VerifyError(f"the manifest names {name!r}, which lies outside the checkpoint", "do not trust it")
    return augmented


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
