"""Small random checkpoints of every supported architecture, made and saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

# Odd on purpose: H is no multiple of 128, I none of 5 or 32, E no power of two.
HIDDEN, CHANNELS, EXPERTS, ROUTED, LAYERS, VOCABULARY = 192, 80, 6, 3, 3, 96

_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_QWEN = {
    **_TEXT,
    "moe_intermediate_size": CHANNELS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ROUTED,
    "head_dim": 48,
}
_QWEN2 = {**_QWEN, "intermediate_size": 96, "shared_expert_intermediate_size": 64}
_QWEN3_5 = {
    **_QWEN,
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_GEMMA4 = {
    **_TEXT,
    "enable_moe_block": True,
    "intermediate_size": 96,
    "moe_intermediate_size": CHANNELS,
    "num_experts": EXPERTS,
    "top_k_experts": ROUTED,
    "head_dim": 48,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 32,
    "tie_word_embeddings": True,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

# name of the case -> (model_type, config)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": (
        "olmoe",
        {**_TEXT, "intermediate_size": CHANNELS, "num_experts": EXPERTS, "num_experts_per_tok": ROUTED},
    ),
    "qwen2_moe": ("qwen2_moe", {**_QWEN2, "mlp_only_layers": [1]}),
    "qwen2_moe, every second layer": ("qwen2_moe", {**_QWEN2, "num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [0]}),
    "mixtral": (
        "mixtral",
        {**_TEXT, "intermediate_size": CHANNELS, "num_local_experts": EXPERTS, "num_experts_per_tok": ROUTED},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _QWEN3_5),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": _QWEN3_5,
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "depth": 1,
                "out_hidden_size": HIDDEN,
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_text": ("gemma4_text", _GEMMA4),
    "gemma4": (
        "gemma4",
        {
            "text_config": _GEMMA4,
            "vision_config": {**_VISION, "num_hidden_layers": 1},
            "audio_config": None,
        },
    ),
}


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> PreTrainedModel:
    """A random model of one architecture; `overrides` change its (text) config."""
    model_type, values = ARCHITECTURES[name]
    if "text_config" in values:
        values = {**values, "text_config": {**values["text_config"], **overrides}}
    else:
        values = {**values, **overrides}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **values)
    auto = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def save_tiny(folder: Path, name: str, *, max_shard_size: str = "5GB", **overrides: Any) -> PreTrainedModel:
    """The model of `tiny_model`, saved into `folder` by `save_pretrained`."""
    model = tiny_model(name, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
