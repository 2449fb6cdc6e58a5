"""Every bad input ends in one line of cause that names what is at fault, one line of help, its own exit status, and no
output; the source is not touched.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import killing
import pytest
import torch
from commands import contents, mreader
from safetensors import safe_open
from safetensors.torch import save_file
from sources import (
    INDEX,
    copied,
    edit_json,
    edit_shard,
    edit_tensor,
    make_source,
    read_json,
    remove_tensors,
    shard_of,
    shards,
)

from mreader.convert import convert
from mreader.formats.architectures import known_model_types

USAGE, SOURCE, SPACE, UNSUPPORTED = 2, 3, 4, 6

EXPERT = "model.layers.1.mlp.experts.2"
GATE, UP, DOWN = (f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))
NORM = "model.norm.weight"
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("whole") / "source")


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source whose experts are fused in one tensor a layer."""
    return make_source(tmp_path_factory.mktemp("fused") / "source", "gemma4_text", files=1)


@pytest.fixture(scope="module")
def augmented(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("augmented") / "out"
    convert(source, out, device="cpu")
    return out


class Case(NamedTuple):
    """What is done to a good source, the exit status, and what the line of cause must contain."""

    name: str
    damage: Callable[[Path], object]
    code: int
    words: list[str]


def config(**values: Any) -> Callable[[Path], None]:
    """Change keys of config.json; None removes one."""

    def change(settings: dict[str, Any]) -> None:
        settings.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del settings[key]

    return lambda folder: edit_json(folder / "config.json", change)


def quantized(method: str, **more: Any) -> Callable[[Path], None]:
    return config(quantization_config={"quant_method": method, **more})


def index(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda value: edit(value["weight_map"]))


def text(name: str, content: str | bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def header(entries: dict[str, Any]) -> bytes:
    """A safetensors file without data."""
    data = json.dumps(entries).encode()
    return len(data).to_bytes(8, "little") + data


def truncate(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def fill(tensor: str, where: Any, value: float) -> Callable[[Path], None]:
    return lambda folder: edit_tensor(folder, tensor, lambda t: t.__setitem__(where, value))


def replace(tensor: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit_tensor(folder, tensor, edit)


def only(*keep: str, **files: str) -> Callable[[Path], None]:
    """Remove all weights and their index, but for `keep`, and write other `files`."""

    def change(folder: Path) -> None:
        for path in [*shards(folder), folder / INDEX]:
            if path.name not in keep:
                path.unlink()
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")

    return change


def duplicate_in_another_shard(folder: Path) -> None:
    other = next(path for path in shards(folder) if path != shard_of(folder, NORM))
    edit_shard(other, lambda tensors: tensors.update({NORM: torch.ones(192)}))


def duplicate_in_one_header(folder: Path) -> None:
    path = shard_of(folder, NORM)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    header = (json.dumps(entries)[:-1] + f', "{NORM}": {json.dumps(entries[NORM])}}}').encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def add_tensor(name: str, like: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = shard_of(folder, like)
        edit_shard(path, lambda tensors: tensors.update({name: tensors[like].clone()}))
        edit_json(folder / INDEX, lambda value: value["weight_map"].update({name: path.name}))

    return change


def pack(parts: dict[str, torch.dtype], **files: str) -> Callable[[Path], None]:
    """Put tensors of other dtypes in the place of each `weight` of an expert, and other files beside config.json."""

    def change(folder: Path) -> None:
        where: dict[str, str] = {}
        for path in shards(folder):
            with safe_open(path, "pt") as file:
                old = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            new = {name: tensor for name, tensor in old.items() if ".experts." not in name}
            for name in old.keys() - new.keys():
                new |= {name.removesuffix("weight") + p: torch.ones(4, 4).to(d) for p, d in parts.items()}
            path.unlink()
            save_file(new, path, {"format": "pt"})
            where |= dict.fromkeys(new, path.name)
        edit_json(folder / INDEX, lambda value: value.update(weight_map=where))
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")

    return change


def without_experts(folder: Path) -> None:
    remove_tensors(folder, lambda name: ".experts." in name)
    config(num_experts=0)(folder)


def all_as(dtype: torch.dtype) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in shards(folder):
            edit_shard(path, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))

    return change


FIRST = "model-00001-of-00006.safetensors"
# fmt: off
CASES = [
    Case("no such folder", shutil.rmtree, SOURCE, ["source", "does not exist"]),
    Case("empty folder", lambda f: [shutil.rmtree(f), f.mkdir()], SOURCE, ["config.json"]),
    Case("no config", lambda f: (f / "config.json").unlink(), SOURCE, ["config.json"]),
    Case("config is not JSON", text("config.json", '{"model_type": '), SOURCE, ["config.json", "JSON"]),
    Case("config is not an object", text("config.json", "[]"), SOURCE, ["config.json", "object"]),
    Case("config is not UTF-8", text("config.json", b"\xff\xfe{}"), SOURCE, ["config.json", "UTF-8"]),
    Case("config without model_type", config(model_type=None), SOURCE, ["config.json", "model_type"]),
    Case("config without experts per token", config(num_experts_per_tok=None), SOURCE, ["num_experts_per_tok"]),
    Case("config without expert width", config(intermediate_size=None), SOURCE, ["intermediate_size"]),
    Case("config of a larger model", config(hidden_size=256), SOURCE, ["model.layers.0.mlp.experts", "[80, 192]"]),
    Case("config with more layers", config(num_hidden_layers=4), SOURCE, ["layer 3"]),
    Case("config with countless layers", config(num_hidden_layers=10**12), SOURCE, ["layer 3"]),
    Case("config with countless experts", config(num_experts=10**12), SOURCE, ["experts.6.", "missing"]),
    Case("config with countless layers, few sparse", config(num_hidden_layers=10**12, decoder_sparse_step=10**11),
         SOURCE, ["layer 0"]),
    Case("config with countless dense layers", config(num_hidden_layers=10**12, first_k_dense_replace=10**11), SOURCE,
         ["layer 0"]),
    Case("more experts per token than experts", config(num_experts_per_tok=7), SOURCE, ["7 experts of 6"]),
    Case("activation that is no name", config(hidden_act=["silu"]), SOURCE, ["hidden_act", "['silu']"]),
    Case("sparse step that is text", config(decoder_sparse_step="1"), SOURCE, ["decoder_sparse_step", "'1'"]),
    Case("sparse step below zero", config(decoder_sparse_step=-1), SOURCE, ["decoder_sparse_step", "-1"]),
    Case("dense layers that are no list", config(mlp_only_layers=1), SOURCE, ["mlp_only_layers", "1"]),
    Case("dense layers in a list in a list", config(mlp_only_layers=[[0]]), SOURCE, ["mlp_only_layers", "[[0]]"]),
    Case("first dense layers that are text", config(first_k_dense_replace="0"), SOURCE,
         ["first_k_dense_replace", "'0'"]),
    Case("config with half a surrogate pair", config(note="\ud800"), SOURCE, ["config.json", "surrogate"]),
    Case("config with half a pair in a key", config(note={"\udc00": [1]}), SOURCE, ["config.json", "surrogate"]),
    Case("index with half a pair", index(lambda w: w.update({"\ud800": FIRST})), SOURCE, [INDEX, "surrogate"]),
    Case("config nested without end", text("config.json", '{"a":' * 100_000 + "1" + "}" * 100_000), SOURCE,
         ["config.json"]),
    Case("config nested too deep", text("config.json", '{"a":' + "[" * 200 + "]" * 200 + "}"), SOURCE,
         ["config.json", "deep"]),
    Case("index nested without end", text(INDEX, "[" * 100_000), SOURCE, [INDEX]),
    Case("shard header nested without end", text(FIRST, (100_000).to_bytes(8, "little") + b"[" * 100_000), SOURCE,
         [FIRST, "header"]),
    Case("shard header with half a pair", text(FIRST, header({"\ud800": {"dtype": "F16", "shape": [0],
         "data_offsets": [0, 0]}})), SOURCE, [FIRST, "header"]),
    Case("shard header with a boundless shape", text(FIRST, header({"x": {"dtype": "F16", "shape": [10**18] * 300,
         "data_offsets": [0, 0]}})), SOURCE, [FIRST, "header"]),
    Case("missing shard", lambda f: (f / FIRST).unlink(), SOURCE, [FIRST, INDEX]),
    Case("shard cut in its data", truncate(FIRST, 100_000), SOURCE, [FIRST, "truncated", "100,000"]),
    Case("shard cut in its header", truncate(FIRST, 100), SOURCE, [FIRST, "truncated"]),
    Case("empty shard", truncate(FIRST, 0), SOURCE, [FIRST, "truncated"]),
    Case("shard with more behind", lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes() + b"x"), SOURCE,
         [FIRST, "1 bytes after"]),
    Case("shard that is a web page", text(FIRST, "<!DOCTYPE html>" * 9), SOURCE, [FIRST]),
    Case("shard that is a pointer", text(FIRST, LFS_POINTER), SOURCE, [FIRST, "Git-LFS pointer"]),
    Case("config that is a pointer", text("config.json", LFS_POINTER), SOURCE, ["config.json", "Git-LFS pointer"]),
    Case("index that is a pointer", text(INDEX, LFS_POINTER), SOURCE, [INDEX, "Git-LFS pointer"]),
    Case("tokenizer that is a pointer", text("tokenizer.json", LFS_POINTER), SOURCE, ["tokenizer.json", "pointer"]),
    Case("index is not JSON", text(INDEX, "model"), SOURCE, [INDEX, "JSON"]),
    Case("index without a map", text(INDEX, '{"metadata": {}}'), SOURCE, [INDEX, "weight_map"]),
    Case("index names a file that is not there", index(lambda w: w.update(x="model-7.safetensors")), SOURCE,
         [INDEX, "model-7.safetensors"]),
    Case("index leads out of the folder", index(lambda w: w.update(x="../x.safetensors")), SOURCE,
         [INDEX, "../x.safetensors"]),
    Case("index lists what no shard holds", index(lambda w: w.update(ghost=FIRST)), SOURCE, [INDEX, "ghost", FIRST]),
    Case("index lists too little", index(lambda w: w.pop(NORM)), SOURCE, [INDEX, NORM]),
    Case("index places a tensor elsewhere", index(lambda w: w.update({NORM: FIRST})), SOURCE, [INDEX, NORM, FIRST]),
    Case("tensor in two shards", duplicate_in_another_shard, SOURCE, [NORM, "both"]),
    Case("tensor twice in one shard", duplicate_in_one_header, SOURCE, [NORM, "twice", ".safetensors"]),
    Case("expert missing in one layer", lambda f: remove_tensors(f, lambda n: n.startswith(f"{EXPERT}.")), SOURCE,
         [f"{EXPERT}.", "missing"]),
    Case("one matrix missing", lambda f: remove_tensors(f, lambda n: n == DOWN), SOURCE, [DOWN, "missing"]),
    Case("experts of a layer missing", lambda f: remove_tensors(f, lambda n: "layers.1.mlp.experts" in n), SOURCE,
         ["layer 1"]),
    Case("whole layer missing", lambda f: remove_tensors(f, lambda n: ".layers.1." in n), SOURCE, ["layer 1"]),
    Case("expert too many", add_tensor("model.layers.1.mlp.experts.6.up_proj.weight", UP), SOURCE,
         ["model.layers.1.mlp.experts.6.up_proj.weight"]),
    Case("tensor that no rule places", add_tensor(f"{EXPERT}.up_proj.scale", UP), SOURCE, [f"{EXPERT}.up_proj.scale"]),
    Case("wrong shape", replace(UP, lambda t: t[:79].clone()), SOURCE, [UP, "[79, 192]", "[80, 192]"]),
    Case("transposed", replace(DOWN, lambda t: t.T.contiguous()), SOURCE, [DOWN, "[80, 192]", "[192, 80]"]),
    Case("NaN in gate", fill(GATE, (5, 7), float("nan")), SOURCE, [GATE, "expert 2", "row 5"]),
    Case("infinity in up", fill(UP, (79, 0), float("inf")), SOURCE, [UP, "expert 2", "row 79"]),
    Case("infinity in down", fill(DOWN, (0, 79), float("-inf")), SOURCE, [DOWN, "expert 2", "row 0"]),
    Case("NaN in down", fill(DOWN, (191, 3), float("nan")), SOURCE, [DOWN, "expert 2", "row 191"]),
    Case("NaN in a copied matrix", fill("lm_head.weight", (9, 1), float("nan")), SOURCE, ["lm_head.weight", "row 9"]),
    Case("NaN in a copied vector", fill(NORM, 11, float("nan")), SOURCE, [NORM, "row 11"]),
    Case("link to nothing", lambda f: (f / "merges.txt").symlink_to("blobs/none"), SOURCE, ["merges.txt", "link"]),
    Case("shard that links to nothing", lambda f: [(f / FIRST).unlink(), (f / FIRST).symlink_to("x")], SOURCE,
         [FIRST, "link"]),
    Case("pipe among the files", lambda f: os.mkfifo(f / "pipe"), SOURCE, ["pipe"]),
    Case("file name that is no text", lambda f: os.close(os.open(os.fsencode(f) + b"/\xff.txt", os.O_CREAT)), SOURCE,
         [".txt"]),
    Case("single file beside an index", lambda f: shutil.copy(f / FIRST, f / "model.safetensors"), SOURCE,
         ["model.safetensors", INDEX]),
    Case("shards without their index", lambda f: (f / INDEX).unlink(), SOURCE, [FIRST, INDEX]),
    Case("one shard of several, no index", only(FIRST), SOURCE, [FIRST, INDEX]),
    Case("no weights", only(), SOURCE, ["safetensors"]),
    Case("manifest of ours in the source", text("mreader_manifest.json", "{}"), SOURCE, ["mreader_manifest.json"]),
    Case("only .bin weights", only(pytorch_model__bin="x", training_args__bin=""), UNSUPPORTED, ["pytorch_model.bin"]),
    Case("only .gguf weights", only(model__gguf="GGUF"), UNSUPPORTED, ["model.gguf"]),
    Case("FP8", quantized("fp8", weight_block_size=[128, 128]), UNSUPPORTED, ["quantized (fp8)", "in full"]),
    Case("MXFP4", quantized("mxfp4"), UNSUPPORTED, ["quantized (mxfp4)", "in full"]),
    Case("GPTQ", quantized("gptq", bits=4), UNSUPPORTED, ["quantized (gptq)", "in full"]),
    Case("AWQ", quantized("awq"), UNSUPPORTED, ["quantized (awq)", "in full"]),
    Case("compressed-tensors", quantized("compressed-tensors", config_groups={}), UNSUPPORTED,
         ["quantized (compressed-tensors)", "in full"]),
    Case("a method that is not known", quantized("hqq"), UNSUPPORTED, ["quantized (hqq)", "not supported yet"]),
    Case("FP8 that config.json does not tell", all_as(torch.float8_e4m3fn), UNSUPPORTED,
         ["model.layers.0.mlp.experts.0", "F8_E4M3", "not supported yet"]),
    Case("FP8 with inverse scales", pack({"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32}),
         UNSUPPORTED, ["quantized (fp8)", "not supported yet", "weight_scale_inv"]),
    Case("FP8 with scales", pack({"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}), UNSUPPORTED,
         ["quantized (fp8)", "not supported yet"]),
    Case("FP8 of ModelOpt", pack({"weight": torch.float8_e4m3fn, "input_scale": torch.float32},
         hf_quant_config__json="{}"), UNSUPPORTED, ["quantized (fp8)", "hf_quant_config.json"]),
    Case("NVFP4 of ModelOpt", pack({"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn},
         hf_quant_config__json="{}"), UNSUPPORTED, ["quantized (nvfp4)", "hf_quant_config.json"]),
    Case("NVFP4", pack({"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32}),
         UNSUPPORTED, ["quantized (nvfp4)", "weight_scale_2"]),
    Case("NVFP4 of compressed-tensors", pack({"weight_packed": torch.uint8, "weight_global_scale": torch.float32}),
         UNSUPPORTED, ["quantized (nvfp4)", "weight_global_scale"]),
    Case("MXFP4 blocks", pack({"proj_blocks": torch.uint8, "proj_scales": torch.uint8}), UNSUPPORTED,
         ["quantized (mxfp4)", "_blocks"]),
    Case("old GPTQ", pack({"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
         quantize_config__json="{}"), UNSUPPORTED, ["quantized (gptq)", "quantize_config.json"]),
    Case("GPTQ with its order", pack({"qweight": torch.int32, "g_idx": torch.int32}), UNSUPPORTED,
         ["quantized (gptq)", "g_idx"]),
    Case("old AWQ", pack({"qweight": torch.int32, "qzeros": torch.int32}, quant_config__json="{}"), UNSUPPORTED,
         ["quantized (awq)", "quant_config.json"]),
    Case("GPTQ or AWQ", pack({"qweight": torch.int32, "scales": torch.float16}), UNSUPPORTED,
         ["quantized (gptq or awq)", "qweight"]),
    Case("bitsandbytes of 4 bits", pack({"weight": torch.uint8, "weight.absmax": torch.uint8,
         "weight.quant_state.bitsandbytes__nf4": torch.uint8}), UNSUPPORTED, ["quantized (bitsandbytes)", "absmax"]),
    Case("bitsandbytes of 8 bits", pack({"weight": torch.int8, "SCB": torch.float32}), UNSUPPORTED,
         ["quantized (bitsandbytes)", "SCB"]),
    Case("INT8", pack({"weight": torch.int8, "weight_scale": torch.bfloat16}), UNSUPPORTED,
         ["quantized (int8)", "I8"]),
    Case("experts in two dtypes", replace(UP, lambda t: t.float()), UNSUPPORTED, ["layer 1", "BF16", "F32"]),
    Case("dense model of a known type", without_experts, UNSUPPORTED, ["dense"]),
    Case("dense model of another type", config(model_type="llama", num_experts=None), UNSUPPORTED, ["llama"]),
    Case("unknown type", config(model_type="mystery_moe"), UNSUPPORTED, ["mystery_moe", *known_model_types()]),
]
# fmt: on


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_source(case: Case, source: Path, tmp_path: Path) -> None:
    folder, out = copied(source, tmp_path / "source"), tmp_path / "out"
    assert (folder / FIRST).exists()
    case.damage(folder)
    before = contents(tmp_path)
    ran = mreader("convert", folder, out)
    assert [word for word in case.words if word not in ran.cause] == [], ran.err
    assert ran.code == case.code
    assert ran.out == ""
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("tensor", "where", "place"),
    [
        ("gate_up_proj", (4, 3, 0), "expert 4, row 3"),
        ("gate_up_proj", (4, 83, 0), "expert 4, row 83"),
        ("down_proj", (5, 100, 79), "expert 5, row 100"),
    ],
)
def test_nan_in_a_fused_tensor(fused: Path, tmp_path: Path, tensor: str, where: tuple[int, ...], place: str) -> None:
    name = f"model.layers.2.experts.{tensor}"
    folder = copied(fused, tmp_path / "source")
    edit_tensor(folder, name, lambda t: t.__setitem__(where, float("nan")))
    before = contents(tmp_path)
    ran = mreader("convert", folder, tmp_path / "out")
    assert name in ran.cause
    assert place in ran.cause
    assert ran.code == SOURCE
    assert contents(tmp_path) == before


def test_nan_after_a_finished_shard_leaves_what_can_be_resumed(source: Path, tmp_path: Path) -> None:
    """The journal and the finished shards stay, and nothing that makes the folder a checkpoint."""
    folder, out = copied(source, tmp_path / "source"), tmp_path / "out"
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    edit_tensor(folder, name, lambda t: t.__setitem__((1, 1), float("nan")))
    ran = mreader("convert", folder, out, "--max-shard-size", "300KB")
    assert name in ran.cause
    assert ran.code == SOURCE
    names = {path.name for path in out.iterdir()}
    assert ".mreader" in names
    assert shards(out)
    assert not names & {"config.json", INDEX, "mreader_manifest.json", "mreader_source.json"}
    assert not list((out / ".mreader").glob("*.part"))
    assert "has not ended" in mreader("verify", out).cause


def test_augmented_source(augmented: Path, tmp_path: Path) -> None:
    ran = mreader("convert", augmented, tmp_path / "out")
    assert "augmented already" in ran.cause
    assert ran.code == UNSUPPORTED
    assert not (tmp_path / "out").exists()


def entry(**values: Any) -> Callable[[Path], None]:
    """Change keys of `quantization_config`."""
    return lambda folder: edit_json(folder / "config.json", lambda c: c["quantization_config"].update(values))


# fmt: off
AUGMENTED = [
    Case("options that are a list", config(quantization_config=[1]), SOURCE, ["quantization_config", "[1]"]),
    Case("options that are text", config(quantization_config="mreader"), SOURCE, ["quantization_config", "'mreader'"]),
    Case("rank in words", entry(rank="x"), SOURCE, ["rank", "'x'"]),
    Case("codes of another checkpoint", entry(codes="quaternary"), SOURCE, ["quaternary", "converted with ternary"]),
    Case("seed of another checkpoint", entry(seed=5), SOURCE, ["seed 5", "converted with 0"]),
    Case("no rank", entry(rank=None), SOURCE, ["rank", "None"]),
    Case("half a rank", entry(rank=1.5), SOURCE, ["rank", "1.5"]),
    Case("rank that is true", entry(rank=True), SOURCE, ["rank", "True"]),
    Case("rank below zero", entry(rank=-1), SOURCE, ["rank", "-1"]),
    Case("seed in words", entry(seed="x"), SOURCE, ["seed", "'x'"]),
    Case("seed below zero", entry(seed=-1), SOURCE, ["seed", "-1"]),
    Case("seed of many bits", entry(seed=2**70), SOURCE, ["seed", str(2**70)]),
    Case("budget in words", entry(channels="all"), SOURCE, ["channels", "'all'"]),
    Case("budget that is true", entry(channels=True), SOURCE, ["channels", "True"]),
    Case("budget of more than everything", entry(channels=2), SOURCE, ["channels", "2"]),
    Case("budget of nothing", entry(channels=0.0), SOURCE, ["channels", "0.0"]),
    Case("budget that is no number", entry(channels=float("nan")), SOURCE, ["channels", "nan"]),
    Case("coordinates beyond the block", entry(coordinates=129), SOURCE, ["coordinates", "129"]),
    Case("coordinates in halves", entry(coordinates=2.5), SOURCE, ["coordinates", "2.5"]),
    Case("score that is a list", entry(score=["rho"]), SOURCE, ["score", "['rho']"]),
    Case("score that is not known", entry(score="best"), SOURCE, ["score", "best"]),
    Case("codes that are a list", entry(codes=["ternary"]), SOURCE, ["codes", "['ternary']"]),
    Case("codes that are not known", entry(codes="octal"), SOURCE, ["codes", "octal"]),
    Case("another model type", config(model_type="mixtral"), SOURCE, ["model_type", "'mixtral'", "'olmoe'"]),
    Case("model type that is a list", config(model_type=["olmoe"]), SOURCE, ["model_type", "['olmoe']"]),
    Case("no model type", config(model_type=None), SOURCE, ["model_type", "None"]),
    Case("hidden size below zero", config(hidden_size=-3), SOURCE, ["hidden_size", "-3"]),
    Case("hidden size in words", config(hidden_size="x"), SOURCE, ["hidden_size", "'x'"]),
    Case("no hidden size", config(hidden_size=None), SOURCE, ["hidden_size"]),
    Case("hidden size of another model", config(hidden_size=10**9), SOURCE, ["hidden_size", "1000000000", "192"]),
    Case("channels of another model", config(intermediate_size=81), SOURCE, ["intermediate_size", "81", "80"]),
    Case("countless layers", config(num_hidden_layers=10**12), SOURCE, ["num_hidden_layers", "1000000000000", "3"]),
    Case("countless experts", config(num_experts=10**12), SOURCE, ["num_experts", "1000000000000", "6"]),
    Case("more experts a token than there are", config(num_experts_per_tok=7), SOURCE, ["num_experts_per_tok", "7"]),
    Case("no expert a token", config(num_experts_per_tok=0), SOURCE, ["num_experts_per_tok", "0"]),
    Case("activation that is no name", config(hidden_act=3), SOURCE, ["hidden_act", "3"]),
    Case("another activation", config(hidden_act="relu"), SOURCE, ["hidden_act", "'relu'", "'silu'"]),
]
# fmt: on


@pytest.mark.parametrize("case", AUGMENTED, ids=lambda case: case.name)
def test_bad_config_of_an_augmented_checkpoint(case: Case, augmented: Path, tmp_path: Path) -> None:
    """A default budget included: what is wrong with it is the checkpoint's fault, not the call's."""
    folder = copied(augmented, tmp_path / "out")
    case.damage(folder)
    ran = mreader("inspect", folder)
    assert [word for word in ("config.json", *case.words) if word not in ran.cause] == [], ran.err
    assert ran.code == case.code
    assert ran.out == ""


def test_a_config_that_only_transformers_reads(augmented: Path, tmp_path: Path) -> None:
    folder = copied(augmented, tmp_path / "out")
    config(rms_norm_eps="small")(folder)
    ran = mreader("generate", folder, "--prompt", "a", "--device", "cpu")
    assert [word for word in ("config.json", "rms_norm_eps", "'small'") if word not in ran.cause] == [], ran.err
    assert ran.code == SOURCE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "193"], ["rank", "193", "192"]),
        (["--rank", "-1"], ["rank", "-1"]),
        (["--coordinates", "0"], ["coordinates", "0"]),
        (["--coordinates", "129"], ["coordinates", "129"]),
        (["--channels", "0"], ["channels", "0"]),
        (["--channels", "1.5"], ["channels", "1.5"]),
        (["--channels", "nan"], ["channels", "nan"]),
        (["--seed", "-1"], ["seed", "-1"]),
        (["--codes", "octal"], ["octal"]),
        (["--score", "best"], ["score", "best"]),
        (["--device", "cuda:7"], ["cuda:7"]),
        (["--device", "tpu9"], ["tpu9"]),
        (["--max-shard-size", "large"], ["max-shard-size", "large"]),
        (["--max-shard-size", "0"], ["max-shard-size", "0"]),
        (["--max-shard-size", "1e400GB"], ["max-shard-size", "1e400GB"]),
        (["--max-shard-size", "nan"], ["max-shard-size", "nan"]),
        (["--revision", "main"], ["--revision"]),
    ],
)
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_bad_option(source: Path, tmp_path: Path, options: list[str], words: list[str], dry_run: list[str]) -> None:
    ran = mreader("convert", source, tmp_path / "out", *options, *dry_run)
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == USAGE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--dry-run"]])
@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "years of work"},
        {"config.json": "{}", "model.safetensors": "somebody's model"},
        {"mreader_manifest.json": "not ours", "notes.txt": "mine"},
        {".mreader/cache": "of another tool", "notes.txt": "mine"},
        {".mreader/cache": "of another tool"},
        {".mreader/journal.jsonl": '{"request": 0}', "notes.txt": "mine"},
    ],
    ids=lambda files: " and ".join(files),
)
def test_foreign_output_folder_is_never_touched(
    source: Path, tmp_path: Path, files: dict[str, str], options: list[str]
) -> None:
    out = tmp_path / "out"
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(content, encoding="utf-8")
    before = contents(out)
    ran = mreader("convert", source, out, "-q", *options)
    assert f"error: {out} is not empty" in ran.err
    assert ran.code == USAGE
    assert contents(out) == before


def test_output_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    ran = mreader("convert", source, tmp_path / "out", "--overwrite")
    assert "is a file" in ran.cause
    assert ran.code == USAGE
    assert (tmp_path / "out").read_text() == "mine"


def test_output_below_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ran = mreader("convert", source, tmp_path / "file" / "out")
    assert str(tmp_path / "file") in ran.cause
    assert ran.code == 1
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--dry-run"]])
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (".", "are the same folder"),
        ("out", "lies inside the other"),
        ("nested/out", "lies inside the other"),
        ("..", "lies inside the other"),
    ],
)
def test_source_and_output_overlap(source: Path, tmp_path: Path, place: str, words: str, options: list[str]) -> None:
    folder = copied(source, tmp_path / "above" / "source")
    before = contents(tmp_path)
    ran = mreader("convert", folder, folder / place, *options)
    assert ran.code == USAGE
    assert str(folder) in ran.cause
    assert words in ran.cause
    assert contents(tmp_path) == before


def test_source_and_output_overlap_through_a_link(source: Path, tmp_path: Path) -> None:
    folder = copied(source, tmp_path / "source")
    (tmp_path / "link").symlink_to(folder)
    before = contents(folder)
    ran = mreader("convert", folder, tmp_path / "link", "--overwrite")
    assert ran.code == USAGE
    assert contents(folder) == before


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small disk in memory; skips where it cannot be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk needs root"
)


