"""The source checkpoint back from an augmented one: the same files, byte for byte."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from mreader.errors import UsageError, VerifyError
from mreader.formats.architectures import Matrix, RoutedLayer
from mreader.formats.augmented import Augmented, open_augmented
from mreader.formats.safetensors_file import HashingFile, LazyTensors, as_bytes
from mreader.output import CARD, os_errors_of, require_space_for
from mreader.progress import Progress

_WORK_FOLDER = ".mreader-restore"


def restore(out: str | Path, destination: str | Path, *, progress: Progress | None = None) -> list[str]:
    """Write the files that `out` was converted from into `destination`, each checked against its recorded sha256.

    destination: folder that does not exist, is empty, or holds a restore that was interrupted
    returns:     names of source files that could not be restored: a README.md that push-to-hub has replaced

    Raises VerifyError where a file would differ from the source's, UsageError where `destination` is in use.
    """
    progress = progress or Progress()
    augmented, destination = open_augmented(Path(out)), Path(destination)
    _refuse_used(destination)
    with os_errors_of(destination):
        sizes = {name: int(entry["bytes"]) for name, entry in augmented.manifest["source"]["files"].items()}
        require_space_for(destination, sum(sizes.values()))
        progress.begin("restoring", sum(sizes.values()))
        work = destination / _WORK_FOLDER
        work.mkdir(parents=True, exist_ok=True)
        left_out = [name for name in augmented.source.files if not _copy(augmented, name, destination, progress)]
        for name in augmented.source.headers:
            _restore_shard(augmented, name, destination, progress)
        for name, text in sorted(augmented.source.texts.items(), reverse=True):  # config.json last
            with HashingFile(work / "part", destination / name) as file:
                file.write(text.encode())
                _commit(augmented, name, file)
            progress.advance(sizes[name])
        shutil.rmtree(work)
    return left_out


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


def _restore_shard(augmented: Augmented, name: str, destination: Path, progress: Progress) -> None:
    header = augmented.source.headers[name]
    pieces = source_pieces(augmented.architecture.layers)
    with HashingFile(destination / _WORK_FOLDER / "part", destination / name) as file:
        file.write(len(header.text).to_bytes(8, "little") + header.text)
        for tensor in header.tensors:
            with augmented.tensors() as tensors:
                for piece in _data(tensors, tensor, pieces):
                    data = as_bytes(piece)
                    file.write(data)
                    progress.advance(len(data))
        _commit(augmented, name, file)


def _data(tensors: LazyTensors, name: str, pieces: dict[str, list[tuple[RoutedLayer, str, int]]]) -> Iterator[Tensor]:
    if name not in pieces:
        yield tensors[name]
        return
    for layer, kind, expert in pieces[name]:
        yield native_matrix(tensors, layer, kind, expert)


def _copy(augmented: Augmented, name: str, destination: Path, progress: Progress) -> bool:
    """Whether the source's file `name` could be copied: push-to-hub publishes its own README.md."""
    original = augmented.folder / name
    if not original.exists():
        if name == CARD:
            return False
        raise VerifyError(f"{name} of the source is missing", "download the checkpoint again")
    (destination / name).parent.mkdir(parents=True, exist_ok=True)
    with HashingFile(destination / _WORK_FOLDER / "part", destination / name) as file, original.open("rb") as data:
        while chunk := data.read(1 << 22):
            file.write(chunk)
            progress.advance(len(chunk))
        if name == CARD and file.record()[0] != augmented.manifest["source"]["files"][name]["sha256"]:
            return False
        _commit(augmented, name, file)
    return True


def _commit(augmented: Augmented, name: str, file: HashingFile) -> None:
    recorded = augmented.manifest["source"]["files"][name]
    if file.record() != (recorded["sha256"], recorded["bytes"]):
        raise VerifyError(
            f"{name} would differ from the source's file of that name",
            "the checkpoint is damaged: `mreader verify` says where",
        )
    file.commit()


def _refuse_used(destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is a file", "name a folder for the result")
    if destination.is_dir() and any(destination.iterdir()) and not (destination / _WORK_FOLDER).is_dir():
        raise UsageError(f"{destination} is not empty", "name an empty or a new folder")
