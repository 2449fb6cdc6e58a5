"""Which files of a folder are its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from mreader.errors import SourceError, UnsupportedError
from mreader.formats.checkpoint import Checkpoint, is_safe_name, open_checkpoint, remote_checkpoint, select_files

CONFIG = '{"model_type": "anything"}'
INDEX = "model.safetensors.index.json"


def make(folder: Path, shards: dict[str, list[str]], index: bool = False, **files: str) -> Path:
    """A folder with shards (file -> names of its tensors), an index of them, and other files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(CONFIG, encoding="utf-8")
    for name, tensors in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({tensor: torch.zeros(4) for tensor in tensors}, folder / name)
    if index:
        where = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        (folder / INDEX).write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


def opened(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"model_type": "anything"}
    assert checkpoint.path == folder
    return checkpoint


def test_one_file(tmp_path: Path) -> None:
    checkpoint = opened(make(tmp_path, {"model.safetensors": ["b", "a"]}))
    assert checkpoint.where == {"a": "model.safetensors", "b": "model.safetensors"}
    assert checkpoint.texts == {"config.json": CONFIG}
    assert checkpoint.nbytes == (tmp_path / "model.safetensors").stat().st_size


def test_one_file_of_another_name(tmp_path: Path) -> None:
    assert opened(make(tmp_path, {"weights.safetensors": ["a"]})).where == {"a": "weights.safetensors"}
    assert opened(make(tmp_path / "b", {"model-00001-of-00001.safetensors": ["a"]})).where["a"].startswith("model-")


def test_several_files_and_an_index(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": ["b"], "folder/model-2.safetensors": ["a", "c"]}
    checkpoint = opened(make(tmp_path, shards, index=True))
    assert checkpoint.where == {"b": "model-1.safetensors", "a": checkpoint.where["c"], "c": checkpoint.where["a"]}
    assert checkpoint.where["a"] == "folder/model-2.safetensors"
    assert set(checkpoint.texts) == {"config.json", INDEX}
    assert list(checkpoint.tensors) == ["a", "c", "b"]


def test_stale_shards_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, {"model-1.safetensors": ["a"]}, index=True)
    save_file({"a": torch.ones(4), "z": torch.ones(4)}, tmp_path / "old-1-of-2.safetensors")
    (tmp_path / "half-done.safetensors").write_bytes(b"no header")
    checkpoint = opened(tmp_path)
    assert checkpoint.where == {"a": "model-1.safetensors"}
    assert checkpoint.files == {}


def test_a_single_file_wins_over_others_without_an_index(tmp_path: Path) -> None:
    assert opened(make(tmp_path, {"model.safetensors": ["a"], "consolidated.safetensors": ["a"]})).where == {
        "a": "model.safetensors"
    }


def test_other_files_belong_to_it_and_other_weights_do_not(tmp_path: Path) -> None:
    kept = {
        "tokenizer.json": "{}",
        "tokenizer.model": "pieces",
        "chat template.jinja": "{}",
        "größe.txt": "x",
        "modeling_x.py": "pass",
        "README.md": "# x",
        "figures/loss curve.png": "png",
    }
    left = {
        "pytorch_model.bin": "x",
        "pytorch_model.bin.index.json": "{}",
        "model.gguf": "x",
        "original/consolidated.00.pth": "x",
        "onnx/model.onnx": "x",
        "onnx/model.onnx_data": "x",
        ".git/HEAD": "ref",
        ".gitattributes": "*.safetensors filter=lfs",
        ".gitignore": "*.json",
        ".cache/huggingface/x.lock": "",
        ".mreader/journal.jsonl": "",
        ".mreader-restore/journal.jsonl": "",
        "sub/.cache/x": "",
        "__pycache__/modeling_x.cpython-311.pyc": "x",
    }
    make(tmp_path, {"model.safetensors": ["a"]})
    for name, content in {**kept, **left}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert opened(tmp_path).files == {name: len(content.encode()) for name, content in kept.items()}


def test_a_folder_of_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = make(tmp_path / "blobs", {"model.safetensors": ["a"]}, tokenizer__json="{}"), tmp_path / "s"
    (blobs / "more").mkdir()
    (blobs / "more" / "vocabulary.txt").write_text("v")
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../blobs") / path.name)
    checkpoint = opened(snapshot)
    assert checkpoint.where == {"a": "model.safetensors"}
    assert checkpoint.files == {"tokenizer.json": 2, "more/vocabulary.txt": 1}


