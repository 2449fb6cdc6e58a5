"""sha256 of many files side by side: hashing releases the interpreter lock, so threads are enough."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from mreader.formats.safetensors_file import FileRecord, sha256_file

_THREADS = min(8, len(os.sched_getaffinity(0)))


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
    """sha256 of the files in `folder`, in the background, step by step, as they are needed by other work.

    files: name -> size
    steps: the names that each step needs; a name may be needed more than once

    Hashing and the other work read the same files at about the same time, so that one finds them in memory where the
    other has just read them. A step is begun one step ahead; further ahead where the hashes of a step were not done
    when they were asked for, since more files at a time are the only way to hash faster. Leaving the `with` block
    abandons what is not done.
    """

    def __init__(self, folder: Path, files: Mapping[str, int], steps: Sequence[Collection[str]]) -> None:
        self._folder, self._files = folder, files
        self._steps = [[name for name in step if name in files] for step in steps]
        self._ahead = 1
        self._left = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS)
        self._records: dict[str, Future[FileRecord]] = {}

    def __enter__(self) -> "BackgroundHashes":
        return self

    def begin(self, step: int) -> None:
        """Start with the files of `step`, and with those of the next."""
        for name in chain.from_iterable(self._steps[step : step + 1 + self._ahead]):
            if name not in self._records:
                self._records[name] = self._pool.submit(self._record, name, self._files[name])

    def finish(self, step: int) -> dict[str, FileRecord]:
        """Wait for the files of `step`, which was begun."""
        futures = {name: self._records[name] for name in self._steps[step]}
        if not all(future.done() for future in futures.values()):
            self._ahead += 1
        return {name: future.result() for name, future in futures.items()}

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._pool.shutdown(cancel_futures=True)

    def _record(self, name: str, size: int) -> FileRecord:
        return FileRecord(sha256_file(self._folder / name, self._go_on), size)

    def _go_on(self, _: int) -> None:
        if self._left.is_set():
            raise InterruptedError("nobody waits for this hash any more")
