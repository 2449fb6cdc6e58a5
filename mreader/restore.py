"""The source checkpoint back from an augmented one: the same files, byte for byte, resumable at every moment.

Order of events, each durable before the next: journal; per file: its bytes, its rename, its journal line; config.json
last, without which nothing passes for whole; then the journal goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mreader.errors import UsageError, VerifyError
from mreader.formats.augmented import Augmented
from mreader.formats.checkpoint import CONFIG
from mreader.formats.safetensors_file import FileRecord, HashingFile, Header
from mreader.formats.tensors import LazyTensors, as_bytes
from mreader.journal import Journal
from mreader.native import Piece, open_to_verify, source_pieces
from mreader.output import (
    CARD,
    claimed,
    folder_named,
    make_folder,
    os_errors_of,
    refuse_overlap,
    remove_damaged,
    require_space_for,
)
from mreader.progress import Progress
from mreader.verify import check_hashes

_WORK_FOLDER = ".mreader-restore"
_PART = "part"


def restore(out: str | Path, destination: str | Path, *, progress: Progress | None = None) -> list[str]:
    """Write the files that `out` was converted from into `destination`, each checked against its recorded sha256; run
    again, it resumes where it was stopped: finished files that still have their sha256 stay.

    Of a quantized source it writes the dequantized model instead, in files of the same names, and says so: the weights
    of the source itself are not in `out`, whose own files are then what is checked.

    destination: folder that does not exist, is empty, or holds a restore of the same source that was interrupted
    returns:     names of source files that could not be restored: a README.md that push-to-hub has replaced

    Raises VerifyError where a file would differ from the source's, UsageError where `destination` is in use. Errors in
    the middle leave the journal and the finished files to resume from.
    """
    progress, destination = progress or Progress(), folder_named(destination, "destination")
    augmented = open_to_verify(folder_named(out, "checkpoint"))
    refuse_overlap(augmented.folder, destination)
    with os_errors_of(destination):
        return _Restore(augmented, destination, progress).run()


@dataclass(frozen=True)
class _Restore:
    """One run of a restore."""

    augmented: Augmented
    destination: Path
    progress: Progress

    def run(self) -> list[str]:
        self._refuse_used()
        with claimed(self._work, "restore"):
            journal = self._interrupted()
            if self.augmented.source.packed:
                check_hashes(self.augmented, self.progress)
                self.progress.note("the source is quantized: this restores the dequantized model, in BF16")
            if journal:
                self._keep_finished(journal)
            todo = {name: size for name, size in self._sizes.items() if journal is None or name not in journal.sources}
            require_space_for(self.destination, sum(todo.values()))
            journal = journal or Journal.create(self._work, self._request)
            self.progress.begin("restoring", sum(todo.values()))
            try:
                return [name for name in todo if not self._write(name, journal)]
            except Exception:
                if not self._others():
                    Journal.discard(self._work)
                raise

    @property
    def _work(self) -> Path:
        return self.destination / _WORK_FOLDER

    @property
    def _request(self) -> dict[str, Any]:
        """What decides the files that are written: those of the source."""
        return {"files": self.augmented.manifest["source"]["files"]}

    @property
    def _sizes(self) -> dict[str, int]:
        """File to write -> size, in the order of writing."""
        source = self.augmented.source
        texts = {name: len(text.encode()) for name, text in sorted(source.texts.items(), reverse=True)}
        return {**source.files, **{name: header.nbytes for name, header in source.headers.items()}, **texts}

    def _others(self) -> list[str]:
        return [path.name for path in self.destination.iterdir() if path.name != _WORK_FOLDER]

    def _refuse_used(self) -> None:
        """UsageError, with nothing touched, where the destination holds anything but a restore."""
        if self.destination.exists() and not self.destination.is_dir():
            raise UsageError(f"{self.destination} is a file", "name a folder for the result")
        if self.destination.is_dir() and not self._work.is_dir():
            self._refuse_others()

    def _refuse_others(self) -> None:
        if self._others():
            raise UsageError(f"{self.destination} is not empty", "name an empty or a new folder")

    def _interrupted(self) -> Journal | None:
        """The journal of a restore that was interrupted. UsageError where it was one of another source, or where there
        are files and no journal: another restore has ended since `_refuse_used`.
        """
        journal = Journal.load(self._work)
        if journal is None:
            self._refuse_others()
        elif journal.request != self._request:
            raise UsageError(
                f"{self.destination} holds an unfinished restore of another checkpoint",
                "name an empty or a new folder, or remove this one",
            )
        return journal

    def _keep_finished(self, journal: Journal) -> None:
        """Remove, and forget, what is not finished or damaged: now, or there would not be room for both."""
        sizes = self._sizes
        journal.sources = {name: record for name, record in journal.sources.items() if name in sizes and name != CONFIG}
        for name in (CONFIG, *(sizes.keys() - journal.sources.keys()), f"{_WORK_FOLDER}/{_PART}"):
            (self.destination / name).unlink(missing_ok=True)
        for name in remove_damaged(self.destination, journal.sources, self.progress):
            del journal.sources[name]

    def _write(self, name: str, journal: Journal) -> bool:
        """Write the source's file `name`; False for a README.md that is not the source's, which is left out."""
        if name == CARD and not (self.augmented.folder / CARD).exists():
            return False
        with HashingFile(self._work / _PART, self.destination / name) as file:
            for data in self._data(name):
                file.write(data)
                self.progress.advance(len(data))
            if self._is_other(name, file.record()):
                if name == CARD:
                    return False
                raise VerifyError(
                    f"{name} would differ from the source's file of that name",
                    "`mreader verify` says where the checkpoint is damaged; mend it, and run the same command again",
                )
            make_folder((self.destination / name).parent)
            journal.finish_source(name, file.commit())
        return True

    def _is_other(self, name: str, record: FileRecord) -> bool:
        """Whether what was written is not the source's file. Of dequantized weights there is no record."""
        source = self.augmented.source
        if source.packed and name not in source.files:
            return False
        return record != FileRecord.of(self.augmented.manifest["source"]["files"][name])

    def _data(self, name: str) -> Iterator[bytes | memoryview]:
        source = self.augmented.source
        if name in source.headers:
            yield from self._shard(source.headers[name])
        elif name in source.texts:
            yield source.texts[name].encode()
        elif (original := self.augmented.folder / name).exists():
            with original.open("rb") as file:
                while chunk := file.read(1 << 22):
                    yield chunk
        else:
            raise VerifyError(f"{name} of the source is missing", "download the checkpoint again")

    def _shard(self, header: Header) -> Iterator[bytes | memoryview]:
        pieces = source_pieces(self.augmented.architecture.layers)
        yield len(header.text).to_bytes(8, "little") + header.text
        for name in header.tensors:
            with self.augmented.tensors() as tensors:
                for piece in _tensors(tensors, name, pieces):
                    yield as_bytes(piece)


def _tensors(tensors: LazyTensors, name: str, pieces: dict[str, list[Piece]]) -> Iterator[Tensor]:
    if name not in pieces:
        yield tensors[name]
        return
    for piece in pieces[name]:
        yield piece.data(tensors)