@needs_mount
def test_disk_too_small_is_found_before_the_work(source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        ran = mreader("convert", source, disk / "out")
        assert ran.code == SPACE
        assert str(disk / "out") in ran.cause
        assert list(disk.iterdir()) == []
        assert mreader("convert", source, disk / "out", "--dry-run", "-q").code == SPACE


@needs_mount
def test_disk_that_fills_up_leaves_what_can_be_resumed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with mounted(tmp_path / "disk", "size=1m") as disk:
        out = disk / "out"
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: usage)
            ran = mreader("convert", source, out, "--max-shard-size", "300KB")
        assert ran.code == SPACE
        assert f"the disk of {out} is full" in ran.cause
        names = {path.name for path in out.iterdir()}
        assert shards(out)
        assert not names & {"config.json", INDEX, "mreader_manifest.json", "mreader_source.json"}
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        assert mreader("convert", source, out, "--max-shard-size", "300KB").code == 0
        assert mreader("verify", out, "--source", source).code == 0


@needs_mount
def test_disk_that_fills_up_in_the_first_shard_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with mounted(tmp_path / "disk", "size=1m") as disk:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        ran = mreader("convert", source, disk / "new" / "out")
        assert ran.code == SPACE
        assert list(disk.iterdir()) == []


def test_file_that_may_not_grow_leaves_what_can_be_resumed(source: Path, tmp_path: Path) -> None:
    """As on a disk that fills up, without the need to mount one."""
    out = tmp_path / "out"
    assert killing.run(killing.convert_with_limit, source, out, 200_000, 300_000) == SPACE
    assert shards(out)
    names = {path.name for path in out.iterdir()}
    assert not names & {"config.json", INDEX, "mreader_manifest.json", "mreader_source.json"}
    assert not list((out / ".mreader").glob("*.part"))
    assert mreader("convert", source, out, "--max-shard-size", "200000", "--device", "cpu", "-q").code == 0
    assert mreader("verify", out, "--source", source).code == 0


