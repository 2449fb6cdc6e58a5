"""The folder that a conversion or a restore writes into: whose it is, whether it has room, and how its errors read."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from mreader.errors import MreaderError, NoSpaceError, UsageError
from mreader.formats.augmented import MANIFEST, SOURCE, WORK_FOLDER
from mreader.formats.checkpoint import CONFIG, INDEX, is_safe_name
from mreader.formats.safetensors_file import FileRecord, sync_folder
from mreader.hashing import changed_files
from mreader.journal import JOURNAL, Journal
from mreader.plan import Plan
from mreader.progress import Progress

CARD = "README.md"  # push-to-hub publishes another one, so no manifest pins it
_LOCK = "lock"


@dataclass(frozen=True)
class Finished:
    """What a manifest says.

    request: options and versions of the conversion
    sources: source file -> its record
    files:   written file -> its record
    """

    request: dict[str, Any]
    sources: dict[str, FileRecord]
    files: dict[str, FileRecord]


def read_finished(out: Path) -> Finished | None:
    """The manifest in `out`; None where there is none, or none that can be trusted."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        request = {key: dict(manifest[key]) for key in ("options", "versions")}
        sources, files = (_records(part) for part in (manifest["source"]["files"], manifest["files"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    safe = all(is_safe_name(name) for name in (*sources, *files))
    return Finished(request, sources, files) if safe else None


def _records(entries: dict[str, Any]) -> dict[str, FileRecord]:
    return {name: FileRecord.of(entry) for name, entry in entries.items()}


@contextmanager
def os_errors_of(out: Path) -> Iterator[None]:
    """OSErrors of writing, as the errors that a user understands."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                f"the disk of {out} is full", "free some space and run the same command to resume"
            ) from error
        if error.errno == errno.EFBIG:
            raise NoSpaceError(
                f"the disk of {out}, or `ulimit -f`, does not allow a file that large",
                "name a folder on another disk; a conversion may have a smaller --max-shard-size, with --overwrite",
            ) from error
        what = error.strerror or str(error)
        raise MreaderError(f"{error.filename or out}: {what}", "check the path and its permissions") from error


def folder_named(path: str | Path, what: str) -> Path:
    """`path`; UsageError where it is empty, as an unset shell variable is, and would mean the current folder."""
    if path == "":
        raise UsageError(f"the {what} is an empty name", "name a folder; the current one is called .")
    return Path(path)


def refuse_overlap(source: Path, out: Path) -> None:
    """UsageError where one folder is, or lies in, the other."""
    inner, outer = source.resolve(), out.resolve()
    if inner == outer:
        raise UsageError(f"{source} and {out} are the same folder", "name another folder for the result")
    if outer.is_relative_to(inner) or inner.is_relative_to(outer):
        raise UsageError(f"one of {source} and {out} lies inside the other", "name a folder beside the source")


def refuse_foreign(out: Path) -> None:
    """UsageError where `out` holds anything but a conversion of ours."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file", "name a folder for the result")
    others = [path.name for path in out.iterdir() if path.name != WORK_FOLDER]
    others += [f"{WORK_FOLDER}/{path.name}" for path in (out / WORK_FOLDER).glob("*") if not _is_work(path)]
    if others and read_finished(out) is None and Journal.load(out / WORK_FOLDER) is None:
        raise UsageError(
            f"{out} is not empty, and not a conversion of ours: it holds {min(others)}", "name an empty or a new folder"
        )


def _is_work(path: Path) -> bool:
    return path.name in (_LOCK, JOURNAL) or path.suffix == ".part"


def remove_conversion(out: Path) -> None:
    """Remove what conversions into `out` wrote, and nothing else, but for manifest and journal.

    config.json goes first, so that no half passes for a whole. Manifest and journal say whose the files are: one of
    them is left at any moment, or a removal that is cut short could not be run again.
    """
    names = _own_names(out) - {MANIFEST}
    for name in (CONFIG, INDEX, SOURCE, *sorted(names)):
        (out / name).unlink(missing_ok=True)
    folders = {parent for name in names for parent in (out / name).parents if out in parent.parents}
    for folder in sorted(folders, reverse=True):  # the inner ones first
        remove_if_empty(folder)
    for path in (out / WORK_FOLDER).glob("*.part"):
        path.unlink()


def _own_names(out: Path) -> set[str]:
    """Names of the files that conversions wrote into `out`, by its manifest and its journal."""
    names: set[str] = set()
    if finished := read_finished(out):
        names |= {*finished.files, *({CARD} & finished.sources.keys())}
    if journal := Journal.load(out / WORK_FOLDER):
        names |= _names_asked(journal.request)
    return names


def _names_asked(request: Mapping[str, Any]) -> set[str]:
    """What a conversion with this request writes before its records; nothing of a request that is not of this kind."""
    try:
        copied = [name for name in request["source"]["files"] if not name.endswith(".safetensors")]
        return {name for name in (*request["shards"], *copied) if is_safe_name(name)}
    except (KeyError, TypeError, AttributeError):
        return set()


def remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def require_space(out: Path, plan: Plan) -> None:
    """NoSpaceError where the disk of `out` lacks room for what `plan` writes.

    The bytes of an earlier conversion into `out` count as room: it is resumed or removed.
    """
    require_space_for(out, plan.nbytes - _own_bytes(out))


def _own_bytes(out: Path) -> int:
    paths = [out / name for name in _own_names(out)] + list((out / WORK_FOLDER).glob("*.part"))
    return sum(path.stat().st_size for path in paths if path.is_file())


def require_space_for(folder: Path, needed: int) -> None:
    """NoSpaceError where the disk of `folder`, which need not exist yet, lacks room for `needed` bytes."""
    free = free_bytes(folder)
    if free < needed:
        raise NoSpaceError(
            f"{folder} needs {_in_units(needed)}, and its disk has {_in_units(free)} free",
            "free some space, or name a folder on another disk",
        )


def _in_units(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.2f} MB"


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    return shutil.disk_usage(_there(folder)).free


def require_writable(folder: Path) -> None:
    """MreaderError where `folder`, which need not exist yet, cannot be written into or made."""
    there = _there(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        what = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise MreaderError(f"{there}: {what}", "check the path and its permissions")


def _there(folder: Path) -> Path:
    """`folder`, or the innermost of those above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


@contextmanager
def claimed(work: Path, what: str) -> Iterator[None]:
    """The work folder `work` for one run at a time of what writes beside it, which does `what`; it goes with its end.

    After an error the folder stays only where there is a journal in it, to resume from.
    """
    with locked(work, what):
        try:
            yield
        except Exception:
            if not (work / JOURNAL).exists():
                shutil.rmtree(work, ignore_errors=True)
            raise
        shutil.rmtree(work, ignore_errors=True)  # another run may be trying the lock in it


@contextmanager
def locked(work: Path, what: str) -> Iterator[None]:
    """The folder `work`, made where it is not there, with a lock that goes with the process.

    UsageError where another process has the lock, which does `what`. Where an error ends it, the folders that were made
    for it go again, if they are empty.
    """
    created = [path for path in (work, *work.parents) if not path.exists()]
    try:
        while (lock := _lock_file(work, what)) is None:
            pass
        with lock:
            yield
    except Exception:
        _remove_created(created)
        raise


def lock(file: IO[bytes], what: str, place: str) -> None:
    """Lock `file` until it is closed, or the process ends.

    UsageError where another process has it, which does `what`; to do it as well takes another `place`.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(f"another {what} is running", f"wait for it to end, or name another {place}") from error


def remove_damaged(folder: Path, finished: Mapping[str, FileRecord], progress: Progress) -> set[str]:
    """The names of `finished` files that are missing or not as recorded; what there was of them is removed."""
    progress.begin("checking what is finished", sum(record.bytes for record in finished.values()))
    records = {folder / name: record for name, record in finished.items()}
    damaged = set()
    for path, fault in changed_files(records, progress.advance):
        progress.note(f"{path} {fault}: writing it again")
        path.unlink(missing_ok=True)
        damaged.add(path.relative_to(folder).as_posix())
    return damaged


def make_folder(folder: Path) -> None:
    """`folder` and those above it, there to stay even if the power fails."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        sync_folder(path.parent)


def _remove_created(created: list[Path]) -> None:
    for path in created:
        remove_if_empty(path)


def _lock_file(work: Path, what: str) -> BinaryIO | None:
    """The lock file in `work`, locked; None where another process is just removing it."""
    make_folder(work)
    try:
        file = (work / _LOCK).open("ab")
    except FileNotFoundError:
        return None
    try:
        lock(file, f"{what} into {work.parent}", "folder")
    except UsageError:
        file.close()
        raise
    except OSError:  # a file system without locks
        file.close()
        (work / _LOCK).unlink(missing_ok=True)
        raise
    if os.fstat(file.fileno()).st_nlink == 0:
        file.close()
        return None
    return file
