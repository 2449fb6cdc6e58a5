"""Publishing to and reading from the Hub, with the real huggingface_hub client against a server of our own."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, use_hub
from huggingface_hub import HfApi, ModelCard, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from mreader.errors import (
    MreaderError,
    NoSpaceError,
    SourceError,
    UnreachableError,
    UnsupportedError,
    UsageError,
    VerifyError,
)
from mreader.formats.augmented import MANIFEST, FormatOptions
from mreader.formats.checkpoint import open_checkpoint
from mreader.hub import PushResult, fetch_snapshot, push_to_hub, remote_headers

# huggingface_hub hands its files to httpx in a way that httpx deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_alice"
WEIGHTS = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
SOURCE_CARD = b"---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- moe\n---\n\n# The source\n"


def safetensors(data: bytes, header: dict[str, object] | None = None) -> bytes:
    described = header or {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(data: bytes) -> dict[str, object]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def source_files() -> dict[str, bytes]:
    return {
        "config.json": b'{"model_type": "olmoe"}',
        WEIGHTS: safetensors(os.urandom(2000)),
        INDEX: json.dumps({"weight_map": {"w": WEIGHTS}}).encode(),
        "tokenizer.json": b'{"version": "1.0"}',
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tools.jinja": b"{{ tools }}",
        "modeling_own.py": b"pass\n",
        "LICENSE": b"free",
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "figures/größe [1] #2?.mp4": b"film",
        "generation_config.yaml": b"a: 1\n",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": safetensors(b"the same again"),
        "original/model.safetensors": safetensors(b"and again"),
        "model.gguf": b"GGUF",
        "onnx/model.onnx_data": b"onnx",
        ".cache/huggingface/x.lock": b"",
        "sub/__pycache__/own.cpython-311.pyc": b"",
    }


NOT_OF_THE_CHECKPOINT = {
    *("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "model.gguf"),
    *("onnx/model.onnx_data", ".cache/huggingface/x.lock", "sub/__pycache__/own.cpython-311.pyc"),
    ".gitattributes",
}


def write_checkpoint(out: Path, weights: bytes = b"", card: bytes | None = SOURCE_CARD) -> dict[str, bytes]:
    """A folder as `mreader convert` leaves it; returns the files that belong to it."""
    config = {
        "model_type": "olmoe",
        "architectures": ["OlmoeForCausalLM"],
        "quantization_config": FormatOptions().config_entry(),
    }
    files = {
        "config.json": json.dumps(config).encode(),
        WEIGHTS: weights or safetensors(os.urandom(6_000_000)),
        INDEX: json.dumps({"weight_map": {"w": WEIGHTS}}).encode(),
        "templates/chat.jinja": b"{{ messages }}",
        "templates/größe [1].txt": b"x",
        "empty.txt": b"",
    }
    source = {"model.safetensors": {"sha256": "0" * 64, "bytes": 5_000_000}, "README.md": entry(SOURCE_CARD)}
    manifest = {
        "format_version": 1,
        "source": {"repo": "allenai/OLMoE", "revision": "1" * 40, "files": source},
        "files": {name: entry(data) for name, data in files.items()},
    }
    files[MANIFEST] = json.dumps(manifest).encode()
    strays = {".mreader/journal": b"work", ".cache/x": b"cache", "notes.log": b"stray"}
    for name, data in {**files, **strays, **({"README.md": card} if card else {})}.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return files


def accept(out: Path) -> None:
    pass


Push = Callable[..., PushResult]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    monkeypatch.setattr("mreader.hub.http.WAITS", (0.0, 0.0))
    with HubServer(page_size=4) as server:
        server.add_user("alice", TOKEN, orgs=["lab"])
        server.add_user("bob", "hf_bob")
        server.add_user("eve", "hf_eve", write=False)
        use_hub(monkeypatch, server.url, TOKEN, tmp_path / "cache")
        yield server


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def files(out: Path) -> dict[str, bytes]:
    return write_checkpoint(out)


@pytest.fixture
def push(out: Path, files: dict[str, bytes]) -> Push:
    def run(repo: str = "alice/m", **options: object) -> PushResult:
        return push_to_hub(out, repo, **{"verify": accept, **options})  # type: ignore[arg-type]

    return run


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class TestPush:
    def test_round_trip(self, hub: HubServer, push: Push, out: Path, files: dict[str, bytes], tmp_path: Path) -> None:
        before = contents(out)
        result = push()
        assert contents(out) == before
        assert result.url == f"{hub.url}/alice/m"
        assert result.revision == "main"
        assert set(result.uploaded) == {*files, "README.md"}
        got = contents(Path(snapshot_download("alice/m", local_dir=tmp_path / "back")))
        got = {name: data for name, data in got.items() if not name.startswith(".")}
        card = got.pop("README.md")
        assert got == files
        data = ModelCard(card.decode()).data
        assert (data.base_model, data.license, data.tags[:2]) == ("allenai/OLMoE", "apache-2.0", ["moe", "mreader"])
        assert data.get("base_model_relation") == "quantized"
        assert not hub.repos["alice/m"].private

    def test_again_uploads_nothing(self, hub: HubServer, push: Push) -> None:
        first = push()
        uploaded, commits = hub.uploaded, len(hub.repos["alice/m"].commits)
        again = push()
        assert (again.commit, again.uploaded) == (first.commit, ())
        assert (hub.uploaded, len(hub.repos["alice/m"].commits)) == (uploaded, commits)
        assert "nothing was uploaded" in again.notes[-1]

    def test_in_parts(self, push: Push, hub: HubServer, files: dict[str, bytes]) -> None:
        hub.part_size = 2_500_000
        push()
        assert hub.count("PUT /lfs/part/") == 3
        assert hub.files("alice/m")[WEIGHTS] == files[WEIGHTS]

    def test_name_without_owner(self, push: Push, hub: HubServer) -> None:
        assert push("m").url == f"{hub.url}/alice/m"

    def test_organisation_and_private(self, push: Push, hub: HubServer) -> None:
        push("lab/m", private=True)
        assert hub.repos["lab/m"].private
        push("lab/m", private=True)

    def test_private_asked_of_a_public_repository(self, push: Push, hub: HubServer) -> None:
        hub.add_repo("alice/m")
        with pytest.raises(UsageError, match="is public"):
            push(private=True)
        assert hub.uploaded == 0

    def test_branch_is_created(self, push: Push, hub: HubServer) -> None:
        result = push(revision="v1/a b")
        assert result.url.endswith("/alice/m/tree/v1/a b")
        assert WEIGHTS in hub.files("alice/m", "v1/a b")
        assert WEIGHTS not in hub.files("alice/m")
        assert push(revision="v1/a b").uploaded == ()

    def test_pull_request_is_resumed(self, push: Push, hub: HubServer, out: Path) -> None:
        hub.add_repo("bob/m")
        first = push("bob/m", create_pr=True)
        assert first.revision == "refs/pr/1"
        assert first.url == f"{hub.url}/bob/m/discussions/1"
        assert push("bob/m", create_pr=True).uploaded == ()
        write_checkpoint(out)
        again = push("bob/m", create_pr=True)
        assert again.revision == "refs/pr/1"
        assert WEIGHTS in again.uploaded
        assert len(hub.repos["bob/m"].pull_requests) == 1
        assert hub.files("bob/m") == {}

    def test_pull_requests_of_others_are_left_alone(self, push: Push, hub: HubServer) -> None:
        hub.add_repo("bob/m")
        push("bob/m", create_pr=True, token="hf_eve")
        assert push("bob/m", create_pr=True).revision == "refs/pr/2"
        hub.repos["bob/m"].pull_requests[1].status = "closed"
        assert push("bob/m", create_pr=True).revision == "refs/pr/3"

    def test_title_of_a_pull_request(self, push: Push, hub: HubServer) -> None:
        hub.add_repo("alice/m")
        titles = ["One\n\nwith a body", "One", "Two"]
        assert [push(create_pr=True, commit_message=title).revision[-1] for title in titles] == ["1", "1", "2"]

    def test_pull_request_of_what_is_there(self, push: Push, hub: HubServer) -> None:
        push()
        assert push(create_pr=True).revision == "main"
        assert hub.repos["alice/m"].pull_requests == []

    def test_pull_request_against_a_branch(self, push: Push) -> None:
        with pytest.raises(UsageError, match="exclude"):
            push(create_pr=True, revision="v1")

    def test_files_of_an_older_conversion_go(self, push: Push, hub: HubServer, out: Path) -> None:
        push()
        repo = hub.repos["alice/m"]
        files = dict(repo.commits[repo.refs["main"]].files)
        hub.commit(repo, "main", "by hand", {**files, "figure.png": files["config.json"]})
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        (out / "model.safetensors").write_bytes((out / WEIGHTS).read_bytes())
        manifest["files"]["model.safetensors"] = manifest["files"].pop(WEIGHTS)
        (out / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        uploaded = hub.uploaded
        result = push()
        assert result.deleted == (WEIGHTS,)
        assert hub.uploaded == uploaded
        assert WEIGHTS not in hub.files("alice/m")
        assert {"model.safetensors", "figure.png", "README.md"} <= hub.files("alice/m").keys()

    @pytest.mark.parametrize("manifest", [b"{", b"[]", b'{"files": 3}'])
    def test_senseless_manifest_on_the_hub(self, push: Push, hub: HubServer, manifest: bytes) -> None:
        hub.add_repo("alice/m", {MANIFEST: manifest, "other.safetensors": b""})
        assert push().deleted == ()

    def test_another_model_is_not_overwritten(self, push: Push, hub: HubServer) -> None:
        hub.add_repo("alice/m", source_files())
        with pytest.raises(UsageError, match="holds another model"):
            push()
        assert hub.uploaded == 0
        assert len(hub.repos["alice/m"].commits) == 1

    def test_failed_verification_sends_nothing(self, push: Push, hub: HubServer) -> None:
        def reject(out: Path) -> None:
            raise VerifyError("bad checksum")

        with pytest.raises(VerifyError, match="bad checksum"):
            push(verify=reject)
        assert hub.repos == {}

    def test_named_file_missing(self, push: Push, hub: HubServer, out: Path) -> None:
        (out / WEIGHTS).unlink()
        with pytest.raises(VerifyError, match=WEIGHTS):
            push()
        assert hub.repos == {}


class TestCardOfAPush:
    def test_own_card_is_published_as_it_is(self, push: Push, hub: HubServer, out: Path) -> None:
        (out / "README.md").write_text("# Mine\n", encoding="utf-8")
        result = push()
        assert hub.files("alice/m")["README.md"] == b"# Mine\n"
        assert "your own" in result.notes[0]

    def test_without_a_source_card(self, push: Push, hub: HubServer, out: Path) -> None:
        (out / "README.md").unlink()
        push()
        assert b"base_model: allenai/OLMoE" in hub.files("alice/m")["README.md"]

    def test_edited_on_the_hub_is_kept(self, push: Push, hub: HubServer, out: Path) -> None:
        push()
        repo = hub.repos["alice/m"]
        old = repo.commits[repo.refs["main"]].files
        edited = hub._blob("README.md", old["README.md"].data.replace(b"# m", b"# My m"))
        hub.commit(repo, "main", "edit", {**old, "README.md": edited})
        write_checkpoint(out)
        result = push()
        assert "README.md" not in result.uploaded
        assert "kept" in result.notes[0]
        assert hub.files("alice/m")["README.md"] == edited.data

    def test_untouched_on_the_hub_is_renewed(self, push: Push, hub: HubServer, out: Path) -> None:
        push()
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        manifest["source"]["repo"] = "other/base"
        (out / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        assert set(push().uploaded) == {"README.md", MANIFEST}
        assert b"base_model: other/base" in hub.files("alice/m")["README.md"]


class TestRefusals:
    def test_no_token(self, push: Push, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        use_hub(monkeypatch, hub.url, None, tmp_path / "nobody")
        with pytest.raises(MreaderError, match="hf auth login"):
            push()
        assert hub.seen == []

    def test_unknown_token(self, push: Push, hub: HubServer) -> None:
        with pytest.raises(MreaderError, match=r"does not know this token .401.*hf auth login"):
            push(token="hf_wrong")
        assert len(hub.seen) == 1

    def test_token_without_write(self, push: Push, hub: HubServer) -> None:
        with pytest.raises(MreaderError, match=r"403.*write token.*settings/tokens"):
            push("eve/m", token="hf_eve")
        assert hub.uploaded == 0

    def test_someone_elses_repository(self, push: Push, hub: HubServer) -> None:
        hub.add_repo("bob/m")
        with pytest.raises(MreaderError, match=r"403.*don't have the rights"):
            push("bob/m")
        assert hub.count("/preupload/") == 1

    @pytest.mark.parametrize("step", ["PUT /lfs", "POST /api/models/.*/commit", "POST /.*objects/batch"])
    def test_403_in_the_middle_ends_at_once(self, push: Push, hub: HubServer, step: str) -> None:
        hub.fail(step, 403, "storage limit reached", times=99)
        with pytest.raises(MreaderError, match=r"403.*storage limit reached"):
            push()
        assert hub.count(step) == 1

    def test_no_such_pull_request(self, push: Push, hub: HubServer) -> None:
        with pytest.raises(MreaderError, match="no revision refs/pr/7"):
            push(revision="refs/pr/7")

    @pytest.mark.parametrize("repo", ["a/b/c", "alice/bad name", "alice/--"])
    def test_impossible_id(self, push: Push, hub: HubServer, repo: str) -> None:
        with pytest.raises(UsageError, match="no repository id"):
            push(repo)
        assert hub.seen == []

    def test_ignored_by_the_repository(self, push: Push, hub: HubServer) -> None:
        hub.ignored = {"empty.txt"}
        with pytest.raises(MreaderError, match=r"does not hold empty.txt.*\.gitignore"):
            push()


class TestFaults:
    @pytest.mark.parametrize(
        "step",
        [
            "GET /api/whoami",
            "GET /api/models/alice/m",
            "POST /api/repos/create",
            "/tree/",
            "/preupload/",
            "POST /.*objects/batch",
            "PUT /lfs",
            "POST /lfs/verify",
            "/commit/main",
        ],
    )
    @pytest.mark.parametrize("fault", ["500", "cut"])
    def test_once(self, push: Push, hub: HubServer, files: dict[str, bytes], step: str, fault: str) -> None:
        if fault == "500":
            hub.fail(step, 500)
        else:
            hub.cut(step, 3)
        push()
        assert files.items() <= hub.files("alice/m").items()

    def test_upload_cut_for_good_then_run_again(self, push: Push, hub: HubServer, files: dict[str, bytes]) -> None:
        hub.cut("PUT /lfs", 1_000_000, times=6)
        with pytest.raises(MreaderError, match=r"no connection.*takes up where it stopped"):
            push()
        assert hub.files("alice/m") == {}
        push()
        assert files.items() <= hub.files("alice/m").items()

    def test_commit_refused_then_run_again_sends_no_object_twice(self, push: Push, hub: HubServer) -> None:
        hub.fail("/commit/main", 503, "maintenance", times=3)
        with pytest.raises(MreaderError, match="503: maintenance"):
            push()
        uploaded = hub.uploaded
        assert uploaded > 6_000_000
        push()
        assert hub.uploaded == uploaded

    def test_deletion_is_tried_again(self, push: Push, hub: HubServer, out: Path) -> None:
        push()
        repo = hub.repos["alice/m"]
        files = dict(repo.commits[repo.refs["main"]].files)
        older = hub._blob(MANIFEST, json.dumps({"files": {"old.safetensors": {}}}).encode())
        hub.commit(repo, "main", "old", {**files, MANIFEST: older, "old.safetensors": files[WEIGHTS]})
        hub.fail("/commit/main", 500)
        assert push().deleted == ("old.safetensors",)
        assert "old.safetensors" not in hub.files("alice/m")

    @pytest.mark.parametrize("create_pr", [False, True])
    def test_lost_answer_commits_once(self, push: Push, hub: HubServer, create_pr: bool) -> None:
        hub.add_repo("alice/m")
        hub.lose_answer("/commit/main")
        result = push(create_pr=create_pr)
        repo = hub.repos["alice/m"]
        assert len(repo.commits) == 2
        assert len(repo.pull_requests) == create_pr
        assert repo.refs[result.revision] == result.commit

    def test_no_network(self, push: Push, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: str) -> None:
        monkeypatch.setattr("mreader.hub.http.WAITS", (0.0,))
        use_hub(monkeypatch, closed, TOKEN, tmp_path / "cache")
        with pytest.raises(MreaderError, match=r"no connection to http://127\.0\.0\.1"):
            push()


@pytest.fixture
def closed() -> str:
    """The address of a server that is gone."""
    with HubServer() as server:
        return server.url


class TestFetch:
    def test_takes_the_checkpoint_and_nothing_else(self, hub: HubServer) -> None:
        files = source_files()
        commit = hub.add_repo("lab/moe", files).refs["main"]
        folder = fetch_snapshot("lab/moe")
        assert folder.name == commit
        assert contents(folder) == {name: data for name, data in files.items() if name not in NOT_OF_THE_CHECKPOINT}

    def test_the_same_as_a_local_clone(self, hub: HubServer, tmp_path: Path) -> None:
        files = source_files()
        hub.add_repo("lab/moe", files)
        for name, data in files.items():
            (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "clone" / name).write_bytes(data)
        clone, fetched = open_checkpoint(tmp_path / "clone"), open_checkpoint(fetch_snapshot("lab/moe"))
        assert (fetched.texts, fetched.headers, fetched.files) == (clone.texts, clone.headers, clone.files)

    def test_single_file_and_plain_name(self, hub: HubServer) -> None:
        files = {"config.json": b"{}", "model.safetensors": safetensors(b"w"), "notes.pt": b""}
        hub.add_repo("gpt", files)
        assert contents(fetch_snapshot("gpt")).keys() == {"config.json", "model.safetensors"}

    def test_again_downloads_nothing(self, hub: HubServer) -> None:
        hub.add_repo("lab/moe", source_files())
        first = fetch_snapshot("lab/moe")
        before = hub.count("/lfs/download/")
        assert fetch_snapshot("lab/moe") == first
        assert hub.count("/lfs/download/") == before

    def test_revision(self, hub: HubServer) -> None:
        repo = hub.add_repo("lab/moe", source_files())
        old = repo.refs["main"]
        other = {**repo.commits[old].files, "config.json": hub._blob("config.json", b"{}")}
        hub.commit(repo, "v2", "second", other)
        assert (fetch_snapshot("lab/moe", "v2") / "config.json").read_bytes() == b"{}"
        assert fetch_snapshot("lab/moe", old).name == old

    def test_what_was_published_comes_back(self, hub: HubServer, push: Push, files: dict[str, bytes]) -> None:
        push(private=True)
        got = contents(fetch_snapshot("alice/m"))
        assert got[WEIGHTS] == files[WEIGHTS]
        assert got[MANIFEST] == files[MANIFEST]

    def test_download_cut_is_resumed(self, hub: HubServer) -> None:
        files = {"config.json": b"{}", "model.safetensors": safetensors(os.urandom(3_000_000))}
        hub.add_repo("lab/moe", files)
        hub.cut("GET /lfs/download", 1_000_000)
        assert contents(fetch_snapshot("lab/moe")) == files
        assert hub.count("GET /lfs/download") == 2

    def test_download_cut_for_good_then_run_again(self, hub: HubServer) -> None:
        files = {"config.json": b"{}", "model.safetensors": safetensors(os.urandom(300_000))}
        hub.add_repo("lab/moe", files)
        hub.cut("GET /lfs/download", 0, times=99)
        with pytest.raises(SourceError, match="takes up where it stopped"):
            fetch_snapshot("lab/moe")
        hub.faults.clear()
        assert contents(fetch_snapshot("lab/moe")) == files

    def test_without_network_from_the_cache(
        self, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: str
    ) -> None:
        hub.add_repo("lab/moe", source_files())
        folder = fetch_snapshot("lab/moe")
        use_hub(monkeypatch, closed, TOKEN, tmp_path / "cache")
        assert fetch_snapshot("lab/moe") == folder
        assert fetch_snapshot("lab/moe", folder.name) == folder
        (folder / WEIGHTS).unlink()
        with pytest.raises(SourceError, match="no connection"):
            fetch_snapshot("lab/moe")

    def test_offline_mode(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_repo("lab/moe", source_files())
        folder = fetch_snapshot("lab/moe")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert fetch_snapshot("lab/moe") == folder
        with pytest.raises(UnreachableError, match="HF_HUB_OFFLINE is set"):
            fetch_snapshot("lab/other")

    def test_no_room(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add_repo("lab/moe", source_files())
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
        with pytest.raises(NoSpaceError, match="HF_HOME"):
            fetch_snapshot("lab/moe")
        assert hub.count("/lfs/download/") == 0

    def test_other_weight_formats_only(self, hub: HubServer) -> None:
        hub.add_repo("lab/moe", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
        with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin"):
            fetch_snapshot("lab/moe")

    def test_no_weights(self, hub: HubServer) -> None:
        hub.add_repo("lab/moe", {"config.json": b"{}"})
        with pytest.raises(SourceError, match="no safetensors files"):
            fetch_snapshot("lab/moe")

    @pytest.mark.parametrize(
        "index", [b'{"weight_map": {"w": "gone.safetensors"}}', b"{", b"[]", b'{"weight_map": []}']
    )
    def test_bad_index(self, hub: HubServer, index: bytes) -> None:
        hub.add_repo("lab/moe", {**source_files(), INDEX: index})
        with pytest.raises(SourceError, match=INDEX):
            fetch_snapshot("lab/moe")
        assert hub.count("/lfs/download/") == 0


READERS = [
    pytest.param(fetch_snapshot, id="fetch_snapshot"),
    pytest.param(lambda *args, **named: remote_headers(*args, **named).read_text("config.json"), id="remote_headers"),
]


@pytest.mark.parametrize("read", READERS)
class TestUnreadable:
    def test_no_such_repository(self, hub: HubServer, read: Callable[..., object]) -> None:
        with pytest.raises(SourceError, match="no repository lab/none"):
            read("lab/none")
        assert len(hub.seen) == 1

    @pytest.mark.parametrize("status", [401, 403, 404, 410])
    def test_what_is_refused_is_final(self, hub: HubServer, read: Callable[..., object], status: int) -> None:
        hub.add_repo("lab/moe", source_files())
        hub.fail("/api/models/lab/moe", status, times=99)
        with pytest.raises(SourceError) as caught:
            read("lab/moe")
        assert not isinstance(caught.value, UnreachableError)
        assert len(hub.seen) == 1

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_what_gives_no_answer_is_unreachable(
        self, hub: HubServer, read: Callable[..., object], status: int
    ) -> None:
        hub.add_repo("lab/moe", source_files())
        hub.fail("/api/models/lab/moe", status, times=99)
        with pytest.raises(UnreachableError, match=str(status)):
            read("lab/moe")

    def test_private(self, hub: HubServer, read: Callable[..., object]) -> None:
        hub.add_repo("bob/m", source_files(), private=True)
        with pytest.raises(SourceError, match=r"or no access to it.*hf auth login"):
            read("bob/m")

    def test_no_such_revision(self, hub: HubServer, read: Callable[..., object]) -> None:
        hub.add_repo("lab/moe", source_files())
        with pytest.raises(SourceError, match="lab/moe has no revision v9"):
            read("lab/moe", "v9")

    def test_gated(self, hub: HubServer, read: Callable[..., object]) -> None:
        hub.add_repo("bob/m", source_files(), gated=True)
        with pytest.raises(SourceError, match=r"gated.*ask for access at http") as caught:
            read("bob/m")
        assert not isinstance(caught.value, UnreachableError)

    def test_gated_without_a_token(
        self, hub: HubServer, read: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        use_hub(monkeypatch, hub.url, None, tmp_path / "nobody")
        hub.add_repo("bob/m", {"config.json": b"{}", "model.safetensors": safetensors(b"w")}, gated=True)
        with pytest.raises(SourceError, match="gated"):
            read("bob/m")

    def test_bad_token(self, hub: HubServer, read: Callable[..., object]) -> None:
        hub.add_repo("lab/moe", source_files())
        with pytest.raises(SourceError, match="does not know this token"):
            read("lab/moe", token="hf_wrong")

    def test_no_network(
        self, read: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: str
    ) -> None:
        monkeypatch.setattr("mreader.hub.http.WAITS", (0.0,))
        use_hub(monkeypatch, closed, TOKEN, tmp_path / "cache")
        with pytest.raises(UnreachableError, match=r"no connection.*check the network"):
            read("lab/moe")

    def test_impossible_id(self, hub: HubServer, read: Callable[..., object]) -> None:
        with pytest.raises(UsageError, match="no repository id"):
            read("a/b/c")

    def test_500_once(self, hub: HubServer, read: Callable[..., object]) -> None:
        hub.add_repo("lab/moe", source_files())
        hub.fail("/api/models/lab/moe", 500)
        hub.fail("/resolve/.*/config.json", 500)
        assert read("lab/moe")


class TestRemoteHeaders:
    def test_pieces(self, hub: HubServer) -> None:
        files = source_files()
        commit = hub.add_repo("lab/moe", files).refs["main"]
        remote = remote_headers("lab/moe")
        assert remote.commit == commit
        assert remote.files == {name: len(data) for name, data in files.items()}
        assert remote.read_text("config.json") == files["config.json"].decode()
        assert json.loads(remote.header(WEIGHTS))["w"]["shape"] == [2000]

    def test_long_header_reads_no_weights(self, hub: HubServer) -> None:
        header = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(9000)}
        data = safetensors(bytes(9_000_000), header)
        hub.add_repo("lab/moe", {"model.safetensors": data})
        assert json.loads(remote_headers("lab/moe").header("model.safetensors")) == header
        assert hub.downloaded < 1_000_000

    def test_cut_once(self, hub: HubServer) -> None:
        hub.add_repo("lab/moe", source_files())
        hub.cut("GET /lfs/download", 20)
        assert json.loads(remote_headers("lab/moe").header(WEIGHTS))

    def test_header_beyond_all_measure_is_not_downloaded(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mreader.hub.fetch._LARGEST_TEXT", 500_000)
        hub.add_repo("lab/moe", {"model.safetensors": struct.pack("<Q", 600_000) + bytes(1_000_000)})
        with pytest.raises(SourceError, match="no safetensors file"):
            remote_headers("lab/moe").header("model.safetensors")
        assert hub.downloaded < 500_000

    @pytest.mark.parametrize("data", [b"", b"short", b"version https://git-lfs.github.com/spec/v1\n"])
    def test_no_safetensors(self, hub: HubServer, data: bytes) -> None:
        hub.add_repo("lab/moe", {"model.safetensors": data})
        with pytest.raises(SourceError, match="no safetensors file"):
            remote_headers("lab/moe").header("model.safetensors")

    def test_absent_file(self, hub: HubServer) -> None:
        hub.add_repo("lab/moe", source_files())
        with pytest.raises(SourceError, match=r"no file x\.json"):
            remote_headers("lab/moe").read_text("x.json")


class TestServer:
    """The parts of the protocol that mreader does not use, and other users of the server may."""

    def test_listings(self, hub: HubServer) -> None:
        api = HfApi(token=TOKEN)
        files = {f"a/b/{i}.txt": b"x" for i in range(9)} | {"c.txt": b"y"}
        hub.add_repo("alice/m", files)
        assert {path for path in api.list_repo_files("alice/m") if path != ".gitattributes"} == files.keys()
        assert [entry.path for entry in api.list_repo_tree("alice/m")] == [".gitattributes", "a", "c.txt"]
        assert len(list(api.list_repo_tree("alice/m", "a/b"))) == 9
        assert [info.path for info in api.get_paths_info("alice/m", ["c.txt", "none"])] == ["c.txt"]
        assert [ref.name for ref in api.list_repo_refs("alice/m").branches] == ["main"]
        assert api.file_exists("alice/m", "c.txt")
        assert not api.file_exists("alice/m", "d.txt")
        assert not api.repo_exists("alice/none")

    def test_conflict(self, hub: HubServer) -> None:
        api = HfApi(token=TOKEN)
        api.create_repo("alice/m")
        with pytest.raises(HfHubHTTPError, match="409"):
            api.create_repo("alice/m")
        assert api.create_repo("alice/m", exist_ok=True).repo_id == "alice/m"

    def test_folder(self, hub: HubServer, tmp_path: Path) -> None:
        (tmp_path / "src" / "sub").mkdir(parents=True)
        (tmp_path / "src" / "sub" / "x.txt").write_bytes(b"x")
        hub.add_folder("lab/m", tmp_path / "src")
        assert hub.files("lab/m") == {"sub/x.txt": b"x"}


def test_in_a_process_of_its_own(hub: HubServer, out: Path, files: dict[str, bytes], tmp_path: Path) -> None:
    """With file names and texts that are not ASCII, in the locale C, and no file opened as the locale says."""
    code = (
        "import sys, warnings; from pathlib import Path; from mreader import hub\n"
        "warnings.filterwarnings('error', category=EncodingWarning, module='mreader')\n"
        "print(hub.push_to_hub(Path(sys.argv[1]), 'alice/own', verify=lambda out: None).url)\n"
        "print(hub.fetch_snapshot('alice/own'))\n"
    )
    env = {**os.environ, **hub.environment(TOKEN, tmp_path / "other"), "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"LC_ALL": "C", "PYTHONWARNDEFAULTENCODING": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(out)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    url, folder = done.stdout.split()
    assert url == f"{hub.url}/alice/own"
    assert (Path(folder) / WEIGHTS).read_bytes() == files[WEIGHTS]
    assert hub.files("alice/own").keys() == {*files, "README.md"}
