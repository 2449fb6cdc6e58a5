"""Finished runs in a file: a comparison that was interrupted does not begin again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from mreader.device import pick_device
from mreader.errors import UsageError
from mreader.formats.safetensors_file import sha256_file
from mreader.journal import differences, journal_line, write_durably
from mreader.output import lock
from mreader.selectors.jobs import Job, Reader
from mreader.selectors.runs import Run
from mreader.selectors.subject import Texts, windows_sha256


class Ledger:
    """Runs of one model on one text; this one forgets them when the process ends."""

    def __init__(self) -> None:
        self._runs: dict[Job, Run] = {}

    def find(self, job: Job) -> Run | None:
        """The finished run of the job, if there is one."""
        return self._runs.get(job)

    def add(self, run: Run) -> None:
        """A finished run."""
        self._runs[run.job] = run


class FileLedger(Ledger):
    """The same in a file of JSON lines: what all runs have in common, and then each run as soon as it is done.

    common: what a run's figures depend on beside its job

    A last line that a crash cut short is dropped. Raises UsageError where the file holds runs that have something else
    in common, where another line holds no run, and where it is no such file or cannot be written.
    """

    def __init__(self, file: Path, common: Mapping[str, Any]) -> None:
        super().__init__()
        self._file = file
        try:
            self._open(common)
        except OSError as error:
            raise _unwritable(file, error) from error

    def add(self, run: Run) -> None:
        super().add(run)
        write_durably(self._file, "ab", [asdict(run)])

    def _open(self, common: Mapping[str, Any]) -> None:
        data = self._file.read_bytes() if self._file.exists() else b""
        if journal_line(common).startswith(data):  # new, or cut short before there was a run
            write_durably(self._file, "wb", [common])
        elif (whole := self._load(data, common)) < len(data):
            os.truncate(self._file, whole)

    def _load(self, data: bytes, common: Mapping[str, Any]) -> int:
        """Take in what the file holds; returns the bytes of its whole lines."""
        lines = data.splitlines(keepends=True)
        self._refuse_other(_parsed(lines[0]), common)
        whole = len(lines[0])
        for number, line in enumerate(lines[1:], 2):
            if not line.endswith(b"\n"):
                break
            run = _run_of(_parsed(line))
            if run is None:
                raise UsageError(f"line {number} of {self._file} holds no row", "mend or remove it, or name a new file")
            super().add(run)
            whole += len(line)
        return whole

    def _refuse_other(self, found: dict[str, Any] | None, common: Mapping[str, Any]) -> None:
        if found is None or found.keys() != common.keys():
            raise UsageError(f"{self._file} holds no rows of a comparison", "name a new file")
        for name, before, now in differences("", found, common):
            raise UsageError(
                f"{self._file} holds rows with {name} = {before}, this comparison has {name} = {now}",
                "name another file",
            )


def _unwritable(file: Path, error: OSError) -> UsageError:
    return UsageError(f"{file} cannot be written: {error.strerror or error}", "choose another file")


@contextmanager
def open_ledger(file: Path, common: Mapping[str, Any]) -> Iterator[Ledger]:
    """The runs in a file, for one comparison at a time. UsageError where another one has it, and as FileLedger."""
    try:
        opened = file.open("ab")
    except OSError as error:
        raise _unwritable(file, error) from error
    with opened:
        lock(opened, f"comparison with --rows {file}", "file")
        yield FileLedger(file, common)


def in_common(model: Path, texts: Texts, dtype: str, device: str) -> dict[str, Any]:
    """What the figures of all runs of a comparison depend on: weights and texts by their sha256, and how it is run."""
    files = sorted([*model.glob("*.safetensors"), model / "config.json"])
    return {
        "mreader": version("mreader"),
        "model": {file.name: sha256_file(file) for file in files if file.is_file()},
        "text": _described(texts.evaluated),
        "calibration": None if texts.calibration is None else _described(texts.calibration),
        "dtype": dtype,
        "device": pick_device(device).type,
    }


def _described(windows: Tensor) -> dict[str, Any]:
    return {"windows": windows.shape[0], "length": windows.shape[1], "sha256": windows_sha256(windows)}


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a whole line."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _run_of(entry: dict[str, Any] | None) -> Run | None:
    """The run that a line holds; None for a line that holds none."""
    try:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in (entry or {}).items()
        }
        job = dict(values.pop("job"))
        return Run(Job(**{**job, "reader": Reader(**job["reader"])}), **values)
    except (KeyError, TypeError, ValueError):
        return None
