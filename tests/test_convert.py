"""What a conversion writes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import killing
import pytest
import torch
from commands import contents, mreader
from safetensors import safe_open
from sources import INDEX, all_tensors, copied, edit_json, make_source, read_json, shards

import mreader as mreader_package
from mreader import FormatOptions, convert
from mreader.convert import plan_conversion
from mreader.errors import SourceError
from mreader.hashing import BackgroundHashes
from mreader.output import claimed
from mreader.plan import RECOVERY, SKETCH
from mreader.progress import Progress

PARTS = {
    "gate_up_proj": (torch.bfloat16, (6, 2, 80, 192)),
    "down_proj": (torch.bfloat16, (6, 80, 192)),
    "sketch_codes": (torch.uint8, (6, 2, 256, 32)),
    "sketch_scales": (torch.float16, (6, 2, 2, 80)),
    "sketch_errors": (torch.bfloat16, (6, 2, 2, 80)),
    "sketch_signs": (torch.int8, (192,)),
    "down_norms": (torch.float16, (6, 80)),
    "recovery_basis": (torch.float16, (192, 32)),
    "recovery_coeffs": (torch.float16, (6, 80, 32)),
}
SIDE_FILES = {
    "tokenizer.json",
    "chat template.jinja",
    "Lizenz-größe.txt",
    "modeling_custom.py",
    "README.md",
    "nested/deeper/vocabulary.txt",
    "generation_config.json",
}
RECORDS = {"config.json", "mreader_manifest.json", "mreader_source.json"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With files of other formats and of earlier saves, which do not belong to the checkpoint."""
    folder = make_source(tmp_path_factory.mktemp("source") / "source")
    shutil.copy(shards(folder)[0], folder / "model-00001-of-00009.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder


@pytest.fixture(scope="module")
def out(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "not" / "there" / "yet"
    convert(source, folder, device="cpu", max_shard_bytes=500_000)
    return folder


def source_tensors(folder: Path) -> dict[str, torch.Tensor]:
    named = set(read_json(folder / INDEX)["weight_map"].values())
    found: dict[str, torch.Tensor] = {}
    for name in named:
        with safe_open(folder / name, "pt") as file:
            found |= {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118
    return found


def test_the_folder_holds_the_checkpoint_and_nothing_else(out: Path) -> None:
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    count = len(shards(out))
    assert count > 3
    expected = {f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)}
    assert names == SIDE_FILES | RECORDS | {INDEX} | expected


def test_other_files_are_copied_as_they_are(source: Path, out: Path) -> None:
    for name in SIDE_FILES:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_experts_are_fused_and_their_weights_keep_every_bit(source: Path, out: Path) -> None:
    before, after = source_tensors(source), all_tensors(out)
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts"
        for part, (dtype, shape) in PARTS.items():
            assert after[f"{prefix}.{part}"].dtype == dtype
            assert tuple(after[f"{prefix}.{part}"].shape) == shape
        for expert in range(6):
            gate, up, down = (before.pop(f"{prefix}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down"))
            assert torch.equal(after[f"{prefix}.gate_up_proj"][expert], torch.stack([gate, up]))
            assert torch.equal(after[f"{prefix}.down_proj"][expert], down.T)
    others = {name: tensor for name, tensor in after.items() if ".experts." not in name}
    assert before.keys() == others.keys()
    assert all(torch.equal(others[name], tensor) for name, tensor in before.items())
    assert len(after) == len(others) + 3 * len(PARTS)


def test_config_is_the_sources_and_one_entry_more(source: Path, out: Path) -> None:
    config = read_json(out / "config.json")
    assert config.pop("quantization_config") == {
        "quant_method": "mreader",
        "format_version": 1,
        "codes": "ternary",
        "block": 128,
        "rank": 32,
        "seed": 0,
        "channels": 0.122,
        "coordinates": 80,
        "score": "variance",
    }
    assert config == read_json(source / "config.json")


def test_index_agrees_with_the_shards(out: Path) -> None:
    index = read_json(out / INDEX)
    found = {}
    for path in shards(out):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
            assert file.metadata() == {"format": "pt"}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(out).values())


def test_manifest_tells_where_it_comes_from_and_what_is_in_it(source: Path, out: Path) -> None:
    text = (out / "mreader_manifest.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert manifest["files"].keys() == written - {"README.md", "mreader_manifest.json"}
    used = {*read_json(source / INDEX)["weight_map"].values(), INDEX, "config.json", *SIDE_FILES}
    assert manifest["source"]["files"].keys() == used
    for folder, files in ((out, manifest["files"]), (source, manifest["source"]["files"])):
        for name, entry in files.items():
            data = (folder / name).read_bytes()
            assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert manifest["source"]["repo"] is None
    assert manifest["options"]["rank"] == 32
    assert manifest["versions"].keys() == {"mreader", "torch"}
    assert str(out.parents[2]) not in text
    assert str(source) not in text


def test_codes_lie_in_whole_sectors_of_the_file(out: Path) -> None:
    """Every row of codes begins at a multiple of 32 bytes; other large tensors at one of 64."""
    for path in shards(out):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                if name.endswith("sketch_codes"):
                    assert (8 + length + begin) % 32 == 0
                if (end - begin) % 64 == 0:
                    assert (8 + length + begin) % 64 == 0


def test_two_runs_write_the_same_bytes(source: Path, out: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", device="cpu", max_shard_bytes=500_000)
    assert contents(tmp_path / "empty") == contents(out)


def test_the_bytes_do_not_depend_on_the_number_of_threads(source: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            convert(source, tmp_path / str(count), device="cpu")
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


@pytest.mark.parametrize("limit", [1, 100_000, 10**9])
def test_the_tensors_do_not_depend_on_the_size_of_shards(source: Path, out: Path, tmp_path: Path, limit: int) -> None:
    convert(source, tmp_path / "out", device="cpu", max_shard_bytes=limit)
    here, there = all_tensors(tmp_path / "out"), all_tensors(out)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert (tmp_path / "out" / INDEX).exists() == (limit < 10**9)


def test_the_plan_promises_enough_room(source: Path, out: Path) -> None:
    plan = plan_conversion(source, max_shard_bytes=500_000)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert size <= plan.nbytes <= size + 300_000
    assert {shard.name: shard.nbytes for shard in plan.shards} == {p.name: p.stat().st_size for p in shards(out)}


def test_what_is_computed_stands_behind_what_only_moves(source: Path) -> None:
    """In every shard: its file is hashed as it grows, and computing comes last."""
    shards = plan_conversion(source, max_shard_bytes=500_000).shards
    computed = [[name.rpartition(".")[2] in SKETCH + RECOVERY for name in shard.tensors] for shard in shards]
    assert computed == [sorted(parts) for parts in computed]
    assert any(len(set(parts)) == 2 for parts in computed)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of 126 MB, and an embedding of 16 MB."""
    folder = tmp_path_factory.mktemp("large") / "source"
    shape = {"hidden_size": 1024, "intermediate_size": 320, "num_experts": 64, "vocab_size": 8192}
    return make_source(folder, "olmoe", files=1, num_hidden_layers=2, **shape)


@pytest.mark.parametrize("task", [killing.convert_at_once, killing.convert_to_slow_disk])
def test_memory_is_what_the_plan_says_and_the_issue_allows(
    large: Path, tmp_path: Path, task: Callable[[Path, Path], None]
) -> None:
    layer = 64 * 3 * 1024 * 320 * 2
    plan = plan_conversion(large)
    peak = killing.peak_memory(task, large, tmp_path / "out")
    assert layer + 64 * 320 * 1024 * 2 < peak <= plan.memory <= 2.5 * layer + 1e9


def test_links_are_resolved(source: Path, out: Path, tmp_path: Path) -> None:
    """The layout of the Hub cache: a snapshot of links into a folder of blobs."""
    snapshot, blobs = tmp_path / "snapshots" / "1234", tmp_path / "blobs"
    blobs.mkdir(parents=True)
    for path in [path for path in source.rglob("*") if path.is_file()]:
        name = path.relative_to(source)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / hashlib.sha256(str(name).encode()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    convert(snapshot, tmp_path / "out", device="cpu", max_shard_bytes=500_000)
    assert contents(tmp_path / "out") == contents(out)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_modes_follow_the_umask(source: Path, tmp_path: Path, mask: int, file_mode: int, folder_mode: int) -> None:
    folder = copied(source, tmp_path / "source")
    (folder / "tokenizer.json").chmod(0o600)
    before = os.umask(mask)
    try:
        convert(folder, tmp_path / "out", device="cpu")
    finally:
        os.umask(before)
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (folder_mode if path.is_dir() else file_mode), path


@pytest.mark.parametrize("options", [FormatOptions(codes="quaternary", rank=7, seed=3), FormatOptions(rank=0)])
def test_options(source: Path, tmp_path: Path, options: FormatOptions) -> None:
    convert(source, tmp_path / "out", options, device="cpu")
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["rank"] == options.rank
    assert all_tensors(tmp_path / "out")["model.layers.2.mlp.experts.recovery_coeffs"].shape == (6, 80, options.rank)
    assert mreader("verify", tmp_path / "out", "--source", source).code == 0


def test_a_folder_that_is_called_like_a_repository(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(source, tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert mreader("convert", "org/name", "out", "-q").code == 0
    assert read_json(tmp_path / "out" / "mreader_manifest.json")["source"]["repo"] is None


def test_a_locale_without_utf_8(source: Path, tmp_path: Path) -> None:
    """Contents are UTF-8 whatever the locale, and our own folder is known again; a file name that such a locale cannot
    write is refused by what to do about it.
    """
    folder, out = copied(source, tmp_path / "source"), tmp_path / "out"
    edit_json(folder / "config.json", lambda config: config.update(author="Jürgen Größe"))
    assert mreader("convert", folder, out, "--device", "cpu", "-q").code == 0
    whole = contents(out)
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONPATH": str(Path(mreader_package.__file__).parents[1]),
    }

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mreader.cli.main", "convert", folder, out, "--device", "cpu", "-q", *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert done.returncode == 3, done.stderr
    assert "UTF-8 locale" in done.stderr
    assert contents(out) == whole
    (folder / "Lizenz-größe.txt").unlink()
    shutil.rmtree(out)
    assert run().returncode == 0
    (out / "tokenizer.json").unlink()
    assert run().returncode == 0
    assert read_json(out / "config.json")["author"] == "Jürgen Größe"
    assert mreader("verify", out, "--source", folder).code == 0


class Hashed:
    """Stands for `sha256_file`: knows which files were begun, and holds each back until `release`."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.release = threading.Event()
        self._changed = threading.Condition()

    def __call__(self, path: Path, progress: Callable[[int], None]) -> str:
        with self._changed:
            self.begun.append(path.name)
            self._changed.notify_all()
        assert self.release.wait(20)
        return f"hash of {path.name}"

    def wait_for(self, names: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(names), 20)
        assert sorted(self.begun) == sorted(names)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Hashed:
    stand_in = Hashed()
    monkeypatch.setattr("mreader.hashing.sha256_file", stand_in)
    monkeypatch.setattr("mreader.hashing._THREADS", 8)
    return stand_in


def test_files_are_hashed_when_they_are_due(hashed: Hashed, tmp_path: Path) -> None:
    """Those of the shard that is written, all at a time, and those of the next one."""
    with BackgroundHashes(tmp_path, dict.fromkeys("abcdefghi", 1), ["abcd", "de", "fg", "hi"]) as hashes:
        hashes.begin(0)
        hashed.wait_for("abcde")
        hashed.release.set()
        while not all(future.done() for future in hashes._records.values()):
            time.sleep(0.001)
        assert hashes.finish(0) == {name: (f"hash of {name}", 1) for name in "abcd"}
        hashes.begin(1)
        hashed.wait_for("abcdefg")


def test_more_files_are_hashed_ahead_where_that_is_slower_than_writing(hashed: Hashed, tmp_path: Path) -> None:
    with BackgroundHashes(tmp_path, dict.fromkeys("abcdef", 1), ["a", "b", "c", "d", "e", "f"]) as hashes:
        hashes.begin(0)
        hashed.wait_for("ab")
        threading.Timer(0.1, hashed.release.set).start()
        hashes.finish(0)
        hashes.begin(1)
        hashed.wait_for("abcd")


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_weights_move_while_torch_is_imported(source: Path, out: Path, tmp_path: Path, device: str) -> None:
    """torch waits here until all weights are in their places in the first shard and the next: none waits for torch."""
    code = f"""
import sys, time
from pathlib import Path
from mreader.convert import convert, plan_conversion
from mreader.formats.safetensors_file import data_begins
from mreader.plan import RECOVERY, SHARD_METADATA, SKETCH

def weights(path, shard):  # all of its bytes that are not computed
    data = path.read_bytes()
    begins = data_begins(shard.tensors, SHARD_METADATA)
    moved = [name for name in begins if not name.endswith(SKETCH + RECOVERY)]
    assert moved
    return [data[begins[name] : begins[name] + shard.tensors[name].nbytes] for name in moved]

shards = plan_conversion({str(source)!r}, max_shard_bytes=500_000).shards[:2]
parts = [Path({str(tmp_path)!r}, "out", ".mreader", shard.name + ".part") for shard in shards]
whole = [weights(Path({str(out)!r}, shard.name), shard) for shard in shards]
waited = []

def hook(event, arguments):
    if event == "import" and arguments[0] == "torch" and not waited:
        waited.append(True)
        for _ in range(2000):
            if list(map(weights, parts, shards)) == whole:
                return
            time.sleep(0.01)
        sys.exit("the weights are not there")

sys.addaudithook(hook)
convert({str(source)!r}, {str(tmp_path / "out")!r}, device={device!r}, max_shard_bytes=500_000)
assert waited
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert contents(tmp_path / "out") == contents(out)


def test_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    ran = mreader("convert", source, tmp_path / "out", "--dry-run", "--json", "--max-shard-size", "500kb")
    facts = json.loads(ran.out)
    assert (ran.code, ran.err) == (0, "")
    assert (facts["layers"], facts["experts"], facts["channels"], facts["hidden"]) == (3, 6, 80, 192)
    assert facts["bytes"] > sum(facts["shards"].values()) > facts["source_bytes"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_empty_names(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """As of an unset shell variable. They do not mean the current folder."""
    monkeypatch.chdir(tmp_path)
    for arguments in ([source, ""], ["", tmp_path / "out"]):
        ran = mreader("convert", *arguments, *options)
        assert "empty name" in ran.cause
        assert ran.code == 2
    assert list(tmp_path.iterdir()) == []


def test_dry_run_where_nothing_can_be_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mreader.output.os.access", lambda *_: False)
    ran = mreader("convert", source, tmp_path / "not" / "there", "--dry-run")
    assert f"{tmp_path}: Permission denied" in ran.cause
    assert ran.code == 1


def test_no_lock_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full: nothing is left behind."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mreader.output.Path.open", full)
    with pytest.raises(OSError, match="No space"), claimed(tmp_path / "new" / "out" / "work", "conversion"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changed", ["model-00001-of-00006.safetensors", "model-00006-of-00006.safetensors"])
def test_source_that_changes_meanwhile(source: Path, tmp_path: Path, changed: str) -> None:
    """Even where its size stays: half of what is converted would be of one state, half of another."""
    folder = copied(source, tmp_path / "source")

    class Changing(Progress):
        def layer(self, number: int, layers: int) -> None:
            if number == 2:
                with (folder / changed).open("r+b") as file:
                    file.seek(-2, os.SEEK_END)
                    file.write(b"\x01\x02")

    out = tmp_path / "out"
    with pytest.raises(SourceError, match=f"{changed} changed while it was converted"):
        convert(folder, out, device="cpu", max_shard_bytes=10**9, progress=Changing())
    journal = (out / ".mreader" / "journal.jsonl").read_text(encoding="utf-8")
    assert len(journal.splitlines()) == 1
    assert not {*RECORDS, INDEX} & {path.name for path in out.iterdir()}


def test_output_for_people_goes_to_stderr(source: Path, tmp_path: Path) -> None:
    ran = mreader("convert", source, tmp_path / "out")
    assert (ran.code, ran.out) == (0, "")
    assert str(tmp_path / "out") in ran.err
    assert mreader("convert", source, tmp_path / "quiet", "-q") == mreader("convert", source, tmp_path / "q2", "-q")


def test_json_output_is_one_object(source: Path, tmp_path: Path) -> None:
    ran = mreader("convert", source, tmp_path / "out", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["seconds"] > 0
