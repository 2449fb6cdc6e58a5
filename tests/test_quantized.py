"""Sources with quantized weights, converted: the checkpoint with those weights in full says what has to come out."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXPERTS, HIDDEN, VOCABULARY, save_tiny
from commands import contents
from commands import mreader as command
from quantizers import AWQ, CASES, FLOAT8, FP8, GPTQ, Case, Stored, fp8, make, scheme
from safetensors.torch import load_file, save_file
from sources import INDEX, all_tensors, edit_json, read_json, shards
from torch import Tensor
from transformers import AutoModelForCausalLM

import mreader
from mreader.card import model_card, read_facts
from mreader.formats.augmented import open_augmented
from mreader.formats.safetensors_file import FileRecord, HashingFile
from mreader.journal import Journal
from mreader.runtime import reader_mode, set_budget

TOKENS = torch.randint(1, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
USAGE, SOURCE, SPACE, VERIFY, UNSUPPORTED = 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Made:
    """The folders of one case: quantized, the same in full, and both converted."""

    case: Case
    source: Path
    full: Path
    out: Path
    expected: Path


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("quantized")
    source, full = make(case, folder)
    mreader.convert(full, folder / "expected", device="cpu")
    ran = command("convert", source, folder / "out", "--dtype", "bfloat16", "--device", "cpu", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["quantized"] == case.method
    return Made(case, source, full, folder / "out", folder / "expected")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FP8 source."""
    return make(Case("olmoe", fp8, FP8), tmp_path_factory.mktemp("fp8"))[0]


def test_the_result_is_that_of_the_dequantized_model(made: Made) -> None:
    found, expected = all_tensors(made.out), all_tensors(made.expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)
    config, plain = (read_json(folder / "config.json") for folder in (made.out, made.expected))
    assert config == plain
    names = {path.name for path in made.out.iterdir()}
    assert "tokenizer.json" in names
    assert made.case.side not in names


def test_it_runs_like_the_dequantized_model(made: Made) -> None:
    dense = AutoModelForCausalLM.from_pretrained(made.full, dtype=torch.float32).eval()
    model = mreader.load(made.out, dtype=torch.float32, device="cpu")
    set_budget(model, channels=1.0)
    with torch.inference_mode():
        expected = dense(TOKENS, use_cache=False).logits
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=0, atol=1e-5)
        with reader_mode(model, "always"):
            torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=0, atol=1e-4)


def test_verified_against_the_quantized_source(made: Made) -> None:
    for arguments in ((), ("--source", made.source)):
        ran = command("verify", made.out, *arguments)
        assert ran.code == 0, ran.err


