"""What vLLM asks about a checkpoint whose `quantization_config` says `mreader`.

The budget is that of config.json; MREADER_READS, and over it `--hf-overrides '{"mreader": ...}'`, change it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.utils import get_model_architecture

from mreader.budget import Budget
from mreader.formats.augmented import METHOD, FormatOptions, parse_config_entry
from mreader.vllm.budget import choose_budget
from mreader.vllm.checkpoint import RoutedCheckpoint, divert_tensors, layer_number, open_routed
from mreader.vllm.experts import RoutedExpertsMethod


@register_quantization_config(METHOD)
class MreaderConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of an augmented checkpoint, the budget in force, and what the checkpoint holds."""

    def __init__(self, options: FormatOptions) -> None:
        super().__init__()
        self.options = options
        self.budget: Budget | None = Budget.of(options)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MreaderConfig:
        """Raises what `parse_config_entry` raises: UnsupportedError for a newer format, ..."""
        return cls(parse_config_entry(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Called once the config of the model is known, before a process is started for it: errors are shown here."""
        self.budget = choose_budget(self.options, os.environ, getattr(hf_config, METHOD, None))
        if Path(model_name).is_dir():
            self.checkpoint = open_routed(Path(model_name))

    @cached_property
    def checkpoint(self) -> RoutedCheckpoint:
        """Of a Hub id: what its files hold, which vLLM downloads in the processes that load the model."""
        from huggingface_hub import snapshot_download

        config = get_current_vllm_config()
        folder = snapshot_download(
            config.model_config.model,
            revision=config.model_config.revision,
            cache_dir=config.load_config.download_dir,
            allow_patterns=["*.json", "*.safetensors"],
        )
        return open_routed(Path(folder))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer: the reader for the format's routed experts, vLLM's own for everything else."""
        model_config = get_current_vllm_config().model_config
        if model_config.runner_type != "draft":
            divert_tensors(get_model_architecture(model_config)[0])
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        number = layer_number(prefix)
        if isinstance(layer, RoutedExperts) and number is not None and number in self.checkpoint.layers:
            return RoutedExpertsMethod(layer.moe_config, number, self.checkpoint, self.options, self.budget)
        return None

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
