"""Conversion: a checkpoint in, an augmented checkpoint out, resumable at every moment.

Order of events, each durable before the next: journal; per shard: its bytes, its rename, the hashes of the source files
that it was made from, its journal line; then copied files, index, source record, config.json and, last, the manifest.
"""

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mreader.augment import LayerAugmenter, refuse_non_finite
from mreader.background import BackgroundWriter
from mreader.errors import SourceError, UsageError
from mreader.formats.architectures import RoutedLayer
from mreader.formats.augmented import (
    DEFAULT_OPTIONS,
    MANIFEST,
    SOURCE,
    WORK_FOLDER,
    FormatOptions,
    record_source,
    shard_index,
)
from mreader.formats.checkpoint import CONFIG, INDEX, Checkpoint, open_checkpoint, remote_checkpoint
from mreader.formats.safetensors_file import (
    HashingFile,
    LazyTensors,
    as_bytes,
    data_order,
    encode_header,
    sha256_file,
)
from mreader.journal import FileRecord, Journal, refuse_other_request
from mreader.output import CARD, locked, os_errors_of, refuse_foreign, remove_conversion, require_space
from mreader.plan import MAX_SHARD_BYTES, SHARD_METADATA, Plan, Shard, make_plan
from mreader.progress import Progress

_HASH_THREADS = 8


@dataclass(frozen=True)
class Origin:
    """Where a source came from: a Hub id and the commit, or neither for a local folder."""

    repo: str | None = None
    revision: str | None = None


