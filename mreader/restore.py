"""The source checkpoint back from an augmented one: the same files, byte for byte."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from mreader.errors import NoSpaceError, UsageError, VerifyError
from mreader.formats.augmented import Augmented
from mreader.formats.checkpoint import CONFIG
from mreader.formats.safetensors_file import HashingFile
from mreader.formats.tensors import LazyTensors, as_bytes
from mreader.native import Piece, open_to_verify, source_pieces
from mreader.output import (
    CARD,
    folder_named,
    locked,
    os_errors_of,
    refuse_overlap,
    remove_if_empty,
    require_space_for,
)
from mreader.progress import Progress
from mreader.verify import check_hashes

_WORK_FOLDER = ".mreader-restore"
_PART = "part"


def restore(out: str | Path, destination: str | Path, *, progress: Progress | None = None) -> list[str]:
    """Write the files that `out` was converted from into `destination`, each checked against its recorded sha256.

    Of a quantized source it writes the dequantized model instead, in files of the same names, and says so: the weights
    of the source itself are not in `out`, whose own files are then what is checked.

    destination: folder that does not exist, is empty, or holds a restore that was interrupted
    returns:     names of source files that could not be restored: a README.md that push-to-hub has replaced

    Raises VerifyError where a file would differ from the source's, UsageError where `destination` is in use.
    """
    progress, destination = progress or Progress(), folder_named(destination, "destination")
    augmented = open_to_verify(folder_named(out, "checkpoint"))
    refuse_overlap(augmented.folder, destination)
    _refuse_used(destination)
    if augmented.source.packed:
        check_hashes(augmented, progress)
        progress.note("the source is quantized: this restores the dequantized model, in BF16")
    with os_errors_of(destination):
        sizes = _sizes(augmented)
        with locked(destination / _WORK_FOLDER, "restore") as new:
            if new:
                _refuse_finished(destination)
            interrupted = [path for path in _paths(destination, sizes) if path.is_file()]
            try:
                require_space_for(destination, sum(sizes.values()) - sum(path.stat().st_size for path in interrupted))
            except NoSpaceError:
                _remove_work(destination)
                raise
            progress.begin("restoring", sum(sizes.values()))
            try:
                for path in interrupted:  # now, or there would not be room for both
                    path.unlink()
                left_out = _restore_files(augmented, destination, progress)
            except Exception:
                _remove(destination, sizes)
                raise
            shutil.rmtree(destination / _WORK_FOLDER, ignore_errors=True)  # another run may be trying the lock in it
    return left_out


def _sizes(augmented: Augmented) -> dict[str, int]:
    """File to write -> size."""
    if not augmented.source.packed:
        return {name: int(entry["bytes"]) for name, entry in augmented.manifest["source"]["files"].items()}
    source = augmented.source
    texts = {name: len(text.encode()) for name, text in source.texts.items()}
    return {**{name: header.nbytes for name, header in source.headers.items()}, **texts, **source.files}


def _paths(destination: Path, names: Iterable[str]) -> list[Path]:
    """What a restore of files of these `names` writes; config.json first, without which nothing passes for whole."""
    ordered = sorted(names, key=lambda name: (name != CONFIG, name))
    return [destination / name for name in (*ordered, f"{_WORK_FOLDER}/{_PART}")]


def _restore_files(augmented: Augmented, destination: Path, progress: Progress) -> list[str]:
    left_out = [name for name in augmented.source.files if not _copy(augmented, name, destination, progress)]
    for name in augmented.source.headers:
        _restore_shard(augmented, name, destination, progress)
    for name, text in sorted(augmented.source.texts.items(), reverse=True):  # config.json last
        with HashingFile(destination / _WORK_FOLDER / _PART, destination / name) as file:
            file.write(text.encode())
            _commit(augmented, name, file)
        progress.advance(len(text.encode()))
    return left_out


def _remove(destination: Path, names: Iterable[str]) -> None:
    """Remove a restore that failed: nothing of it could be used by another one.

    Only for the one that has the lock: it began with a folder that holds none of these files.
    """
    folders = set()
    for path in _paths(destination, names):
        path.unlink(missing_ok=True)
        folders |= {parent for parent in path.parents if destination in parent.parents}
    for folder in sorted(folders - {destination / _WORK_FOLDER}, reverse=True):
        remove_if_empty(folder)
    _remove_work(destination)


def _remove_work(destination: Path) -> None:
    """Remove the work folder, unless it says of other files whose they are: those of a restore that was interrupted."""
    if not _others(destination):
        shutil.rmtree(destination / _WORK_FOLDER, ignore_errors=True)


def _others(destination: Path) -> list[str]:
    return [path.name for path in destination.iterdir() if path.name != _WORK_FOLDER]


def _restore_shard(augmented: Augmented, name: str, destination: Path, progress: Progress) -> None:
    header = augmented.source.headers[name]
    pieces = source_pieces(augmented.architecture.layers)
    (destination / name).parent.mkdir(parents=True, exist_ok=True)
    with HashingFile(destination / _WORK_FOLDER / _PART, destination / name) as file:
        file.write(len(header.text).to_bytes(8, "little") + header.text)
        for tensor in header.tensors:
            with augmented.tensors() as tensors:
                for piece in _data(tensors, tensor, pieces):
                    data = as_bytes(piece)
                    file.write(data)
                    progress.advance(len(data))
        _commit(augmented, name, file)


def _data(tensors: LazyTensors, name: str, pieces: dict[str, list[Piece]]) -> Iterator[Tensor]:
    if name not in pieces:
        yield tensors[name]
        return
    for piece in pieces[name]:
        yield piece.data(tensors)


def _copy(augmented: Augmented, name: str, destination: Path, progress: Progress) -> bool:
    """Whether the source's file `name` could be copied: push-to-hub publishes its own README.md."""
    original = augmented.folder / name
    if not original.exists():
        if name == CARD:
            return False
        raise VerifyError(f"{name} of the source is missing", "download the checkpoint again")
    (destination / name).parent.mkdir(parents=True, exist_ok=True)
    with HashingFile(destination / _WORK_FOLDER / _PART, destination / name) as file, original.open("rb") as data:
        while chunk := data.read(1 << 22):
            file.write(chunk)
            progress.advance(len(chunk))
        if name == CARD and file.record()[0] != augmented.manifest["source"]["files"][name]["sha256"]:
            return False
        _commit(augmented, name, file)
    return True


def _commit(augmented: Augmented, name: str, file: HashingFile) -> None:
    recorded = augmented.manifest["source"]["files"][name]
    dequantized = augmented.source.packed and name not in augmented.source.files
    if not dequantized and file.record() != (recorded["sha256"], recorded["bytes"]):
        raise VerifyError(
            f"{name} would differ from the source's file of that name",
            "the checkpoint is damaged: `mreader verify` says where",
        )
    file.commit()


def _refuse_used(destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is a file", "name a folder for the result")
    if destination.is_dir() and _others(destination) and not (destination / _WORK_FOLDER).is_dir():
        raise _not_empty(destination)


def _refuse_finished(destination: Path) -> None:
    """UsageError where another restore began and ended since `_refuse_used`."""
    if _others(destination):
        shutil.rmtree(destination / _WORK_FOLDER, ignore_errors=True)
        raise _not_empty(destination)


def _not_empty(destination: Path) -> UsageError:
    return UsageError(f"{destination} is not empty", "name an empty or a new folder")
