"""Conversion: a checkpoint in, an augmented checkpoint out, resumable at every moment.

Order of events, each durable before the next: journal; per shard: its bytes, its rename, the hashes of the source files
that it was made from, its journal line; then copied files, index, source record, config.json and, last, the manifest.
The first shard is begun before the journal, which says what torch it is computed with and where: torch takes seconds to
import, and nine tenths of the shard do without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mreader.device import pick_device, refuse_unknown_device
from mreader.errors import QuantizedError, SourceError, UnreachableError, UsageError
from mreader.formats.augmented import (
    DEFAULT_OPTIONS,
    MANIFEST,
    SOURCE,
    WORK_FOLDER,
    FormatOptions,
    describe_folder,
    record_source,
    shard_index,
)
from mreader.formats.checkpoint import CONFIG, INDEX, Checkpoint, open_checkpoint, remote_checkpoint
from mreader.formats.quantized import DEQUANTIZED_DTYPE, dequantized, require_package
from mreader.formats.safetensors_file import FileRecord, HashingFile
from mreader.hashing import BackgroundHashes, changed_files
from mreader.journal import Journal, refuse_other_request
from mreader.output import (
    CARD,
    Finished,
    claimed,
    folder_named,
    make_folder,
    os_errors_of,
    read_finished,
    refuse_foreign,
    refuse_overlap,
    remove_conversion,
    remove_damaged,
    require_space,
)
from mreader.plan import MAX_SHARD_BYTES, Plan, make_plan
from mreader.progress import Progress
from mreader.shards import ShardWriter

if TYPE_CHECKING:
    import torch

DTYPE = "bfloat16"  # what quantized weights become
_RECORDS = (INDEX, SOURCE, CONFIG, MANIFEST)  # in this order: what makes the folder a checkpoint comes last


@dataclass(frozen=True)
class Origin:
    """Where a source came from: a Hub id and the commit, or neither for a local folder."""

    repo: str | None = None
    revision: str | None = None


def plan_conversion(
    source: str | Path,
    options: FormatOptions = DEFAULT_OPTIONS,
    *,
    out: str | Path | None = None,
    revision: str | None = None,
    token: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
) -> Plan:
    """What `convert` would write, from headers alone: nothing is downloaded but headers, nothing is written.

    out:   where it would be written, to refuse what `convert` would refuse there, but for a disk that is too small
    dtype: as in `convert`
    """
    remote = _is_remote(source)
    if out is not None:
        out = folder_named(out, "result")
    if revision is not None and not remote:
        raise UsageError("--revision is for a Hub id, and the source is a folder", "leave --revision out")
    if out is not None:
        with os_errors_of(out):
            if not remote:
                refuse_overlap(Path(source), out)
            refuse_foreign(out)
    if not remote:
        return _plan(open_checkpoint(Path(source)), options, max_shard_bytes, dtype, f"{source} {out or 'OUT'}")
    from mreader.hub import remote_headers

    with _not_a_folder(str(source)):
        headers = remote_headers(str(source), revision=revision, token=token)
    checkpoint = remote_checkpoint(headers.files, headers.read_text, headers.header)
    return _plan(checkpoint, options, max_shard_bytes, dtype, f"{source} {out or 'OUT'}")


def convert(
    source: str | Path,
    out: str | Path,
    options: FormatOptions = DEFAULT_OPTIONS,
    *,
    revision: str | None = None,
    token: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Write the augmented checkpoint of `source` into the folder `out`; run again, it resumes where it was stopped.

    source:          folder, or Hub id (`revision`, `token`: which commit, and as whom)
    out:             folder that does not exist, is empty, or holds this same conversion, finished or not
    device:          "auto" (CUDA where there is one), "cpu" or "cuda:N": where sketch and recovery map are computed
    max_shard_bytes: size above which a shard is not filled further
    dtype:           "bfloat16" for a source whose weights are quantized, to dequantize them; None for all others, whose
                     weights go over bit for bit
    overwrite:       start again although `out` holds another conversion
    returns:         the plan that was carried out

    Raises SourceError, UnsupportedError, UsageError or NoSpaceError before anything is written where the source or the
    request is at fault; of a CUDA device that is not there, a new conversion learns when torch is imported, and removes
    what it had begun. Errors in the middle leave the journal and the finished shards to resume from.
    """
    progress, out = progress or Progress(), folder_named(out, "result")
    refuse_unknown_device(device)
    with os_errors_of(out):
        if _is_remote(source):
            pick_device(device)  # what it refuses should not be known only after a download
            plan, origin = _download(str(source), out, options, revision, token, max_shard_bytes, dtype)
        else:
            plan = plan_conversion(
                source, options, out=out, revision=revision, max_shard_bytes=max_shard_bytes, dtype=dtype
            )
            origin = Origin()
        _Conversion(plan, origin, out, device, max_shard_bytes, progress).run(overwrite)
    return plan


