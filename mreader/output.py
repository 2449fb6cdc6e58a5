"""The folder that a conversion writes into: whose it is, whether it has room, and how its errors read."""

import errno
import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mreader.errors import MreaderError, NoSpaceError, UsageError
from mreader.formats.augmented import MANIFEST, SOURCE, WORK_FOLDER
from mreader.formats.checkpoint import CONFIG, INDEX
from mreader.journal import Journal
from mreader.plan import Plan

CARD = "README.md"  # push-to-hub publishes another one, so no manifest pins it


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
        what = error.strerror or str(error)
        raise MreaderError(f"{error.filename or out}: {what}", "check the path and its permissions") from error


def refuse_foreign(out: Path) -> None:
    """UsageError where `out` holds anything that no conversion of ours put there."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file", "name a folder for the result")
    if any(out.iterdir()) and not (out / WORK_FOLDER).is_dir() and not (out / MANIFEST).is_file():
        raise UsageError(f"{out} is not empty, and not a conversion of ours", "name an empty or a new folder")


def remove_conversion(out: Path) -> None:
    """Remove what a conversion into `out` wrote, and nothing else; the manifest first: no half passes for a whole."""
    names: set[str] = set()
    if (out / MANIFEST).is_file():
        found = json.loads((out / MANIFEST).read_text())
        names |= {*found["files"], *({CARD} & found["source"]["files"].keys())}
    for path in (MANIFEST, CONFIG, INDEX, SOURCE):
        (out / path).unlink(missing_ok=True)
    journal = Journal.load(out / WORK_FOLDER)
    if journal is not None:
        copied = {name for name in journal.request["source"]["files"] if not name.endswith(".safetensors")}
        names |= {*journal.request["shards"], *copied}
    for name in names:
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / WORK_FOLDER, ignore_errors=True)


def require_space(out: Path, plan: Plan, done: int) -> None:
    """NoSpaceError where the disk of `out` lacks room for what `plan` writes beyond the `done` bytes that are there."""
    require_space_for(out, plan.nbytes - done)


def require_space_for(folder: Path, needed: int) -> None:
    """NoSpaceError where the disk of `folder`, which need not exist yet, lacks room for `needed` bytes."""
    free = free_bytes(folder)
    if free < needed:
        raise NoSpaceError(
            f"{folder} needs {needed / 1e9:,.2f} GB, and its disk has {free / 1e9:,.2f} GB free",
            "free some space, or name a folder on another disk",
        )


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of `folder`, which need not exist yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """One conversion into a folder at a time; the lock goes with the process."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another conversion into this folder is running", "wait for it to end") from error
        yield
