"""Small random checkpoints of every supported architecture, made and saved by transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
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

# Those that the tests of every part go through: name of the case -> (model_type, config).
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

_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_INTERMEDIATE = {
    **{key: value for key, value in _TEXT.items() if key != "num_hidden_layers"},
    **{"intermediate_size": CHANNELS, "num_experts_per_tok": ROUTED, "num_hidden_layers": 2},
}
_SHARED = {**_TEXT, "intermediate_size": 96, "moe_intermediate_size": CHANNELS, "num_experts_per_tok": ROUTED}
_GROUPED = {
    **{**_SHARED, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "num_hidden_layers": 2, "head_dim": 48},
}
_MLA = {**_GROUPED, **_LATENT, "head_dim": 16, "num_key_value_heads": 4}
_GRANITE = {**_INTERMEDIATE, "num_local_experts": EXPERTS}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 48, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}

# Every other type of the table, one case each.
MORE_TYPES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **{**_SHARED, "num_experts": EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 48},
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 32},
    },
    "axk1": {**_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "cohere2_moe": {
        **{**_INTERMEDIATE, "num_experts": EXPERTS, "num_shared_experts": 1, "head_dim": 48, "sliding_window": 32},
        **{"mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 96, "logit_scale": 1.0},
    },
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64},
    "dots1": {**_GROUPED, "n_shared_experts": 2},
    "ernie4_5_moe": {
        **{**_SHARED, "moe_k": ROUTED, "moe_num_experts": EXPERTS, "moe_num_shared_experts": 1},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "num_hidden_layers": 2},
    },
    "exaone_moe": {
        **{**_SHARED, "num_experts": EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 48},
        **{"n_group": 1, "topk_group": 1, "num_hidden_layers": 2, "sliding_window": 32},
        **{"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    },
    "flex_olmo": {**_INTERMEDIATE, "num_experts": EXPERTS},
    "flint": {**_QWEN2, "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "glm4_moe": {**_GROUPED, "use_qk_norm": True},
    "glm4_moe_lite": {**_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "glm_moe_dsa": {**_MLA, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 64},
    "granitemoe": _GRANITE,
    "granitemoe_swa": {**_GRANITE, "shared_intermediate_size": 64},
    "granitemoehybrid": {
        **{**_GRANITE, **_MAMBA, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    },
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 64},
    "hunyuan_v1_moe": {**_INTERMEDIATE, "num_experts": EXPERTS, "moe_topk": ROUTED, "head_dim": 48},
    "hy_v3": {
        **{**_SHARED, "num_experts": EXPERTS, "num_shared_experts": 1, "head_dim": 48, "num_hidden_layers": 2},
        **{"mlp_layer_types": ["dense", "sparse"]},
    },
    "jamba": {
        **{**_INTERMEDIATE, "num_experts": EXPERTS, "expert_layer_period": 2, "expert_layer_offset": 1},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 12},
        **{"use_mamba_kernels": False},
    },
    "kimi_linear": {
        **{**_MLA, "num_experts": EXPERTS, "layer_types": ["linear_attention", "full_attention"]},
        **{"num_local_experts": EXPERTS, "mlp_layer_types": ["dense", "sparse"]},
    },
    "kolibri1": {**_QWEN, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2},
    "laguna": {**_QWEN2, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "lara_mini": {**_QWEN, "shared_expert_intermediate_size": 64, "num_hidden_layers": 2},
    "lfm2_moe": {
        **{**_SHARED, "num_experts": EXPERTS, "num_dense_layers": 1, "num_hidden_layers": 2},
        **{"layer_types": ["conv", "full_attention"]},
    },
    "mellum": {**_QWEN, "intermediate_size": 96, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "mimo_v2_flash": {
        **{**_GROUPED, "mlp_layer_types": ["dense", "sparse"], "v_head_dim": 32, "n_group": 1},
        **{"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32},
    },
    "minimax": {**_GRANITE, "head_dim": 48, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "minimax_m2": {**_GRANITE, "head_dim": 48},
    "phimoe": _GRANITE,
    "qwen3_next": {**_QWEN3_5, "intermediate_size": 96, "mlp_only_layers": [0]},
    "solar_open": {**_GROUPED, "n_group": 1, "first_k_dense_replace": 0},
    "zaya": {**_QWEN, "num_experts_per_tok": 1},
}

MODEL_TYPES = {**ARCHITECTURES, **{name: (name, values) for name, values in MORE_TYPES.items()}}


def is_in_transformers(name: str) -> bool:
    """Whether the installed transformers has the case's model type."""
    return MODEL_TYPES[name][0] in CONFIG_MAPPING


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> PreTrainedModel:
    """A random model of one architecture; `overrides` change its (text) config."""
    model_type, values = MODEL_TYPES[name]
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
