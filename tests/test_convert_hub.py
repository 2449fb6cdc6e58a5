"""Conversion straight from a Hub id, over HTTP, against the local server of tests/hub_server.py."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import contents, mreader
from hub_server import HubServer, use_hub
from quantizers import CASES, make
from sources import INDEX, make_source, read_json, shards

from mreader.convert import convert, plan_conversion
from mreader.hub import fetch_snapshot

REPO = "lab/tiny-moe"
USAGE, SOURCE, SPACE, UNSUPPORTED = 2, 3, 4, 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_source(tmp_path_factory.mktemp("source") / "source", files=3)
    (folder / ".gitattributes").write_bytes(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    return folder


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr("mreader.hub.http.WAITS", (0.0, 0.0))
    with HubServer() as server:
        server.add_user("alice", "hf_alice")
        server.add_folder(REPO, source)
        use_hub(monkeypatch, server.url, "hf_alice", tmp_path / "cache")
        yield server


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of a port where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def without_origin(out: Path) -> dict[str, object]:
    """The folder, and of its manifest all but the repository."""
    found: dict[str, object] = dict(contents(out))
    manifest = read_json(out / "mreader_manifest.json")
    del manifest["source"]["repo"], manifest["source"]["revision"]
    return {**found, "mreader_manifest.json": manifest}


def test_the_same_as_from_a_folder(hub: HubServer, source: Path, tmp_path: Path) -> None:
    ran = mreader("convert", REPO, tmp_path / "out", "-q", "--device", "cpu")
    assert ran.code == 0, ran.err
    recorded = read_json(tmp_path / "out" / "mreader_manifest.json")["source"]
    assert (recorded["repo"], recorded["revision"]) == (REPO, hub.repos[REPO].refs["main"])
    convert(source, tmp_path / "local", device="cpu")
    assert without_origin(tmp_path / "out") == without_origin(tmp_path / "local")


def test_what_is_planned_is_what_is_fetched(hub: HubServer, source: Path, tmp_path: Path) -> None:
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    others = {
        "figures/demo.mp4": bytes(5_000_000),
        **{"original/consolidated.00.pth": bytes(7_000_000), ".cache/x": bytes(9_000_000)},
    }
    hub.add_repo("lab/films", {**files, **others})
    remote, plain = plan_conversion("lab/films"), plan_conversion(source)
    assert remote.nbytes == plain.nbytes + 5_000_000
    assert plan_conversion(fetch_snapshot("lab/films")).nbytes == remote.nbytes


def test_revision(hub: HubServer, tmp_path: Path) -> None:
    commit = hub.repos[REPO].refs["main"]
    assert mreader("convert", REPO, tmp_path / "out", "-q", "--revision", commit).code == 0
    assert read_json(tmp_path / "out" / "mreader_manifest.json")["source"]["revision"] == commit


def test_again_it_is_complete_and_only_headers_are_downloaded(hub: HubServer, tmp_path: Path) -> None:
    assert mreader("convert", REPO, tmp_path / "out", "-q").code == 0
    before, downloads = contents(tmp_path / "out"), hub.count("/lfs/download/")
    assert "complete already" in mreader("convert", REPO, tmp_path / "out").err
    assert contents(tmp_path / "out") == before
    assert hub.count("/lfs/download/") == downloads + 3


def test_dry_run_downloads_headers_only(hub: HubServer, tmp_path: Path) -> None:
    ran = mreader("convert", REPO, tmp_path / "out", "--dry-run", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["layers"] == 3
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not (tmp_path / "out").exists()


def test_download_that_is_cut_is_resumed(hub: HubServer, tmp_path: Path) -> None:
    """Once within the run; for good, by running the same command again."""
    shard = "GET /lfs/download/"
    hub.cut(shard, 100_000, times=50)
    ran = mreader("convert", REPO, tmp_path / "out")
    assert ran.code == SOURCE
    assert ran.cause
    assert not (tmp_path / "out").exists()
    hub.faults.clear()
    hub.cut(shard, 100_000)
    assert mreader("convert", REPO, tmp_path / "out", "-q").code == 0


@pytest.mark.parametrize("options", [[], ["--revision", "main"]])
def test_without_a_network_the_snapshot_in_the_cache_is_used(
    hub: HubServer, unreachable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    assert mreader("convert", REPO, tmp_path / "first", "-q", *options).code == 0
    use_hub(monkeypatch, unreachable, "hf_alice", tmp_path / "cache")
    ran = mreader("convert", REPO, tmp_path / "second", "-q", *options)
    assert ran.code == 0, ran.err
    assert contents(tmp_path / "second") == contents(tmp_path / "first")


def test_no_network(hub: HubServer, unreachable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, unreachable, "hf_alice", tmp_path / "cache")
    ran = mreader("convert", REPO, tmp_path / "out")
    assert f"{REPO} is no folder here; no connection to {unreachable}" in ran.cause
    assert ran.code == SOURCE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lab/none"], ["no repository lab/none"]),
        ([REPO, "--revision", "v9"], [REPO, "no revision v9"]),
        ([REPO, "--token", "hf_wrong"], ["token"]),
    ],
)
def test_what_the_hub_does_not_have(hub: HubServer, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    ran = mreader("convert", arguments[0], tmp_path / "out", *arguments[1:])
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == SOURCE
    assert len(hub.seen) == 1  # the answer is final
    assert not (tmp_path / "out").exists()


def test_nothing_is_downloaded_for_an_unsupported_model(hub: HubServer, source: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in [*shards(source), source / INDEX]}
    hub.add_repo("lab/other", {**files, "config.json": b'{"model_type": "mystery"}'})
    ran = mreader("convert", "lab/other", tmp_path / "out")
    assert "mystery" in ran.cause
    assert ran.code == UNSUPPORTED
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_nothing_is_downloaded_for_a_disk_that_is_too_small(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mreader.output.free_bytes", lambda _: 1_000_000)
    ran = mreader("convert", REPO, tmp_path / "out")
    assert str(tmp_path / "out") in ran.cause
    assert ran.code == SPACE
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_nothing_is_asked_for_a_folder_that_is_in_use(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    before = len(hub.seen)
    assert mreader("convert", REPO, tmp_path / "out").code == USAGE
    assert len(hub.seen) == before


def test_quantized_weights(hub: HubServer, tmp_path: Path) -> None:
    """The error names the repository, a plan needs headers only, and the result is that of the folder."""
    source, _ = make(CASES["qwen3_moe, FP8"], tmp_path, shards=3)
    hub.add_folder("lab/tiny-fp8", source)
    ran = mreader("convert", "lab/tiny-fp8", tmp_path / "out")
    assert f"`mreader convert lab/tiny-fp8 {tmp_path / 'out'} --dtype bfloat16`" in ran.err
    assert ran.code == UNSUPPORTED
    call = ("convert", "lab/tiny-fp8", tmp_path / "out", "--dtype", "bfloat16", "--device", "cpu")
    planned = json.loads(mreader(*call, "--dry-run", "--json").out)
    assert (planned["quantized"], planned["dtype"]) == ("fp8", "BF16")
    assert hub.count("/lfs/download/") <= 3 * 2  # ranges of headers, in both plans
    ran = mreader(*call, "-q")
    assert ran.code == 0, ran.err
    convert(source, tmp_path / "local", device="cpu", dtype="bfloat16")
    assert without_origin(tmp_path / "out") == without_origin(tmp_path / "local")