def is_repo_id(source: str) -> bool:
    """Whether `source` reads like a Hub id, `name` or `org/name`, and not like a path."""
    parts = source.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _is_remote(source: str | Path) -> bool:
    folder = folder_named(source, "source")
    return is_repo_id(str(source)) and not folder.exists()


def _plan(source: Checkpoint, options: FormatOptions, max_shard_bytes: int, dtype: str | None, folders: str) -> Plan:
    """`make_plan`, and what it leaves to be found in the middle of the work. `folders`: both, as the user has them."""
    if dtype not in (None, DTYPE):
        raise UsageError(f"dtype is {dtype}", f"{DTYPE} dequantizes weights; leave it out where they are not quantized")
    try:
        plan = make_plan(source if dtype is None else dequantized(source), options, max_shard_bytes)
    except QuantizedError as error:
        raise QuantizedError(error.method, f"mreader convert {folders} --dtype {DTYPE}") from error
    source = plan.source
    if source.quantized:
        require_package(source.quantized)
    if dtype is not None and plan.architecture.layers[0].dtype != DEQUANTIZED_DTYPE:
        raise UsageError(
            f"the weights are {plan.architecture.layers[0].dtype}, and not quantized: they go over bit for bit",
            "leave --dtype out",
        )
    for name in (MANIFEST, SOURCE):
        if name in source.files:
            raise SourceError(
                f"{name} lies in the source, whose config.json is not that of an augmented checkpoint",
                "remove it, or restore the source with `mreader restore`",
            )
    for layer in plan.architecture.layers:
        limit = min(layer.hidden, layer.experts * layer.channels)
        if options.rank > limit:
            raise UsageError(f"rank is {options.rank}, and layer {layer.number} allows 0 to {limit}", "lower --rank")
    return plan


def _download(
    repo: str,
    out: Path,
    options: FormatOptions,
    revision: str | None,
    token: str | None,
    max_shard_bytes: int,
    dtype: str | None,
) -> tuple[Plan, Origin]:
    """The plan of converting a Hub repository, which is downloaded if there is room for what it becomes."""
    from mreader.hub import fetch_snapshot

    with suppress(UnreachableError):  # what an earlier run left in the cache may be enough
        plan = plan_conversion(
            repo, options, out=out, revision=revision, token=token, max_shard_bytes=max_shard_bytes, dtype=dtype
        )
        require_space(out, plan)
    with _not_a_folder(repo):
        folder = fetch_snapshot(repo, revision=revision, token=token)
    refuse_overlap(folder, out)
    plan = _plan(open_checkpoint(folder), options, max_shard_bytes, dtype, f"{repo} {out}")
    return plan, Origin(repo, folder.name)


@contextmanager
def _not_a_folder(repo: str) -> Iterator[None]:
    """Without a connection nobody knows whether a Hub id was meant: what was typed may be a folder's name, misspelt."""
    try:
        yield
    except UnreachableError as error:
        raise UnreachableError(f"{repo} is no folder here; {error.cause}", error.remedy) from error


def _request(plan: Plan, origin: Origin, device: torch.device, max_shard_bytes: int) -> dict[str, Any]:
    """What decides the output: two runs with the same request write the same bytes."""
    import torch

    source = plan.source.on_disk
    return {
        "options": {**asdict(plan.options), "max_shard_bytes": max_shard_bytes, "device": device.type},
        "versions": {"mreader": version("mreader"), "torch": torch.__version__},
        "source": {
            **asdict(origin),
            "files": {
                **{name: sha256(text.encode()).hexdigest() for name, text in source.texts.items()},
                **{name: sha256(header.text).hexdigest() for name, header in source.headers.items()},
                **source.files,
            },
        },
        "shards": [shard.name for shard in plan.shards],
    }