def test_restore_says_that_it_gives_the_dequantized_model(made: Made, tmp_path: Path) -> None:
    ran = command("restore", made.out, tmp_path / "back")
    assert ran.code == 0, ran.err
    assert f"holds the dequantized model: the source itself is quantized ({made.case.method})" in ran.err
    found, expected = all_tensors(tmp_path / "back"), all_tensors(made.full)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert read_json(tmp_path / "back" / "config.json") == read_json(made.full / "config.json")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in made.full.iterdir()}
    assert json.loads(command("restore", made.out, tmp_path / "again", "--json").out)["dequantized_from"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_a_restore_that_was_interrupted_keeps_its_dequantized_shards(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back, commit = tmp_path / "back", HashingFile.commit

    def full_at_the_end(file: HashingFile) -> FileRecord:
        if file.target.name == "config.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return commit(file)

    with monkeypatch.context() as patch:
        patch.setattr(HashingFile, "commit", full_at_the_end)
        assert command("restore", made.out, back).code == SPACE
    before = {path: path.stat().st_ino for path in shards(back)}
    assert command("restore", made.out, back).code == 0
    assert {path: path.stat().st_ino for path in shards(back)} == before
    assert command("restore", made.out, tmp_path / "whole").code == 0
    assert contents(back) == contents(tmp_path / "whole")


def test_without_dtype_the_error_has_the_command(made: Made, tmp_path: Path) -> None:
    for dry_run in ([], ["--dry-run"]):
        ran = command("convert", made.source, tmp_path / "out", *dry_run)
        assert f"the weights are quantized ({made.case.method})" in ran.cause
        assert f"`mreader convert {made.source} {tmp_path / 'out'} --dtype bfloat16`" in ran.err
        assert ran.code == UNSUPPORTED
        assert not (tmp_path / "out").exists()


def test_a_dry_run_says_what_it_becomes(made: Made, tmp_path: Path) -> None:
    ran = command("convert", made.source, tmp_path / "out", "--dtype", "bfloat16", "--dry-run", "--json")
    facts = json.loads(ran.out)
    on_disk = sum(path.stat().st_size for path in made.source.glob("*.safetensors"))
    in_full = sum(path.stat().st_size for path in made.out.glob("*.safetensors"))
    assert (facts["source_bytes"], sum(facts["shards"].values())) == (on_disk, in_full)


def test_the_record_of_the_source_is_that_of_the_quantized_one(made: Made) -> None:
    record, manifest = (read_json(made.out / f"mreader_{name}.json") for name in ("source", "manifest"))
    assert json.loads(record["texts"]["config.json"])["quantization_config"] == made.case.settings
    names = {path.name for path in made.source.iterdir()}
    assert manifest["source"]["files"].keys() == names
    assert manifest["source"]["dequantized_from"] == made.case.method
    assert read_facts(made.out).dequantized_from == made.case.method
    assert f"dequantized from {made.case.method}" in model_card(read_facts(made.out))
    assert "bit for bit" not in model_card(read_facts(made.out))
    assert open_augmented(made.out).source.on_disk.quantized is None
    assert open_augmented(made.out).source.quantized == made.case.method


class TestAcrossShards:
    """Weights apart from their scales, in seven files."""

    @pytest.mark.parametrize("name", ["gpt_oss, MXFP4", "qwen3_moe, GPTQ"])
    def test_interrupted_and_resumed(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source, _ = make(CASES[name], tmp_path, shards=7)
        arguments = {"device": "cpu", "dtype": "bfloat16", "max_shard_bytes": 200_000}
        mreader.convert(source, tmp_path / "whole", **arguments)
        finish, written = Journal.finish_shard, []

        def until_the_third(self: Journal, name: str, record: Any) -> None:
            if len(written) == 3:
                raise KeyboardInterrupt
            finish(self, name, record)
            written.append(name)

        monkeypatch.setattr(Journal, "finish_shard", until_the_third)
        with pytest.raises(KeyboardInterrupt):
            mreader.convert(source, tmp_path / "out", **arguments)
        monkeypatch.setattr(Journal, "finish_shard", finish)
        before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written}
        mreader.convert(source, tmp_path / "out", **arguments)
        assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in written} == before
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        mreader.restore(tmp_path / "out", tmp_path / "back")
        expected = all_tensors(tmp_path / "full")
        assert all(torch.equal(found, expected[name]) for name, found in all_tensors(tmp_path / "back").items())
        weight_map = read_json(tmp_path / "back" / INDEX)["weight_map"]
        assert weight_map.keys() == expected.keys()
        assert {path.name for path in (tmp_path / "back").glob("*.safetensors")} == set(weight_map.values())


# ---------------------------------------------------------------- what is refused


def change_tensors(folder: Path, change: Callable[[Stored], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


GATE = "model.layers.1.mlp.experts.4.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{GATE}_scale_inv"), [f"{GATE}_scale_inv is missing", GATE, "download"]),
        (
            lambda t: t.update({f"{GATE}_scale": t.pop(f"{GATE}_scale_inv")}),
            [f"{GATE}_scale_inv is missing", f"{GATE}_scale is there instead", "not supported yet"],
        ),
        (lambda t: t.pop(GATE), [f"{GATE}_scale_inv belongs to a quantized weight (fp8) that is not there"]),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 2)}), [GATE, "its scales are [1, 2], not [2, 2]"]),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.full((2, 2), float("nan"))}), [GATE, "NaN"]),
        (lambda t: t.update({GATE: t[GATE][:40]}), [GATE, "scales"]),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(2, 2).int()}), [f"{GATE}_scale_inv is stored as I32"]),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(2, 2).bool()}), [f"{GATE}_scale_inv is stored as BOOL"]),
    ],
)
def test_weights_and_scales_that_do_not_fit(
    change: Callable[[Stored], Any], words: list[str], olmoe: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(olmoe, tmp_path / "source"))
    change_tensors(source, change)
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert [word for word in words if word not in ran.err] == [], ran.err
    assert ran.code == SOURCE
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        ({**FP8, "weight_block_size": None}, ["None", "weight_block_size"], SOURCE),
        ({**FP8, "weight_block_size": [64]}, ["[64]", "weight_block_size"], SOURCE),
        ({**GPTQ, "bits": 3}, ["gptq, 3 bits", "not supported yet"], UNSUPPORTED),
        ({**GPTQ, "checkpoint_format": "marlin"}, ["gptq, marlin", "not supported yet"], UNSUPPORTED),
        ({**AWQ, "version": "gemv"}, ["awq, gemv", "not supported yet"], UNSUPPORTED),
        ({**scheme(), "format": "nvfp4-pack-quantized"}, ["nvfp4-pack-quantized", "not supported yet"], UNSUPPORTED),
        ({**GPTQ, "format": "marlin"}, ["gptq, marlin", "not supported yet"], UNSUPPORTED),
        ({**GPTQ, "bits": 4.0}, ["gptq, 4.0 bits", "not supported yet"], UNSUPPORTED),
        ({**AWQ, "version": None, "format": "gemv"}, ["awq, gemv", "not supported yet"], UNSUPPORTED),
        ({"quant_method": "compressed-tensors"}, ["config_groups"], SOURCE),
        ({**scheme(), "config_groups": {}}, ["{} for config_groups"], SOURCE),
        ({**scheme(), "transform_config": {"config_groups": {"R4": {}}}}, ["transform_config"], UNSUPPORTED),
        ({**scheme(), "format": "float-quantized", "config_groups": {"g": {}}}, [".weight_scale is missing"], SOURCE),
        ({**scheme(**FLOAT8), "format": "float-quantized"}, [".weight_scale is missing"], SOURCE),
        ({"quant_method": "mxfp4"}, ["belongs to a quantized weight (mxfp4) that is not there"], SOURCE),
        ({"quant_method": "bitsandbytes"}, ["quantized (bitsandbytes)", "not supported yet"], UNSUPPORTED),
        ({"quant_method": "mreader"}, ["augmented already"], UNSUPPORTED),
    ],
)  # fmt: skip
def test_variants_that_are_not_known(
    settings: dict[str, Any], words: list[str], code: int, olmoe: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(olmoe, tmp_path / "source"))
    edit_json(source / "config.json", lambda config: config.update(quantization_config=settings))
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"weights": None}, ["no scheme for the weights of model.layers.0.mlp.down_proj"]),
        ({"targets": 5}, ["'targets': 5", "config_groups"]),
        ({"targets": ["re:("]}, ["'re:('", "no pattern"]),
        ({"weights": {**FLOAT8, "type": "int"}}, ["stored as F8_E4M3, and config.json says 'int' for type"]),
        ({"weights": {**FLOAT8, "symmetric": False}}, ["not symmetric, and there are no zeros"]),
        ({"weights": {**FLOAT8, "strategy": "tensor"}}, ["down_proj.weight", "its scales are [192, 1], not one"]),
        ({"weights": {**FLOAT8, "strategy": "group", "group_size": 16}}, ["its scales are [192, 1], not [192, 6]"]),
        ({"weights": {**FLOAT8, "strategy": "block", "block_structure": [64, 64]}}, ["[192, 1], not [3, 2]"]),
        ({"weights": {**FLOAT8, "strategy": "spiral"}}, ["'spiral' for strategy"]),
        ({"weights": {**FLOAT8, "num_bits": "many"}}, ["a scheme that compressed-tensors refuses"]),
    ],
)
def test_schemes_of_compressed_tensors_that_do_not_fit(
    group: dict[str, Any], words: list[str], schemed: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(schemed, tmp_path / "source"))
    edit_json(source / "config.json", lambda c: c["quantization_config"]["config_groups"]["group_0"].update(group))
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == SOURCE
    assert not (tmp_path / "out").exists()


