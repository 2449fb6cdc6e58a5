"""sha256 of many files side by side: hashing releases the interpreter lock, so threads are enough."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from mreader.formats.safetensors_file import sha256_file
from mreader.journal import FileRecord

_THREADS = min(8, os.cpu_count() or 1)


def changed_files(
    records: Mapping[Path, FileRecord], progress: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[Path, str]]:
    """The files that are not as recorded, each with what is wrong with it. Sizes come first, then nothing more is read
    than the caller asks for.
    """
    whole = {}
    for path, record in records.items():
        if not path.is_file():
            yield path, "is missing"
        elif (size := path.stat().st_size) != record.bytes:
            yield path, f"has {size:,} bytes, not {record.bytes:,}"
        else:
            whole[path] = record.sha256
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for path, found in zip(whole, pool.map(lambda path: sha256_file(path, progress), whole), strict=True):
            if found != whole[path]:
                yield path, "has another sha256"
    finally:
        pool.shutdown(cancel_futures=True)


class BackgroundHashes:
    """sha256 of the files in `folder`, in the background and in order; `hashes[name]` waits for one.

    Leaving the `with` block abandons what is not done.
    """

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self._folder = folder
        self._left = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._records: dict[str, Future[FileRecord]] = {
            name: self._pool.submit(self._record, name, size) for name, size in files.items()
        }

    def __enter__(self) -> "BackgroundHashes":
        return self

    def __getitem__(self, name: str) -> FileRecord:
        return self._records[name].result()

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._pool.shutdown(cancel_futures=True)

    def _record(self, name: str, size: int) -> FileRecord:
        return FileRecord(sha256_file(self._folder / name, self._go_on), size)

    def _go_on(self, _: int) -> None:
        if self._left.is_set():
            raise InterruptedError("nobody waits for this hash any more")