class _Conversion:
    """One run of a conversion."""

    def __init__(
        self, plan: Plan, origin: Origin, out: Path, device: str, max_shard_bytes: int, progress: Progress
    ) -> None:
        self._plan, self._origin, self._out, self._progress = plan, origin, out, progress
        self._source, self._device_name, self._max_shard_bytes = plan.source, device, max_shard_bytes
        self._stamps = {name: self._stamp(name) for name in self._source_files()}

    def run(self, overwrite: bool) -> None:
        if not overwrite and self._is_complete_and_read_only():
            self._progress.note(f"{self._out} is complete already")
            return
        require_space(self._out, self._plan)
        work = self._out / WORK_FOLDER
        with claimed(work, "conversion"):
            journal = self._begun_anew(work) if overwrite else self._reopened(work) or self._resumed(work)
            try:
                if (self._out / MANIFEST).exists():
                    self._progress.note(f"{self._out} is complete already")
                else:
                    self._finish(self._write_shards(journal, work), work)
            except Exception:
                if self._is_empty():
                    Journal.discard(work)
                raise

    @cached_property
    def _device(self) -> torch.device:
        """Where to compute. Imports torch."""
        return pick_device(self._device_name)

    @cached_property
    def _request(self) -> dict[str, Any]:
        """What was asked for. Imports torch, which alone knows its version and where it can compute."""
        return _request(self._plan, self._origin, self._device, self._max_shard_bytes)

    def _is_empty(self) -> bool:
        return all(path.name == WORK_FOLDER for path in self._out.iterdir())

    def _is_complete_and_read_only(self) -> bool:
        """Whether nothing is to be done in a folder where nothing can be."""
        if os.access(self._out, os.W_OK) or (self._out / WORK_FOLDER).exists():
            return False
        finished = read_finished(self._out)
        if finished is None:
            return False
        self._refuse_other(finished)
        self._progress.begin("checking what is finished", sum(record.bytes for record in finished.files.values()))
        records = {self._out / name: record for name, record in finished.files.items()}
        return not any(changed_files(records, self._progress.advance))

    def _refuse_other(self, finished: Finished) -> None:
        """UsageError where what is finished is another conversion."""
        refuse_other_request(finished.request, {key: self._request[key] for key in finished.request}, self._out)
        self._refuse_changed_source(finished.sources, complete=True)

    def _begun_anew(self, work: Path) -> Journal:
        """The journal of a conversion in the place of another. The other's manifest goes last: until there is this
        journal, it says whose the folder is.
        """
        request = self._request  # what it refuses, it refuses before anything is removed
        remove_conversion(self._out)
        journal = Journal.create(work, request)
        self._remove_records()
        return journal

    def _reopened(self, work: Path) -> Journal | None:
        """The journal of a conversion that is complete; what is damaged in it is forgotten, and so is the manifest."""
        finished, journal = read_finished(self._out), Journal.load(work)
        if finished is None or (journal and journal.request == self._request and not journal.shards):
            return None  # with such a journal, the manifest is one that `_begun_anew` had no time to remove
        self._refuse_other(finished)
        damaged = remove_damaged(self._out, finished.files, self._progress)
        names = {shard.name for shard in self._plan.shards} - damaged
        shards = {name: record for name, record in finished.files.items() if name in names}
        journal = Journal.create(work, self._request, finished.sources, shards)
        if damaged:
            self._remove_records()
        return journal

    def _resumed(self, work: Path) -> Journal | None:
        """The journal of a conversion that was interrupted; shards that are damaged are forgotten."""
        journal = Journal.load(work)
        if journal is None:
            return None
        refuse_other_request(journal.request, self._request, self._out)
        self._refuse_changed_source(journal.sources, complete=False)
        for name in remove_damaged(self._out, journal.shards, self._progress):
            del journal.shards[name]
        self._remove_records()
        return journal

    def _refuse_changed_source(self, recorded: dict[str, FileRecord], complete: bool) -> None:
        present = self._source_files()
        differing = {name for name in recorded if name not in present}
        if complete:
            differing |= present.keys() - recorded.keys()
        self._progress.begin("checking the source", sum(present.get(name, 0) for name in recorded))
        records = {self._source.path / name: record for name, record in recorded.items() if name not in differing}
        for path, _ in changed_files(records, self._progress.advance):
            differing.add(path.relative_to(self._source.path).as_posix())
        if differing:
            raise UsageError(
                f"{min(differing)} of the source has changed since the conversion into {self._out} began",
                "use --overwrite to start again",
            )

    def _source_files(self) -> dict[str, int]:
        """Every source file that ends up in the result, in one form or another -> size."""
        source = self._source.on_disk
        return {
            **{name: header.nbytes for name, header in source.headers.items()},
            **{name: len(text.encode()) for name, text in source.texts.items()},
            **source.files,
        }

    def _stamp(self, name: str) -> tuple[int, int, int] | None:
        """What changes with the source file `name`; None where it is not there."""
        try:
            stat = (self._source.path / name).stat()
        except FileNotFoundError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _refuse_touched(self, names: Iterable[str]) -> None:
        """SourceError where one of these source files is no longer the one that the conversion began with: its parts
        would be of two states, and its hash of neither.
        """
        for name in names:
            if self._stamp(name) != self._stamps[name]:
                raise SourceError(
                    f"{name} changed while it was converted",
                    "leave the source alone while it is converted; --overwrite starts again",
                )

    def _write_shards(self, journal: Journal | None, work: Path) -> Journal:
        """Write what is missing; the journal of it, a new one where there is none yet."""
        done, known = (journal.shards, journal.sources) if journal else ({}, {})
        if journal is None:  # shards that an earlier run began, maybe of other names
            for part in work.glob("*.part"):
                part.unlink()
        todo = [shard for shard in self._plan.shards if shard.name not in done]
        self._progress.begin("converting", sum(shard.nbytes for shard in todo))
        unknown = {name: size for name, size in self._source_files().items() if name not in known}
        writer = ShardWriter(self._plan, todo, work, self._out, self._progress)
        steps = [writer.origins(shard) for shard in todo]

        def finish(journal: Journal, step: int) -> None:
            record = writer.finish(step)
            hashed = hashes.finish(step)
            self._refuse_touched(steps[step])
            self._finish_sources(journal, hashed)
            journal.finish_shard(todo[step].name, record)

        with (
            BackgroundHashes(self._source.path, unknown, [*steps, unknown]) as hashes,
            writer,
            ThreadPoolExecutor(1) as finisher,  # hash and disk come to a shard's end while the next one is computed
        ):
            finished: Future[None] | None = None
            for step in range(len(todo)):
                hashes.begin(step)
                writer.begin(step)
                # Here torch is imported, while the source is hashed and its weights move into the shard.
                journal = journal or Journal.create(work, self._request)
                writer.compute(step, self._device)
                if finished:
                    finished.result()
                finished = finisher.submit(finish, journal, step)
            if finished:
                finished.result()
            hashes.begin(len(todo))
            hashed = hashes.finish(len(todo))
            self._refuse_touched(self._stamps)
            assert journal is not None  # a plan has at least one shard
            self._finish_sources(journal, hashed)
        return journal

    def _finish_sources(self, journal: Journal, records: dict[str, FileRecord]) -> None:
        for name, record in records.items():
            if name not in journal.sources:
                journal.finish_source(name, record)

    def _finish(self, journal: Journal, work: Path) -> None:
        self._copy_files(journal, work)
        files = {**journal.shards, **{name: journal.sources[name] for name in self._source.files}}
        try:
            for name, value in self._records(journal, files):
                files[name] = _write_json(value, work / "json.part", self._out / name)
        except Exception:
            self._remove_records()
            raise

    def _records(self, journal: Journal, files: dict[str, FileRecord]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Index, source record, config and manifest; `files` is looked at when the manifest is made."""
        if len(self._plan.shards) > 1:
            yield INDEX, shard_index({shard.name: shard.tensors for shard in self._plan.shards})
        yield SOURCE, record_source(self._source.on_disk)
        yield CONFIG, {**self._source.config, "quantization_config": self._plan.options.config_entry()}
        self._refuse_touched(self._stamps)
        yield (
            MANIFEST,
            describe_folder(
                self._request["options"],
                self._request["versions"],
                {
                    **{key: self._request["source"][key] for key in ("repo", "revision")},
                    **({"dequantized_from": self._source.quantized} if self._source.quantized else {}),
                    "files": {name: journal.sources[name].entry() for name in sorted(journal.sources)},
                },
                {name: record for name, record in files.items() if name != CARD},
            ),
        )

    def _remove_records(self) -> None:
        """A folder that is not whole must not look like a checkpoint."""
        for name in reversed(_RECORDS):
            (self._out / name).unlink(missing_ok=True)

    def _copy_files(self, journal: Journal, work: Path) -> None:
        """Copy what is missing or damaged. A README.md that is there stays: it is the source's, or the user's own."""
        expected = {self._out / name: journal.sources[name] for name in self._source.files}
        for path, _ in list(changed_files(expected)):
            name = path.relative_to(self._out).as_posix()
            if name != CARD or not path.exists():
                self._copy(name, journal.sources[name], work)

    def _copy(self, name: str, expected: FileRecord, work: Path) -> None:
        target = self._out / name
        make_folder(target.parent)
        with HashingFile(work / "copy.part", target) as file, (self._source.path / name).open("rb") as original:
            while data := original.read(1 << 22):
                file.write(data)
            if file.record() != expected:
                raise SourceError(f"{name} changed while it was copied", "leave the source alone while it is converted")
            file.commit()


def _write_json(value: dict[str, Any], scratch: Path, target: Path) -> FileRecord:
    with HashingFile(scratch, target) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
        return file.commit()