EXPERTS_OF_1 = "model.layers.1.mlp.experts"
MIXTRAL_EXPERT = "model.layers.0.block_sparse_moe.experts.0"
MXFP4, PACKED, PACKED_WITH_ZEROS, FLOATS = (
    *("gpt_oss, MXFP4", "deepseek_v3, compressed-tensors", "mixtral, compressed-tensors with zeros"),
    "qwen3_moe, compressed-tensors in FP8",
)


@pytest.mark.parametrize(
    ("case", "stem", "end", "change", "words"),
    [
        (MXFP4, f"{EXPERTS_OF_1}.down_proj", "_scales", Tensor.float, "is stored as F32, not as U8"),
        (PACKED, f"{EXPERTS_OF_1}.0.up_proj", ".weight_scale", Tensor.int, "is stored as I32, not as F16 or"),
        (PACKED, f"{EXPERTS_OF_1}.0.up_proj", ".weight_shape", None, "is missing"),
        (PACKED, f"{EXPERTS_OF_1}.0.up_proj", ".weight_shape", Tensor.neg, "says [-80, -192], and the codes"),
        (PACKED, f"{EXPERTS_OF_1}.0.up_proj", ".weight_shape", lambda t: t[:1], "says [80], and the codes"),
        (PACKED_WITH_ZEROS, f"{MIXTRAL_EXPERT}.w1", ".weight_zero_point", None, "there are no zeros"),
        (PACKED_WITH_ZEROS, f"{MIXTRAL_EXPERT}.w1", ".weight_zero_point", Tensor.float, "is stored as F32"),
        (PACKED_WITH_ZEROS, f"{MIXTRAL_EXPERT}.w1", ".weight_zero_point", lambda t: t[1:], "its zeros are [9, 12]"),
        (FLOATS, f"{EXPERTS_OF_1}.4.gate_proj", ".weight_scale", lambda t: t[:, 0], "its scales are [80], not [80, 1]"),
        ("qwen3_moe, GPTQ", f"{EXPERTS_OF_1}.4.gate_proj", ".scales", Tensor.int, "is stored as I32"),
        ("qwen3_moe, GPTQ", f"{EXPERTS_OF_1}.4.gate_proj", ".qzeros", Tensor.float, "is stored as F32, not as I32"),
        ("qwen3_moe, GPTQ", f"{EXPERTS_OF_1}.4.gate_proj", ".g_idx", Tensor.float, "is stored as F32, not as I32 or"),
        (
            "qwen3_moe, GPTQ",
            f"{EXPERTS_OF_1}.4.gate_proj",
            ".g_idx",
            lambda t: t + 5,
            "groups 5 to 16, and there are 0",
        ),
        ("qwen3_moe, GPTQ", f"{EXPERTS_OF_1}.4.gate_proj", ".g_idx", lambda t: t - 1, "groups -1 to 10, and there are"),
        ("qwen3_moe, AWQ", f"{EXPERTS_OF_1}.4.gate_proj", ".qzeros", Tensor.float, "is stored as F32, not as I32"),
    ],
)
def test_parts_of_a_weight_that_do_not_fit(
    case: str, stem: str, end: str, change: Callable[[Tensor], Tensor] | None, words: str, tmp_path: Path
) -> None:
    source, _ = make(CASES[case], tmp_path)
    part = stem + end
    change_tensors(source, lambda t: t.update({part: change(t[part]).contiguous()}) if change else t.pop(part))
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16", "--device", "cpu")
    assert stem in ran.cause
    assert words in ran.cause
    assert ran.code == SOURCE
    assert not (tmp_path / "out").exists()


