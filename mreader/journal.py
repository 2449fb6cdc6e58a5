"""The journal of a conversion: what was asked for and what is finished, one JSON line each, flushed to disk.

OUT/.mreader/journal.jsonl. The first line is the request; the others say which source file was hashed and
which shard is in place. A line that a crash cut short is dropped: its work is done again.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mreader.errors import UsageError

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class FileRecord:
    """sha256 in hexadecimal and size in bytes of a finished file."""

    sha256: str
    bytes: int

    def entry(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "bytes": self.bytes}


class Journal:
    """An open journal.

    request: what was asked for
    sources: source file -> its record
    shards:  finished shard -> its record
    """

    def __init__(self, path: Path, request: Mapping[str, Any]) -> None:
        self.request = dict(request)
        self.sources: dict[str, FileRecord] = {}
        self.shards: dict[str, FileRecord] = {}
        self._path = path

    @classmethod
    def create(cls, folder: Path, request: Mapping[str, Any]) -> "Journal":
        """A new journal in `folder`."""
        journal = cls(folder / JOURNAL, request)
        journal._append({"request": journal.request})
        return journal

    @classmethod
    def load(cls, folder: Path) -> "Journal | None":
        """The journal in `folder`; None where there is none with a whole first line."""
        path = folder / JOURNAL
        if not path.exists():
            return None
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            return None
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        journal = cls(path, lines[0]["request"])
        for line in lines[1:]:
            journal._apply(line)
        return journal

    def finish_source(self, name: str, record: FileRecord) -> None:
        self._add({"source": name, **record.entry()})

    def finish_shard(self, name: str, record: FileRecord) -> None:
        self._add({"shard": name, **record.entry()})

    def _add(self, line: dict[str, Any]) -> None:
        self._append(line)
        self._apply(line)

    def _apply(self, line: Mapping[str, Any]) -> None:
        record = FileRecord(line["sha256"], line["bytes"])
        if "source" in line:
            self.sources[line["source"]] = record
        else:
            self.shards[line["shard"]] = record

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def refuse_other_request(recorded: Mapping[str, Any], asked: Mapping[str, Any], out: Path) -> None:
    """UsageError, naming the first difference, unless both requests are the same."""
    for path, before, now in _differences("", recorded, asked):
        raise UsageError(
            f"{out} holds a conversion with {path} = {before}, this one has {path} = {now}",
            "use the same source and options to resume, or --overwrite to start again",
        )


def _differences(path: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            difference
            for key in [*before, *(k for k in now if k not in before)]
            for difference in _differences(f"{path}.{key}".lstrip("."), before.get(key), now.get(key))
        ]
    return [] if before == now else [(path, before, now)]
