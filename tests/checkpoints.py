"""Small random checkpoints of every supported architecture, made and saved by transformers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedModel,
)
from transformers.models.aria import modeling_aria

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
    "gpt_oss": (
        "gpt_oss",
        {
            **{**_TEXT, "intermediate_size": CHANNELS, "num_local_experts": EXPERTS, "num_experts_per_tok": ROUTED},
            **{"head_dim": 48, "sliding_window": 32},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
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

_QWEN_VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 1, "out_hidden_size": HIDDEN},
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
_INDEXED = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 64}
_CLAMPED = {"swiglu_limit": 0.3, "hc_mult": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 48, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}

# Every other type of the table, one case each.
MORE_TYPES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **{**_SHARED, "num_experts": EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 48},
        **{"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 32},
    },
    "aria": {
        "text_config": {
            **{**_INTERMEDIATE, "moe_num_experts": EXPERTS, "moe_topk": ROUTED, "moe_num_shared_experts": 1},
            "model_type": "aria_text",
        },
        "vision_config": {**_VISION, "model_type": "idefics3_vision", "num_hidden_layers": 1, "image_size": 28},
        "projector_patch_to_query_dict": {"4": 2},
    },
    "axk1": {**_MLA, "mlp_layer_types": ["dense", "sparse"]},
    "axk2": {**_MLA, "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2, "index_head_dim": 32},
    "bailing_hybrid": {
        **{**_MLA, "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
        **{"num_local_experts": EXPERTS, "model_max_length": 128},
    },
    "beam": {
        **{**_SHARED, "num_experts": EXPERTS, "num_hidden_layers": 2, "head_dim": 48},
        **{"mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    },
    "cohere2_moe": {
        **{**_INTERMEDIATE, "num_experts": EXPERTS, "num_shared_experts": 1, "head_dim": 48, "sliding_window": 32},
        **{"mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 96, "logit_scale": 1.0},
    },
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _MLA,
    "deepseek_v32": {**_MLA, **_INDEXED},
    "deepseek_v4": {
        **{**_SHARED, **_CLAMPED, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_hidden_layers": 3},
        **{"intermediate_size": CHANNELS, "num_key_value_heads": 1, "head_dim": 48, "sliding_window": 32},
        **{"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "mlp_layer_types": ["hash_moe", "moe", "moe"]},
        **{"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8},
    },
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
    "glm_moe_dsa": {**_MLA, **_INDEXED},
    "glm5_next": {
        "text_config": {
            **{**_MLA, **_INDEXED, **_CLAMPED, "mlp_layer_types": ["dense", "sparse"], "qk_rope_head_dim": 0},
            **{"linear_head_dim": 32, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        },
        "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": HIDDEN},
    },
    "glm4v_moe": {
        "text_config": {
            **_GROUPED,
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "mrope_section": [4, 4, 4],
            },
        },
        "vision_config": {**_VISION, "depth": 1, "num_heads": 2, "out_hidden_size": HIDDEN},
    },
    "granitemoe": _GRANITE,
    "granitemoe_swa": {**_GRANITE, "shared_intermediate_size": 64},
    "granitemoehybrid": {
        **{**_GRANITE, **_MAMBA, "shared_intermediate_size": 64, "layer_types": ["mamba", "attention"]},
    },
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 64},
    "hunyuan_v1_moe": {**_INTERMEDIATE, "num_experts": EXPERTS, "moe_topk": ROUTED, "head_dim": 48},
    "hy_v3": {
        **{**_SHARED, "num_experts": EXPERTS, "num_shared_experts": 1, "head_dim": 48, "num_hidden_layers": 2},
        **{"mlp_layer_types": ["dense", "sparse"], "initializer_range": 0.02},
    },
    "hy_v4": {**_MLA, **_INDEXED, **_CLAMPED, "mlp_layer_types": ["dense", "sparse"]},
    "hy_v4_vl": {
        "text_config": {
            **{**_MLA, **_INDEXED, **_CLAMPED, "mlp_layer_types": ["dense", "sparse"], "model_type": "hy_v4_vl_text"},
            **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "index_head_dim": 96},
        },
        "vision_config": {**_VISION, "num_hidden_layers": 1, "image_size": 28, "out_hidden_size": HIDDEN},
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
    "minimax_m3_vl": {
        "text_config": {
            **{**_GRANITE, "head_dim": 48, "rotary_dim": 24, "dense_intermediate_size": 96, "swiglu_limit": 0.3},
            **{"shared_intermediate_size": 64, "mlp_layer_types": ["dense", "sparse"]},
        },
        "vision_config": {**_VISION, "num_hidden_layers": 1, "image_size": 28},
        "projector_hidden_size": 64,
    },
    "phimoe": _GRANITE,
    "qwen3_next": {**_QWEN3_5, "intermediate_size": 96, "mlp_only_layers": [0]},
    "qwen3_omni_moe": {
        "thinker_config": {
            "vision_start_token_id": VOCABULARY - 1,
            "text_config": {**_QWEN, "intermediate_size": 96, "num_hidden_layers": 2, "mlp_only_layers": [0]},
            "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
            "audio_config": {
                **{"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
                **{"output_dim": HIDDEN, "downsample_hidden_size": 16},
            },
        },
        "talker_config": {  # which has experts of its own
            **{"spatial_merge_size": 2, "thinker_hidden_size": HIDDEN, "accept_hidden_layer": 1, "num_code_groups": 4},
            "text_config": {**_QWEN2, "num_hidden_layers": 1, "hidden_size": 64},
            "code_predictor_config": {**_TEXT, "hidden_size": 64, "num_hidden_layers": 1, "num_code_groups": 4},
        },
        "code2wav_config": {
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"num_key_value_heads": 2, "codebook_size": 64, "decoder_dim": 64, "num_quantizers": 4},
            **{"upsample_rates": [2, 2], "upsampling_ratios": [2, 2]},
        },
    },
    "qwen3_vl_moe": {
        "text_config": {**_QWEN, "intermediate_size": 96, "mlp_only_layers": [0]},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": False,
    },
    "sarvam_mla": {**_MLA, "initializer_range": 0.02},
    "sarvam_moe": {**_GROUPED, "initializer_range": 0.02},
    "solar_open": {**_GROUPED, "n_group": 1, "first_k_dense_replace": 0},
    "zaya": {**_QWEN, "num_experts_per_tok": 1},
}


def _transpose_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The axes of fused experts swapped: so they lie on the Hub, while transformers saves what it has in memory."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }


def _add_predicting_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One layer after the last, with experts: transformers passes it over."""
    more = {name.replace(".layers.1.", ".layers.2."): t.clone() for name, t in tensors.items() if ".layers.1." in name}
    return {**tensors, **more, "model.layers.2.eh_proj.weight": torch.ones(HIDDEN, 2 * HIDDEN).bfloat16()}