def test_each_module_has_the_scheme_that_names_it(schemed: Path, tmp_path: Path) -> None:
    """As of Kimi: the experts in one scheme, all else in another; here the other one would not fit."""
    source = Path(shutil.copytree(schemed, tmp_path / "source"))
    named = {"targets": ["re:.*layers.0.*", "re:.*self_attn.*", "model.layers.1.mlp.experts.0.down_proj"]}
    other = {"weights": {**FLOAT8, "strategy": "tensor"}, "targets": ["Linear"]}

    def regroup(config: dict[str, Any]) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_0"].update(named)
        config["quantization_config"]["config_groups"] = {"other": other, **groups}

    edit_json(source / "config.json", regroup)
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert "model.layers.1.mlp.experts.0.gate_proj.weight cannot be dequantized: its scales are [80, 1]" in ran.cause


@pytest.fixture(scope="module")
def schemed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small source of compressed-tensors in FP8."""
    return make(CASES["qwen3_moe, compressed-tensors in FP8"], tmp_path_factory.mktemp("schemed"))[0]


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    source, _ = make(CASES["qwen3_moe, AWQ"], tmp_path)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    change_tensors(source, lambda tensors: tensors.update({name: torch.ones(80, HIDDEN).bfloat16()}))
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert f"{name} is there both quantized and not" in ran.cause
    assert ran.code == SOURCE


@pytest.mark.parametrize(
    ("dtype", "asked", "words"),
    [
        (torch.float32, "bfloat16", ["the weights are F32, and not quantized"]),
        (torch.bfloat16, "float16", ["dtype is float16"]),
    ],
)
def test_other_dtypes_are_refused(dtype: torch.dtype, asked: str, words: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "olmoe", dtype=dtype)
    ran = command("convert", tmp_path / "source", tmp_path / "out", "--dtype", asked)
    assert [word for word in words if word not in ran.cause] == [], ran.err
    assert ran.code == USAGE
    assert not (tmp_path / "out").exists()


def test_the_command_says_nothing_that_it_was_not_asked_for(olmoe: Path, tmp_path: Path) -> None:
    """What dequantizes FP8 imports triton, whose bindings report what is left of them when the process ends."""
    argv = ["mreader", "convert", str(olmoe), str(tmp_path / "out"), "--dtype", "bfloat16", "--device", "cpu", "-q"]
    program = f"import sys; sys.argv = {argv}; from mreader.cli.main import main; main()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


def test_weights_in_bf16_are_what_is_asked_for(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "olmoe")
    assert command("convert", tmp_path / "source", tmp_path / "out", "--dtype", "bfloat16").code == 0


def test_columns_in_the_order_of_activations_of_compressed_tensors(tmp_path: Path) -> None:
    """Its own decompression does not look at the order."""
    source, _ = make(CASES["qwen3_moe, compressed-tensors in FP8"], tmp_path)
    change_tensors(source, lambda tensors: tensors.update({f"{GATE}_g_idx": torch.zeros(HIDDEN).int()}))
    ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16")
    assert "compressed-tensors, weight_g_idx" in ran.cause
    assert ran.code == UNSUPPORTED


def test_a_config_that_announces_what_is_not_there(tmp_path: Path) -> None:
    save_tiny(tmp_path / "source", "olmoe")
    edit_json(tmp_path / "source" / "config.json", lambda config: config.update(quantization_config=FP8))
    ran = command("convert", tmp_path / "source", tmp_path / "out", "--dtype", "bfloat16")
    assert "config.json announces quantized weights (fp8), and there are none" in ran.cause
    assert ran.code == SOURCE


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = make(CASES["deepseek_v3, compressed-tensors"], tmp_path)
    monkeypatch.setattr("mreader.formats.quantized.find_spec", lambda name: None)
    for dry_run in ([], ["--dry-run"]):
        ran = command("convert", source, tmp_path / "out", "--dtype", "bfloat16", *dry_run)
        assert "compressed-tensors, which is not installed" in ran.cause
        assert "mreader[compressed-tensors]" in ran.err
        assert ran.code == UNSUPPORTED
        assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert command("convert", source, tmp_path / "out", "--dtype", "bfloat16", "-q").code == 0
    monkeypatch.setattr("mreader.formats.quantized.find_spec", lambda name: None)
    assert command("verify", tmp_path / "out", "-q").code == 0
    assert command("verify", tmp_path / "out", "--source", source, "-q").code == UNSUPPORTED


def test_another_source_is_found_out_by_verify(olmoe: Path, tmp_path: Path) -> None:
    mreader.convert(olmoe, tmp_path / "out", device="cpu", dtype="bfloat16")
    other = Path(shutil.copytree(olmoe, tmp_path / "other"))
    change_tensors(other, lambda tensors: tensors[f"{GATE}_scale_inv"].mul_(2))
    ran = command("verify", tmp_path / "out", "--source", other)
    assert GATE in ran.cause
    assert ran.code == VERIFY


def test_a_damaged_checkpoint_is_not_restored(olmoe: Path, tmp_path: Path) -> None:
    """There is no sha256 of the dequantized source to hold the result against."""
    mreader.convert(olmoe, tmp_path / "out", device="cpu", dtype="bfloat16")
    with (tmp_path / "out" / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    ran = command("restore", tmp_path / "out", tmp_path / "back")
    assert "model.safetensors has another sha256" in ran.cause
    assert ran.code == VERIFY
    assert not (tmp_path / "back").exists()


def test_only_the_expert_that_is_asked_for_is_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer of gpt-oss-120b would be 6 GB."""
    source, _ = make(CASES["gpt_oss, MXFP4"], tmp_path)
    from mreader import dequantize as module

    shapes: list[torch.Size] = []
    dequantize = module.dequantize

    def note(packed: Any, parts: dict[str, Tensor]) -> Tensor:
        shapes.append(parts["codes"].shape)
        return dequantize(packed, parts)

    monkeypatch.setattr(module, "dequantize", note)
    mreader.convert(source, tmp_path / "out", device="cpu", dtype="bfloat16")
    assert {shape[0] for shape in shapes} == {1}
    assert len(shapes) <= 3 * 4 * EXPERTS  # of three layers: to be moved, and to compute sketch and recovery map
