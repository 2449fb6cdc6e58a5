"""Known models as shapes: what `--shape` names. Weights are random."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mreader.errors import UsageError
from mreader.kernels.tuning import LayerShape


@dataclass(frozen=True)
class ModelShape:
    """A model's routed experts, and the configuration that transformers builds the whole model from.

    layers:     routed layers
    activation: Hugging Face name
    model_type: of `config`
    config:     values of the text model's config
    """

    name: str
    layer: LayerShape
    layers: int
    activation: str
    model_type: str
    config: Mapping[str, Any]


_QWEN3_30B = ModelShape(
    "qwen3-30b-a3b",
    LayerShape(experts=128, routed=8, hidden=2048, channels=768),
    layers=48,
    activation="silu",
    model_type="qwen3_moe",
    config={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
)
_OLMOE = ModelShape(
    "olmoe",
    LayerShape(experts=64, routed=8, hidden=2048, channels=1024),
    layers=16,
    activation="silu",
    model_type="olmoe",
    config={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
)
_GEMMA4_26B = ModelShape(
    "gemma4-26b",
    LayerShape(experts=128, routed=8, hidden=2816, channels=704),
    layers=30,
    activation="gelu_pytorch_tanh",
    model_type="gemma4_text",
    config={
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
_QWEN3_5_35B = ModelShape(
    "qwen3.5-35b",
    LayerShape(experts=256, routed=8, hidden=2048, channels=512),
    layers=40,
    activation="silu",
    model_type="qwen3_5_moe_text",
    config={
        "vocab_size": 248320,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
)
SHAPES: dict[str, ModelShape] = {shape.name: shape for shape in (_QWEN3_30B, _OLMOE, _GEMMA4_26B, _QWEN3_5_35B)}


def get_shape(name: str) -> ModelShape:
    """The shape of that name. Raises UsageError that lists the known ones."""
    try:
        return SHAPES[name]
    except KeyError:
        raise UsageError(f"there is no shape {name}", f"choose one of {', '.join(SHAPES)}") from None