def plan_conversion(
    source: str | Path,
    options: FormatOptions = DEFAULT_OPTIONS,
    *,
    revision: str | None = None,
    token: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Plan:
    """What `convert` would write, from headers alone: nothing is downloaded but headers, nothing is written."""
    if Path(source).exists() or not is_repo_id(str(source)):
        return make_plan(open_checkpoint(Path(source)), options, max_shard_bytes)
    from mreader.hub import remote_headers

    remote = remote_headers(str(source), revision=revision, token=token)
    return make_plan(remote_checkpoint(remote.files, remote.read_text, remote.header), options, max_shard_bytes)


def convert(
    source: str | Path,
    out: str | Path,
    options: FormatOptions = DEFAULT_OPTIONS,
    *,
    revision: str | None = None,
    token: str | None = None,
    device: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Plan:
    """Write the augmented checkpoint of `source` into the folder `out`; run again, it resumes where it was stopped.

    source:          folder, or Hub id (`revision`, `token`: which commit, and as whom)
    out:             folder that does not exist, is empty, or holds this same conversion, finished or not
    device:          "auto" (CUDA where there is one), "cpu" or "cuda:N": where sketch and recovery map are computed
    max_shard_bytes: size above which a shard is not filled further
    overwrite:       start again although `out` holds another conversion
    returns:         the plan that was carried out

    Raises SourceError, UnsupportedError, UsageError or NoSpaceError before anything is written where the source or the
    request is at fault; errors in the middle leave the journal and the finished shards to resume from.
    """
    progress = progress or Progress()
    chosen = pick_device(device)
    folder, origin = _fetch(source, Path(out), revision, token, options, max_shard_bytes)
    plan = make_plan(open_checkpoint(folder), options, max_shard_bytes)
    request = _request(plan, origin, chosen, max_shard_bytes)
    out = Path(out)
    _refuse_overlap(folder, out)
    with os_errors_of(out):
        _Conversion(plan, out, request, chosen, progress).run(overwrite)
    return plan


def is_repo_id(source: str) -> bool:
    """Whether `source` reads like a Hub id, `name` or `org/name`, and not like a path."""
    parts = source.split("/")
    return len(parts) <= 2 and all(part and not part.startswith((".", "~")) for part in parts)


def pick_device(name: str) -> torch.device:
    """The torch device called "auto", "cpu" or "cuda[:N]"; UsageError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device {name}", "choose auto, cpu or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {name}: torch sees {torch.cuda.device_count()} CUDA devices", "choose cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported", "choose auto, cpu or cuda:N")
    return device


def _fetch(
    source: str | Path, out: Path, revision: str | None, token: str | None, options: FormatOptions, max_shard_bytes: int
) -> tuple[Path, Origin]:
    """The folder of `source`. A Hub id is planned from its headers first, so that no download is wasted."""
    if Path(source).exists() or not is_repo_id(str(source)):
        if revision is not None:
            raise UsageError("--revision is for a Hub id, and the source is a folder", "leave --revision out")
        return Path(source), Origin()
    from mreader.hub import fetch_snapshot, remote_headers

    remote = remote_headers(str(source), revision=revision, token=token)
    plan = make_plan(remote_checkpoint(remote.files, remote.read_text, remote.header), options, max_shard_bytes)
    refuse_foreign(out)
    require_space(out, plan, 0)
    return fetch_snapshot(str(source), revision=remote.commit, token=token), Origin(str(source), remote.commit)


def _refuse_overlap(folder: Path, out: Path) -> None:
    inner, outer = folder.resolve(), out.resolve()
    if inner == outer:
        raise UsageError("SOURCE and OUT are the same folder", "name another folder for the result")
    if outer.is_relative_to(inner) or inner.is_relative_to(outer):
        raise UsageError("one of SOURCE and OUT lies inside the other", "name a folder beside the source")


def _request(plan: Plan, origin: Origin, device: torch.device, max_shard_bytes: int) -> dict[str, Any]:
    """What decides the output: two runs with the same request write the same bytes."""
    source = plan.source
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
        self, plan: Plan, out: Path, request: dict[str, Any], device: torch.device, progress: Progress
    ) -> None:
        self._plan, self._out, self._request = plan, out, request
        self._device, self._progress = device, progress
        self._work = out / WORK_FOLDER

    @property
    def _source(self) -> Checkpoint:
        return self._plan.source

    @property
    def _queued_bytes(self) -> int:
        """What may wait to be written: one layer, most of it views of the mapped source."""
        return max(
            sum(self._source.spec(name).nbytes for name in layer.tensors) for layer in self._plan.architecture.layers
        )

    def run(self, overwrite: bool) -> None:
        refuse_foreign(self._out)
        if overwrite:
            remove_conversion(self._out)
        elif self._is_complete():
            self._progress.note(f"{self._out} is complete already")
            return
        journal = Journal.load(self._work)
        if journal is not None:
            refuse_other_request(journal.request, self._request, self._out)
            self._forget_damaged(journal)
        done = sum(record.bytes for record in journal.shards.values()) if journal else 0
        require_space(self._out, self._plan, done)
        created = [path for path in (self._out, *self._out.parents) if not path.exists()]
        self._work.mkdir(parents=True, exist_ok=True)
        with locked(self._work):
            journal = journal or Journal.create(self._work, self._request)
            try:
                self._write(journal)
            except Exception:
                if not journal.shards:
                    self._remove_traces(created)
                raise

    def _is_complete(self) -> bool:
        """Whether OUT holds this very conversion, finished. UsageError where it holds another one."""
        manifest = self._out / MANIFEST
        if not manifest.exists():
            return False
        found = json.loads(manifest.read_text())
        recorded = {key: found[key] for key in ("options", "versions")}
        refuse_other_request(recorded, {key: self._request[key] for key in recorded}, self._out)
        hashes = {name: entry["sha256"] for name, entry in found["source"]["files"].items()}
        refuse_other_request({"source": hashes}, {"source": self._hash_everything()}, self._out)
        shutil.rmtree(self._work, ignore_errors=True)
        return True

    def _hash_everything(self) -> dict[str, str]:
        names = self._source_files()
        self._progress.begin("checking the source", sum(names.values()))
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            hashes = pool.map(lambda name: sha256_file(self._source.path / name, self._progress.advance), names)
            return dict(zip(names, hashes, strict=True))

    def _source_files(self) -> dict[str, int]:
        """Every source file that ends up in the result, in one form or another -> size."""
        source = self._source
        return {
            **{name: header.nbytes for name, header in source.headers.items()},
            **{name: len(text.encode()) for name, text in source.texts.items()},
            **source.files,
        }

    def _forget_damaged(self, journal: Journal) -> None:
        """Compare the journal with what is there: a changed source is refused, a damaged shard written again."""
        records = {self._source.path / name: record for name, record in journal.sources.items()}
        records |= {self._out / name: record for name, record in journal.shards.items()}
        self._progress.begin("checking what is finished", sum(record.bytes for record in records.values()))
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            good = dict(zip(records, pool.map(self._is_unchanged, records.items()), strict=True))
        for name in journal.sources:
            if not good[self._source.path / name]:
                raise UsageError(
                    f"{name} of the source has changed since the conversion into {self._out} began",
                    "use --overwrite to start again",
                )
        journal.shards = {name: record for name, record in journal.shards.items() if good[self._out / name]}

    def _is_unchanged(self, item: tuple[Path, FileRecord]) -> bool:
        path, record = item
        if not path.exists() or path.stat().st_size != record.bytes:
            return False
        return sha256_file(path, self._progress.advance) == record.sha256

    def _write(self, journal: Journal) -> None:
        todo = [shard for shard in self._plan.shards if shard.name not in journal.shards]
        self._progress.begin("converting", sum(shard.nbytes for shard in todo))
        with _SourceHashes(self._source.path, self._source_files(), journal.sources) as hashes:
            for shard in todo:
                record = self._write_shard(shard)
                for name in self._origins(shard):
                    if name not in journal.sources:
                        journal.finish_source(name, hashes[name])
                journal.finish_shard(shard.name, record)
            for name in self._source_files():
                if name not in journal.sources:
                    journal.finish_source(name, hashes[name])
        self._finish(journal)

    def _origins(self, shard: Shard) -> list[str]:
        """The source files that `shard` was made from."""
        tensors = [name for layer, _ in self._layers_of(shard).values() for name in layer.tensors]
        tensors += [name for name in shard.tensors if name in self._source.where]
        return list(dict.fromkeys(self._source.where[name] for name in tensors))

    def _layers_of(self, shard: Shard) -> dict[str, tuple[RoutedLayer, str]]:
        """Tensor of an augmented layer -> (layer, its name below the experts' prefix)."""
        layers = {layer.prefix: layer for layer in self._plan.architecture.layers}
        split = {name: name.rpartition(".") for name in shard.tensors}
        return {name: (layers[prefix], part) for name, (prefix, _, part) in split.items() if prefix in layers}

    def _write_shard(self, shard: Shard) -> FileRecord:
        layers = self._layers_of(shard)
        with HashingFile(self._work / f"{shard.name}.part", self._out / shard.name) as file:
            with BackgroundWriter(file, self._queued_bytes, self._progress.advance) as writer:
                writer.put(encode_header(shard.tensors, SHARD_METADATA))
                for run in _runs(data_order(shard.tensors), layers):
                    self._write_run(writer, run, layers)
            return FileRecord(*file.commit())

    def _write_run(self, writer: BackgroundWriter, run: list[str], layers: dict[str, tuple[RoutedLayer, str]]) -> None:
        """Tensors that follow each other and belong to one layer, or one copied tensor."""
        with LazyTensors(self._source.path, self._source.where) as tensors:
            if run[0] not in layers:
                refuse_non_finite(run[0], tensors[run[0]])
                writer.put(as_bytes(tensors[run[0]]))
                return
            layer = layers[run[0]][0]
            self._progress.layer(layer.ordinal + 1, len(self._plan.architecture.layers))
            augmenter = LayerAugmenter(layer, tensors, self._plan.options, self._device)
            for name in run:
                for piece in augmenter.pieces(layers[name][1]):
                    writer.put(as_bytes(piece))

    def _finish(self, journal: Journal) -> None:
        files = dict(journal.shards)
        for name, size in self._source.files.items():
            files[name] = self._copy(name, size, journal.sources[name])
        for name, value in self._records():
            files[name] = self._write_json(name, value)
        manifest = {
            "format_version": self._plan.options.config_entry()["format_version"],
            **{key: self._request[key] for key in ("options", "versions")},
            "source": {
                **{key: self._request["source"][key] for key in ("repo", "revision")},
                "files": {name: journal.sources[name].entry() for name in sorted(journal.sources)},
            },
            "files": {name: files[name].entry() for name in sorted(files) if name != CARD},
        }
        self._write_json(MANIFEST, manifest)
        shutil.rmtree(self._work)

    def _records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if len(self._plan.shards) > 1:
            yield INDEX, shard_index({shard.name: shard.tensors for shard in self._plan.shards})
        yield SOURCE, record_source(self._source)
        yield CONFIG, {**self._source.config, "quantization_config": self._plan.options.config_entry()}

    def _copy(self, name: str, size: int, expected: FileRecord) -> FileRecord:
        target = self._out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with HashingFile(self._work / "copy.part", target) as file, (self._source.path / name).open("rb") as original:
            while data := original.read(1 << 22):
                file.write(data)
            if file.record() != (expected.sha256, size):
                raise SourceError(f"{name} changed while it was copied", "leave the source alone while it is converted")
            return FileRecord(*file.commit())

    def _write_json(self, name: str, value: dict[str, Any]) -> FileRecord:
        with HashingFile(self._work / "json.part", self._out / name) as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
            return FileRecord(*file.commit())

    def _remove_traces(self, created: list[Path]) -> None:
        """Nothing is finished: leave no more behind than there was before."""
        shutil.rmtree(self._work, ignore_errors=True)
        for path in created:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _runs(names: list[str], layers: dict[str, tuple[RoutedLayer, str]]) -> Iterator[list[str]]:
    """`names` cut where the layer changes; copied tensors stand alone."""
    run: list[str] = []
    for name in names:
        if run and (name not in layers or run[0] not in layers or layers[name][0] is not layers[run[0]][0]):
            yield run
            run = []
        run.append(name)
    if run:
        yield run


class _SourceHashes:
    """sha256 of source files, computed in the background; `hashes[name]` waits for it."""

    def __init__(self, folder: Path, files: dict[str, int], known: dict[str, FileRecord]) -> None:
        self._pool = ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1))
        self._records: dict[str, Future[FileRecord]] = {
            name: self._pool.submit(lambda n, s: FileRecord(sha256_file(folder / n), s), name, size)
            for name, size in files.items()
            if name not in known
        }

    def __enter__(self) -> "_SourceHashes":
        return self

    def __getitem__(self, name: str) -> FileRecord:
        return self._records[name].result()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