def test_file_that_may_not_grow_in_the_first_shard_leaves_nothing(source: Path, tmp_path: Path) -> None:
    assert killing.run(killing.convert_with_limit, source, tmp_path / "new" / "out", 10**9, 300_000) == SPACE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [INDEX, "mreader_source.json", "config.json", "mreader_manifest.json"])
def test_disk_that_fills_up_at_the_end_leaves_no_half_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Index, source record, config and manifest are there together or not at all."""
    module = import_module("mreader.convert")
    write = module._write_json

    def fail(value: dict[str, Any], scratch: Path, target: Path) -> object:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(scratch))
        return write(value, scratch, target)

    out = tmp_path / "out"
    options = [source, out, "--max-shard-size", "300KB"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_json", fail)
        ran = mreader("convert", *options)
    assert ran.code == SPACE
    assert "is full" in ran.cause
    names = {path.name for path in out.iterdir()}
    assert not names & {"config.json", INDEX, "mreader_manifest.json", "mreader_source.json"}
    assert mreader("convert", *options).code == 0
    assert mreader("verify", out).code == 0


@needs_mount
def test_read_only_output(source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=8m,ro") as disk:
        ran = mreader("convert", source, disk / "out")
        assert ran.code == 1
        assert str(disk / "out") in ran.cause
        assert "Read-only" in ran.cause
        assert list(disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("place", ["disk", "disk/out", "disk/new/out"])
def test_output_without_permission(source: Path, tmp_path: Path, place: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o555)
    try:
        ran = mreader("convert", source, tmp_path / place)
        assert ran.code == 1
        assert str(disk) in ran.cause
        assert "Permission denied" in ran.cause
        assert list(disk.iterdir()) == []
    finally:
        disk.chmod(0o755)


def test_errors_of_the_work_itself_are_one_line_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error of the source, in the middle."""

    def fail(*_: object) -> object:
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/disk/model-00001.safetensors")

    monkeypatch.setattr("mreader.augment.LayerAugmenter", fail)
    ran = mreader("convert", source, tmp_path / "out")
    assert "/disk/model-00001.safetensors" in ran.cause
    assert ran.code == 1
    assert not (tmp_path / "out").exists()


def test_the_whole_source_is_good(source: Path, tmp_path: Path) -> None:
    """What all of these cases start from."""
    assert mreader("convert", source, tmp_path / "out").code == 0
    assert len(read_json(source / INDEX)["weight_map"]) > 50
