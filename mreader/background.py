"""Writing in the background, so that the next tensor is computed while the last one is hashed and written."""

import queue
import threading
from collections.abc import Callable

from mreader.formats.safetensors_file import HashingFile

_PIECE = 1 << 24  # bytes; hashing and writing release the interpreter lock for one piece at a time


class BackgroundWriter:
    """Writes to `file` from a thread, in order; leaving the `with` block waits until all is written, unless it failed.

    `put` waits while more than `limit` bytes are queued. An error of the thread is raised by the next `put`, or at the
    end.
    """

    def __init__(self, file: HashingFile, limit: int, progress: Callable[[int], None]) -> None:
        self._file, self._limit, self._progress = file, limit, progress
        self._queue: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._queued = 0
        self._room = threading.Condition()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mreader-writer", daemon=True)

    def __enter__(self) -> "BackgroundWriter":
        self._thread.start()
        return self

    def put(self, data: bytes | memoryview) -> None:
        with self._room:
            self._room.wait_for(lambda: self._queued <= self._limit)
            self._queued += len(data)
        if self._error is not None:
            raise self._error
        self._queue.put(data)

    def __exit__(self, kind: object, failure: BaseException | None, *_: object) -> None:
        if failure is not None:
            self._error = failure  # what is still queued is not worth writing
        self._queue.put(None)
        self._thread.join()
        if failure is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._write(data)
            except BaseException as error:
                self._error = error
            with self._room:  # also after an error, so that no `put` waits for ever
                self._queued -= len(data)
                self._room.notify()

    def _write(self, data: bytes | memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self._file.write(piece)
            self._progress(len(piece))
