"""The plan of real, full-size models, from headers alone: the files are as long as the real ones, and hold nothing."""

# E experts, H hidden size, I channels of an expert, r rank

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from mreader.convert import plan_conversion
from mreader.formats.augmented import DEFAULT_OPTIONS

SHARD = 5_000_000_000
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}

Shapes = dict[str, list[int]]
Entry = tuple[str, list[int]]
"""dtype and shape of a tensor on disk"""


def in_bf16(name: str, shape: list[int]) -> dict[str, Entry]:
    return {name: ("BF16", shape)}


def in_mxfp4(name: str, shape: list[int]) -> dict[str, Entry]:
    """The experts of gpt-oss: a byte for two rows of a column, a scale for 32."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return in_bf16(name, shape)
    experts, rows, columns = shape
    blocks = [experts, columns, rows // 32]
    return {f"{name}_blocks": ("U8", [*blocks, 16]), f"{name}_scales": ("U8", blocks)}


def in_fp8(name: str, shape: list[int]) -> dict[str, Entry]:
    """The projections of DeepSeek-V3: a scale for each block of 128 x 128."""
    if not re.search(r"_proj(_with_mqa)?\.weight$", name):
        return in_bf16(name, shape)
    blocks = [math.ceil(size / 128) for size in shape]
    return {name: ("F8_E4M3", shape), f"{name}_scale_inv": ("F32", blocks)}


@dataclass(frozen=True)
class Model:
    """A published model.

    layers:     with routed experts
    shape:      E, I, H, and K
    parameters: as published, None where it is not known to the last one
    stored:     name and shape of a tensor -> what it is on disk
    quantized:  quantization_config
    """

    model_type: str
    config: dict[str, Any]
    layers: int
    shape: tuple[int, int, int, int]
    parameters: int | None = None
    stored: Callable[[str, list[int]], dict[str, Entry]] = in_bf16
    quantized: dict[str, Any] | None = None


_DEEPSEEK_V3: dict[str, Any] = {
    **{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1},
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
    **{"first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64},
    **{"v_head_dim": 128, "qk_nope_head_dim": 128, "num_nextn_predict_layers": 1},
}
_GPT_OSS: dict[str, Any] = {
    **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
}
_MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
_QWEN3_5_TEXT = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
_GEMMA4_TEXT: dict[str, Any] = {
    **{"vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512},
    **{"num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024},
    **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}
MODELS = {
    "Qwen3-30B-A3B": Model(
        "qwen3_moe",
        {
            **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
            **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
            **{"num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False},
        },
        48,
        (128, 768, 2048, 8),
        30_532_122_624,
    ),
    "Qwen3.5-35B-A3B": Model("qwen3_5_moe", {"text_config": _QWEN3_5_TEXT}, 40, (256, 512, 2048, 8)),
    "Gemma-4-26B-A4B": Model("gemma4", {"text_config": _GEMMA4_TEXT, "audio_config": None}, 30, (128, 704, 2816, 8)),
    "Mixtral-8x7B": Model(
        "mixtral",
        {
            **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
        },
        32,
        (8, 14336, 4096, 2),
        46_702_792_704,
    ),
    "DeepSeek-V3, in BF16": Model(
        "deepseek_v3",
        _DEEPSEEK_V3,
        58,
        (256, 2048, 7168, 8),
        671_026_419_200,
    ),
    "DeepSeek-V3, as published": Model(
        *("deepseek_v3", _DEEPSEEK_V3, 58, (256, 2048, 7168, 8), 671_026_419_200, in_fp8),
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "gpt-oss-20b": Model(
        *("gpt_oss", {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}, 24, (32, 2880, 2880, 4)),
        *(20_914_757_184, in_mxfp4, _MXFP4),
    ),
    "gpt-oss-120b": Model(
        *("gpt_oss", {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}, 36, (128, 2880, 2880, 4)),
        *(116_829_156_672, in_mxfp4, _MXFP4),
    ),
    "GLM-4.5-Air": Model(
        "glm4_moe",
        {
            **{"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408},
            **{"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128},
            **{"n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"attention_bias": True, "use_qk_norm": False, "num_nextn_predict_layers": 1},
        },
        45,
        (128, 1408, 4096, 8),
    ),
}


def shapes_on_disk(model: Model) -> tuple[dict[str, Any], Shapes]:
    """config.json, and name -> shape of every tensor that transformers would save, in the order of the layers."""
    config = AutoConfig.for_model(model.model_type, **model.config)
    auto = AutoModelForImageTextToText if "text_config" in model.config else AutoModelForCausalLM
    with torch.device("meta"):
        empty = auto.from_config(config, dtype=torch.bfloat16)
    tied = set(getattr(empty, "all_tied_weights_keys", {}) or {})
    state = {name: tensor for name, tensor in empty.state_dict().items() if name not in tied}
    named = revert_weight_conversion(empty, state)
    return config.to_dict(), {name: list(tensor.shape) for name, tensor in named.items()}


def predicting(shapes: Shapes, layers: int) -> Shapes:
    """One more layer like the last."""
    last, more = f".layers.{layers - 1}.", f".layers.{layers}."
    return {name.replace(last, more): shape for name, shape in shapes.items() if last in name}


def write_without_data(folder: Path, config: dict[str, Any], entries: dict[str, Entry]) -> int:
    """The checkpoint with all of its headers, and files as long as they should be. Returns the bytes of the data."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, dict[str, Any]]] = [{}]
    end = 0
    for name, (dtype, shape) in entries.items():
        nbytes = BYTES[dtype] * torch.Size(shape).numel()
        if end + nbytes > SHARD and shards[-1]:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    total = 0
    where = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header = json.dumps(tensors).encode()
        data = max(entry["data_offsets"][1] for entry in tensors.values())
        (folder / file).write_bytes(len(header).to_bytes(8, "little") + header)
        with (folder / file).open("r+b") as opened:
            opened.truncate(8 + len(header) + data)
        where |= dict.fromkeys(tensors, file)
        total += data
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def stored(model: Model, shapes: Shapes) -> dict[str, Entry]:
    return {part: entry for name, shape in shapes.items() for part, entry in model.stored(name, shape).items()}


