"""Quantizers for tests, one a method, and small checkpoints quantized by them in the form that each has on disk.

What a method makes of a weight is computed here, in its simplest form.
"""

# R rows of a weight, C its columns

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import save_tiny
from safetensors.torch import load_file, save_file
from sources import INDEX, edit_json
from torch import Tensor

Stored = dict[str, Tensor]
Quantizer = Callable[[str, Tensor], tuple[Stored, Tensor]]
GROUP = 16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def is_quantized(name: str) -> bool:
    """Every linear layer but the router and the head, as is usual."""
    return "_proj.weight" in name


# ---------------------------------------------------------------- quantizers: name, weight -> on disk, in full


def mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Of gpt-oss's experts (E, C, R): 32 values of a column r share an exponent."""
    columns = weight.float().mT.unflatten(-1, (-1, 32))  # (E, R, C / 32, 32)
    exponents = torch.floor(torch.log2(columns.abs().amax(-1) / 6)).clamp(-127, 127)
    scaled = columns / torch.exp2(exponents).unsqueeze(-1)
    levels = torch.tensor(E2M1 + [-level for level in E2M1])
    codes = (scaled.unsqueeze(-1) - levels).abs().argmin(-1)
    full = (levels[codes] * torch.exp2(exponents).unsqueeze(-1)).flatten(-2).mT.bfloat16()
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": (exponents + 127).to(torch.uint8)}, full


def fp8(name: str, weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Stored, Tensor]:
    """A scale for each block of 64 x 128, the last ones cut off."""
    codes, full = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-len(weight) // 64), -(-weight.shape[1] // 128), dtype=dtype)
    for i, rows in enumerate(weight.float().split(64)):
        for j, block in enumerate(rows.split(128, 1)):
            scales[i, j] = block.abs().max() / 448
            scale = scales[i, j].float()
            some = slice(64 * i, 64 * i + len(block)), slice(128 * j, 128 * j + block.shape[1])
            codes[some] = (block / scale).to(codes.dtype)
            full[some] = codes[some].float() * scale
    return {name: codes, f"{name}_scale_inv": scales}, full.bfloat16()