def test_a_link_that_leads_in_a_circle(tmp_path: Path) -> None:
    make(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / "again").symlink_to(tmp_path)
    assert opened(tmp_path).files == {}


def test_remote_and_local_are_the_same_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, {"m-1.safetensors": ["a"], "m-2.safetensors": ["b"]}, index=True, tokenizer__json="{}")
    local = opened(tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    remote = remote_checkpoint(
        sizes, lambda name: (tmp_path / name).read_text(encoding="utf-8"), lambda name: local.headers[name].text
    )
    assert remote.folder is None
    assert (remote.texts, remote.headers, remote.where, remote.files) == (
        local.texts,
        local.headers,
        local.where,
        local.files,
    )
    with pytest.raises(SourceError, match="not been downloaded"):
        _ = remote.path


def test_remote_file_that_is_shorter_than_its_header_says(tmp_path: Path) -> None:
    data = save({"a": torch.zeros(4)})
    length = int.from_bytes(data[:8], "little")
    with pytest.raises(SourceError, match=r"model\.safetensors is truncated"):
        remote_checkpoint(
            {"config.json": len(CONFIG), "model.safetensors": len(data) - 1},
            lambda _: CONFIG,
            lambda _: data[8 : 8 + length],
        )


def test_remote_folders_of_tools_are_left_out_like_local_ones() -> None:
    data = save({"a": torch.zeros(4)})
    sizes = {"config.json": len(CONFIG), "model.safetensors": len(data), "sub/a.txt": 3}
    noise = {".git/HEAD": 1, "sub/.cache/x": 1, "__pycache__/x.pyc": 1, ".mreader/lock": 1, "x/model.gguf": 1}
    length = int.from_bytes(data[:8], "little")
    remote = remote_checkpoint({**sizes, **noise}, lambda _: CONFIG, lambda _: data[8 : 8 + length])
    assert remote.files == {"sub/a.txt": 3}
    assert select_files({**sizes, **noise}, lambda _: CONFIG).names == tuple(sorted(sizes))


@pytest.mark.parametrize("name", ["größe.txt", "全角\u3000空白.txt", "Screenshot at 3.00\u202fPM.png"])
def test_names_in_any_script(tmp_path: Path, name: str) -> None:
    make(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / name).write_bytes(b"x")
    assert opened(tmp_path).files == {name: 1}


@pytest.mark.parametrize("name", [b"two\nlines.txt", b"bell\a.txt", b"latin-\xe9.txt"])
def test_names_that_nobody_could_type(tmp_path: Path, name: bytes) -> None:
    make(tmp_path, {"model.safetensors": ["a"]})
    (tmp_path / os.fsdecode(name)).write_bytes(b"x")
    with pytest.raises(SourceError, match="cannot be written down"):
        open_checkpoint(tmp_path)


def test_the_largest_file_of_other_weights_is_named(tmp_path: Path) -> None:
    make(tmp_path, {}, a_training_args__bin="x", pytorch_model__bin="xxxx")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        '{"a": "\\ud800"}',
        '{"\\udfff": 1}',
        '{"a": [{"b": ["\\udc00x"]}]}',
        '{"a":' * 101 + "1" + "}" * 101,
        "[" * 99_999,
    ],
)
def test_config_that_could_not_be_written_again(tmp_path: Path, config: str) -> None:
    make(tmp_path, {"model.safetensors": ["a"]}, config__json=config)
    with pytest.raises(SourceError, match=r"config\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("config", ['{"a": "\\ud83d\\ude00"}', '{"a": "\U0001f600"}', '{"a":' * 90 + "1" + "}" * 90])
def test_config_with_pairs_and_depth(tmp_path: Path, config: str) -> None:
    assert open_checkpoint(make(tmp_path, {"model.safetensors": ["a"]}, config__json=config)).config


@pytest.mark.parametrize("name", ["a", "a/b c", "a..b", ".hidden", "é"])
def test_safe_names(name: str) -> None:
    assert is_safe_name(name)


@pytest.mark.parametrize("name", ["", ".", "/etc/passwd", "..", "../a", "a/../../b", "a\0"])
def test_unsafe_names(name: str) -> None:
    assert not is_safe_name(name)