def added(shape: tuple[int, int, int, int], rank: int) -> int:
    """Bytes of sketch, norms and recovery map of one layer (SPEC.md, Tensors)."""
    E, I, H, _ = shape
    blocks = math.ceil(H / 128)
    row = 32 * math.ceil(math.ceil(I / 5) / 32)
    codes = E * 2 * blocks * 128 * row
    scales_and_errors = E * 2 * blocks * I * (2 + 2)
    return codes + scales_and_errors + H + 2 * E * I + 2 * H * rank + 2 * E * I * rank


@pytest.mark.parametrize("name", MODELS)
def test_plan(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    config, shapes = shapes_on_disk(model)
    if model.parameters is not None:
        assert sum(torch.Size(shape).numel() for shape in shapes.values()) == model.parameters
    more = predicting(shapes, config["num_hidden_layers"]) if config.get("num_nextn_predict_layers") else {}
    assert bool(more) == name.startswith(("DeepSeek-V3", "GLM-4.5-Air"))
    dtype = None
    if model.quantized is not None:
        config, dtype = {**config, "quantization_config": model.quantized}, "bfloat16"
    on_disk = write_without_data(tmp_path / "source", config, stored(model, {**shapes, **more}))
    nbytes = 2 * sum(torch.Size(shape).numel() for shape in (*shapes.values(), *more.values()))

    plan = plan_conversion(tmp_path / "source", out=tmp_path / "out", dtype=dtype)
    assert sum(spec.nbytes for spec in plan.source.on_disk.tensors.values()) == on_disk
    assert (on_disk < nbytes) == (plan.source.quantized is not None) == (model.quantized is not None)
    E, I, H, K = model.shape
    layers = plan.architecture.layers
    assert {(layer.experts, layer.channels, layer.hidden) for layer in layers} == {(E, I, H)}
    assert (len(layers), plan.architecture.routed) == (model.layers, K)
    assert sum(spec.nbytes for spec in plan.source.tensors.values()) == nbytes
    written = [spec.nbytes for shard in plan.shards for spec in shard.tensors.values()]
    assert sum(written) == nbytes + model.layers * added(model.shape, DEFAULT_OPTIONS.rank)
    assert {tensor for shard in plan.shards for tensor in shard.tensors} >= set(more)
    assert {spec.dtype for name, spec in plan.source.tensors.items()} == {"BF16"}
    # One layer three times over at most and one copied tensor, whatever the number of layers
    assert plan.memory < 1_000_000_000 + 3 * (2 * 3 * E * I * H) + max(written)


TWO_LAYERS = {
    "Qwen3-30B-A3B": "model.layers.{}.mlp.experts",
    "Gemma-4-26B-A4B": "model.language_model.layers.{}.experts",
    "gpt-oss-20b": "model.layers.{}.mlp.experts",
}


def fill(file: Path) -> None:
    """Noise for weights, also as codes; scales of MXFP4 are 1 / 64."""
    noise = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    values = memoryview(noise.view(torch.uint8).numpy())
    with file.open("r+b") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        for name, entry in header.items():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            while left:
                left -= opened.write((bytes([121]) * (1 << 20) if name.endswith("_scales") else values)[:left])


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_LAYERS)
def test_two_layers_of_full_width_within_the_planned_memory(name: str, tmp_path: Path) -> None:
    """Experts and nothing else: of real size, filled with noise. A process of its own, whose peak is what it took."""
    model = MODELS[name]
    config, shapes = shapes_on_disk(model)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = 2
    prefixes = tuple(TWO_LAYERS[name].format(layer) + "." for layer in range(2))
    experts = {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}
    if model.quantized is not None:
        config = {**config, "quantization_config": model.quantized}
    write_without_data(tmp_path / "source", config, stored(model, experts))
    for file in (tmp_path / "source").glob("*.safetensors"):
        fill(file)
    dtype = None if model.quantized is None else "bfloat16"
    planned = plan_conversion(tmp_path / "source", dtype=dtype).memory
    code = (
        f"import resource, sys, mreader; mreader.convert(sys.argv[1], sys.argv[2], device='cpu', dtype={dtype!r}); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "source"), str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    for folder in ("source", "out"):  # 3 GB each, which pytest would keep
        shutil.rmtree(tmp_path / folder)
    E, I, H, _ = model.shape
    assert int(done.stdout) < min(planned, 2.5 * (2 * 3 * E * I * H) + 1e9)
