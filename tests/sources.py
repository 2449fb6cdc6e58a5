"""Source checkpoints made, taken apart and damaged, with the safetensors package and plain JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_tiny
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"


def make_source(folder: Path, name: str = "olmoe", *, files: int = 6, **overrides: Any) -> Path:
    """A random checkpoint in so many shards, with other files beside the weights."""
    save_tiny(folder, name, **overrides)
    if files > 1:
        _deal_out(folder, files)
    for side, text in {
        "tokenizer.json": '{"version": "1.0"}',
        "chat template.jinja": "{{ messages }}",
        "Lizenz-größe.txt": "freie Nutzung",
        "modeling_custom.py": "class Custom: ...\n",
        "README.md": "---\nlicense: mit\n---\n",
        "nested/deeper/vocabulary.txt": "a\nb\n",
    }.items():
        (folder / side).parent.mkdir(parents=True, exist_ok=True)
        (folder / side).write_text(text, encoding="utf-8")
    return folder


def _deal_out(folder: Path, files: int) -> None:
    """Cut the one shard into several, through the middle of experts."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    where = {}
    for i in range(files):
        part = names[len(names) * i // files : len(names) * (i + 1) // files]
        shard = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file({name: tensors[name].clone() for name in part}, folder / shard, {"format": "pt"})
        where |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": where}, indent=2), encoding="utf-8"
    )


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target, symlinks=True))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def shard_of(folder: Path, tensor: str) -> Path:
    return folder / str(read_json(folder / INDEX)["weight_map"][tensor])


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = read_json(path)
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_shard(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of one file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    path.unlink()  # it may be a link, and it is mapped
    save_file(tensors, path, {"format": "pt"})


def edit_tensor(folder: Path, tensor: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor, in place or by the one that `edit` returns."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        changed = edit(tensors[tensor])
        if changed is not None:
            tensors[tensor] = changed

    index = folder / INDEX
    edit_shard(shard_of(folder, tensor) if index.exists() else folder / "model.safetensors", change)


def remove_tensors(folder: Path, chosen: Callable[[str], bool]) -> None:
    """Remove tensors from shards and index, so that the two still agree."""
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
        if any(chosen(name) for name in names):
            edit_shard(path, lambda tensors: [tensors.pop(name) for name in [*tensors] if chosen(name)])
    weights = [name for name in read_json(folder / INDEX)["weight_map"] if chosen(name)]
    edit_json(folder / INDEX, lambda index: [index["weight_map"].pop(name) for name in weights])


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in shards(folder) for name, tensor in load_file(path).items()}