# As a type is published, where that is not as transformers saves it: name of the case -> (model_type, what differs).
PUBLISHED: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "deepseek_v3, one layer predicts": ("deepseek_v3", _add_predicting_layer),
    "glm4_moe, one layer predicts": ("glm4_moe", _add_predicting_layer),
    "qwen3_vl_moe, transposed": ("qwen3_vl_moe", _transpose_experts),
}

MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    **{name: (name, values) for name, values in MORE_TYPES.items()},
    **{name: (model_type, MORE_TYPES[model_type]) for name, (model_type, _) in PUBLISHED.items()},
}


def is_in_transformers(name: str) -> bool:
    """Whether the installed transformers has the case's model type, and its experts behind the experts interface."""
    return MODEL_TYPES[name][0] in CONFIG_MAPPING and (
        name != "aria" or hasattr(getattr(modeling_aria, "AriaExperts", None), "_apply_gate")
    )


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> PreTrainedModel:
    """A random model of one architecture; `overrides` change its (text) config."""
    model_type, values = MODEL_TYPES[name]
    if "text_config" in values:
        values = {**values, "text_config": {**values["text_config"], **overrides}}
    else:
        values = {**values, **overrides}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **values)
    # A multimodal model as a whole, where its language model alone would be to be had as well.
    classes = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForMultimodalLM)
    auto = next(auto for auto in classes if type(config) in auto._model_mapping)
    model: PreTrainedModel = auto.from_config(config)
    for part, parameter in model.named_parameters():
        if part.startswith("talker.") and ".experts." in part:  # which transformers leaves as the memory was
            torch.nn.init.normal_(parameter, std=0.02)
        if part.endswith("_proj_bias"):  # which start at zero; some of gate and up beyond their limits
            torch.nn.init.normal_(parameter, std=4 if part.endswith("gate_up_proj_bias") else 0.1)
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def save_tiny(folder: Path, name: str, *, max_shard_size: str = "5GB", **overrides: Any) -> PreTrainedModel:
    """The model of `tiny_model`, saved into `folder` by `save_pretrained`, or as it is published."""
    model = tiny_model(name, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if name in PUBLISHED:
        file, (_, publish) = folder / "model.safetensors", PUBLISHED[name]
        save_file(publish(load_file(file)), file, metadata={"format": "pt"})
    return model
