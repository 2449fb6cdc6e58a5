"""The journal of a conversion or a restore: what was asked for and what is finished, a JSON line each, on disk at once.

journal.jsonl in the work folder. The first line is the request; the others say which source file was hashed and which
shard is in place; of a restore, which source file is in place. A line that a crash cut short or left unreadable is
dropped with all after it: their work is done again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mreader.errors import UsageError
from mreader.formats.safetensors_file import FileRecord, sync_folder

JOURNAL = "journal.jsonl"


class Journal:
    """An open journal.

    request: what was asked for
    sources: source file -> its record; of a restore, those that are in place
    shards:  finished shard -> its record
    """

    def __init__(self, path: Path, request: Mapping[str, Any]) -> None:
        self.request = dict(request)
        self.sources: dict[str, FileRecord] = {}
        self.shards: dict[str, FileRecord] = {}
        self._path = path
        self._whole: int | None = None  # bytes of the whole lines of a journal that was loaded

    @classmethod
    def create(
        cls,
        folder: Path,
        request: Mapping[str, Any],
        sources: Mapping[str, FileRecord] | None = None,
        shards: Mapping[str, FileRecord] | None = None,
    ) -> "Journal":
        """A new journal in `folder`, of work that is partly done where `sources` and `shards` are given."""
        journal = cls(folder / JOURNAL, request)
        journal.sources, journal.shards = dict(sources or {}), dict(shards or {})
        lines: list[dict[str, Any]] = [{"request": journal.request}]
        lines += [{"source": name, **record.entry()} for name, record in journal.sources.items()]
        lines += [{"shard": name, **record.entry()} for name, record in journal.shards.items()]
        part = folder / f"{JOURNAL}.part"
        write_durably(part, "wb", lines)
        part.replace(journal._path)
        sync_folder(folder)
        return journal

    @classmethod
    def load(cls, folder: Path) -> "Journal | None":
        """The journal in `folder`, read only; None where there is none, or none that can be read."""
        try:
            data = (folder / JOURNAL).read_bytes()
        except FileNotFoundError:
            return None
        journal, length = None, 0
        for line in data.splitlines(keepends=True):
            try:
                entry = json.loads(line) if line.endswith(b"\n") else {}
                if journal is None:
                    journal = cls(folder / JOURNAL, entry["request"])
                else:
                    journal._apply(entry)
            except (ValueError, KeyError, TypeError):
                break
            length += len(line)
        if journal is not None:
            journal._whole = length
        return journal

    @staticmethod
    def discard(folder: Path) -> None:
        """Remove the journal in `folder`, if there is one."""
        (folder / JOURNAL).unlink(missing_ok=True)

    def finish_source(self, name: str, record: FileRecord) -> None:
        self._add({"source": name, **record.entry()})

    def finish_shard(self, name: str, record: FileRecord) -> None:
        self._add({"shard": name, **record.entry()})

    def _add(self, line: dict[str, Any]) -> None:
        self._append(line)
        self._apply(line)

    def _apply(self, line: Mapping[str, Any]) -> None:
        record = FileRecord.of(line)
        if "source" in line:
            self.sources[line["source"]] = record
        else:
            self.shards[line["shard"]] = record

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._whole is not None:
            os.truncate(self._path, self._whole)  # what a crash left behind the last whole line
            self._whole = None
        write_durably(self._path, "ab", [line])


def journal_line(line: Mapping[str, Any]) -> bytes:
    """As it stands in the file, its end included."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def write_durably(path: Path, mode: str, lines: Sequence[Mapping[str, Any]]) -> None:
    with path.open(mode) as file:
        file.writelines(map(journal_line, lines))
        file.flush()
        os.fsync(file.fileno())


def refuse_other_request(recorded: Mapping[str, Any], asked: Mapping[str, Any], out: Path) -> None:
    """UsageError, naming the first difference, unless both requests are the same."""
    for path, before, now in differences("", recorded, asked):
        raise UsageError(
            f"{out} holds a conversion with {path} = {before}, this one has {path} = {now}",
            "use the same source, options and versions to resume, or --overwrite to start again",
        )


def differences(path: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            difference
            for key in [*before, *(k for k in now if k not in before)]
            for difference in differences(f"{path}.{key}".lstrip("."), before.get(key), now.get(key))
        ]
    return [] if before == now else [(path, before, now)]