def fp8_of_a_tensor(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale, and one that was for activations."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    stem = name.removesuffix(".weight")
    stored = {name: codes, f"{name}_scale_inv": scale, f"{stem}.activation_scale": torch.ones(())}
    return stored, (codes.float() * scale).bfloat16()


def fp8_of_a_fused_tensor(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """One scale for all experts, with an axis for each of the weight's."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale.reshape(1, 1, 1)}, (codes.float() * scale).bfloat16()


def groups_of(weight: Tensor, lowest: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes (R, C) from 0 to steps, zeros and scales (R, groups); zeros in the middle unless lowest is 0."""
    parts = weight.float().unflatten(-1, (-1, GROUP))
    if lowest == 0:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = ((high - low) / steps).half().float()
        zeros = (-low / scales).round().clamp(1, steps)
    else:
        scales = (parts.abs().amax(-1) / -lowest).bfloat16().float()
        zeros = torch.full_like(scales, -lowest)
    codes = (parts / scales.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, steps).flatten(-2)
    return codes.int(), zeros.int(), scales


def in_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(M, N) codes of 4 bits -> (M, N / 8) int32, code order[i] of eight in bits 4 i and up."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= codes[:, place::8].long() << (4 * i)
    return words.to(torch.int32)


def compressed(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, _, scales = groups_of(weight, -8, 15)
    full = (codes - 8).bfloat16() * scales.bfloat16().repeat_interleave(GROUP, 1)
    shape = torch.tensor(weight.shape)
    stored = {f"{name}_packed": in_words(codes), f"{name}_scale": scales.bfloat16(), f"{name}_shape": shape}
    return stored, full


def compressed_with_zeros(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, zeros, scales = groups_of(weight, 0, 15)
    scale = scales.bfloat16()
    full = (codes - zeros.repeat_interleave(GROUP, 1)).bfloat16() * scale.repeat_interleave(GROUP, 1)
    stored = {f"{name}_packed": in_words(codes), f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}
    return {**stored, f"{name}_zero_point": in_words(zeros.T).T.contiguous()}, full


def compressed_fp8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """A scale a row; activations in FP8 as well, with a scale of their own."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight.float() / scales.float()).to(torch.float8_e4m3fn)
    stem = name.removesuffix(".weight")
    return {name: codes, f"{name}_scale": scales, f"{stem}.input_scale": torch.ones(1)}, codes.bfloat16() * scales


def compressed_int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """A scale and a zero a row, nothing packed."""
    wide = weight.float()
    low, high = wide.amin(1, keepdim=True), wide.amax(1, keepdim=True)
    scales = ((high - low) / 255).bfloat16()
    zeros = (-128 - low / scales.float()).round().clamp(-128, 127)
    codes = (wide / scales.float() + zeros).round().clamp(-128, 127)
    stored = {name: codes.char(), f"{name}_scale": scales, f"{name}_zero_point": zeros.char()}
    return stored, (codes - zeros).bfloat16() * scales


def gptq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, zeros, scales = groups_of(weight, 0, 15)
    groups = torch.arange(weight.shape[1]) // GROUP
    stem = name.removesuffix(".weight")
    stored = {
        "qweight": in_words(codes).T,
        "qzeros": in_words(zeros.T - 1),
        "scales": scales.T.half(),
        "g_idx": groups.int(),
    }
    return {f"{stem}.{part}": t.contiguous() for part, t in stored.items()}, in_full(codes, zeros, scales, groups)


def gptq_in_the_order_of_activations(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """`desc_act`: the columns of a group lie anywhere. Version 2: zeros as they are."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    codes, zeros, scales = groups_of(weight[:, order], 0, 15)
    groups = torch.empty(weight.shape[1], dtype=torch.int64)
    groups[order] = torch.arange(weight.shape[1]) // GROUP
    codes = codes[:, order.argsort()]
    stem = name.removesuffix(".weight")
    stored = {
        "qweight": in_words(codes).T,
        "qzeros": in_words(zeros.T),
        "scales": scales.T.half(),
        "g_idx": groups.int(),
    }
    return {f"{stem}.{part}": t.contiguous() for part, t in stored.items()}, in_full(codes, zeros, scales, groups)


def awq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    codes, zeros, scales = groups_of(weight, 0, 15)
    order, stem = (0, 2, 4, 6, 1, 3, 5, 7), name.removesuffix(".weight")
    stored = {"qweight": in_words(codes.T, order), "qzeros": in_words(zeros.T, order), "scales": scales.T.half()}
    full = in_full(codes, zeros, scales, torch.arange(weight.shape[1]) // GROUP)
    return {f"{stem}.{part}": t.contiguous() for part, t in stored.items()}, full


def in_full(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return ((codes - zeros[:, groups]).float() * scales[:, groups]).bfloat16()


# ---------------------------------------------------------------- cases


def scheme(**weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@dataclass(frozen=True)
class Case:
    """A model type quantized by a method.

    settings: quantization_config
    chosen:   which tensors are quantized
    changes:  of the tiny model's config
    side:     a file beside the weights that says how they are quantized
    """

    model_type: str
    quantizer: Quantizer
    settings: dict[str, Any]
    chosen: Callable[[str], bool] = is_quantized
    changes: dict[str, Any] = field(default_factory=dict)
    side: str | None = None

    @property
    def method(self) -> str:
        return str(self.settings["quant_method"])


FP8 = {"quant_method": "fp8", "weight_block_size": [64, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
CASES: dict[str, Case] = {
    "gpt_oss, MXFP4": Case(
        *("gpt_oss", mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
        chosen=lambda name: name.endswith(_OF_EXPERTS),
        changes={"intermediate_size": 96},  # MXFP4 goes by 32
    ),
    "deepseek_v3, FP8": Case("deepseek_v3, one layer predicts", fp8, FP8),
    "qwen3_moe, FP8": Case("qwen3_moe", fp8, FP8),
    "mixtral, FP8 with scales in FP16": Case(
        *("mixtral", partial(fp8, dtype=torch.float16), FP8),
        chosen=lambda name: name.endswith(("w1.weight", "w2.weight", "w3.weight")),
    ),
    "gemma4_text, FP8 with a scale a fused tensor": Case(
        *("gemma4_text", fp8_of_a_fused_tensor, {"quant_method": "fp8"}),
        chosen=lambda name: name.endswith(_OF_EXPERTS),
    ),
    "olmoe, FP8 with a scale a tensor": Case("olmoe", fp8_of_a_tensor, {"quant_method": "fp8"}),
    "deepseek_v3, compressed-tensors": Case(
        *("deepseek_v3", compressed, {**scheme(**INT4, symmetric=True), "format": "pack-quantized"}),
        chosen=lambda name: ".experts." in name,
    ),
    "mixtral, compressed-tensors with zeros": Case(
        *("mixtral", compressed_with_zeros, {**scheme(**INT4, symmetric=False), "format": "pack-quantized"}),
        chosen=lambda name: name.endswith(("w1.weight", "w2.weight", "w3.weight")),
    ),
    "qwen3_moe, compressed-tensors in FP8": Case(
        "qwen3_moe", compressed_fp8, {**scheme(**FLOAT8), "format": "float-quantized"}
    ),
    "olmoe, compressed-tensors in INT8 with zeros": Case(
        "olmoe", compressed_int8, {**scheme(**INT8, symmetric=False), "format": "int-quantized"}
    ),
    "qwen3_moe, GPTQ": Case("qwen3_moe", gptq, GPTQ, side="quantize_config.json"),
    "olmoe, GPTQ version 2 by activation order": Case(
        "olmoe", gptq_in_the_order_of_activations, {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}
    ),
    "qwen3_moe, GPTQ version 2, as newer releases name it": Case(
        *("qwen3_moe", gptq_in_the_order_of_activations, {**GPTQ, "desc_act": True, "format": "gptq_v2"})
    ),
    "qwen3_moe, AWQ": Case("qwen3_moe", awq, AWQ, side="quant_config.json"),
}  # fmt: skip


def make(case: Case, folder: Path, shards: int = 1) -> tuple[Path, Path]:
    """(quantized checkpoint, the same in full)."""
    full, source = folder / "full", folder / "source"
    save_tiny(full, case.model_type, **case.changes)
    (full / "tokenizer.json").write_text('{"version": "1.0"}')
    tensors, stored = load_file(full / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if case.chosen(name):
            parts, tensors[name] = case.quantizer(name, tensor)
            stored |= parts
        else:
            stored[name] = tensor
    shutil.copytree(full, source)
    save_file({name: t.contiguous() for name, t in tensors.items()}, full / "model.safetensors", {"format": "pt"})
    edit_json(source / "config.json", lambda config: config.update(quantization_config=case.settings))
    if case.side:
        (source / case.side).write_text(json.dumps(case.settings))
    (source / "model.safetensors").unlink()
    deal_out(source, stored, shards)
    return source, full


def deal_out(folder: Path, tensors: Stored, shards: int) -> None:
    """Into so many files by turns, so that weights and their scales are apart."""
    where = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        some = sorted(tensors)[i::shards]
        save_file({n: tensors[n].contiguous() for n in some}, folder / name, {"format": "pt"})
        where |= dict.fromkeys(some, name)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
