"""The routed experts of one layer in vLLM: a decoded token goes through the reader, all others are dense.

Both read the same native weights. Of a CUDA device the Triton kernels serve both; vLLM's own fused experts would need
the down projection in another layout, and with it a second copy. Elsewhere both are torch.
"""

# T tokens of a step, E experts, K routed experts of a token, H hidden size, I channels of an expert; E' and I' a rank's

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.utils.torch_utils import direct_register_custom_op

from mreader.activations import Activation, get_activation
from mreader.backend import current, layout_on, runs_kernels
from mreader.budget import BlockShape, Budget, count_reads
from mreader.errors import SourceError, UnsupportedError
from mreader.formats.augmented import FormatOptions
from mreader.formats.safetensors_file import TensorSpec
from mreader.formats.tensors import TORCH_DTYPES
from mreader.kernels.exact import exact
from mreader.kernels.route import MOST_EXPERTS
from mreader.reader import ExpertLayer, ReadSettings
from mreader.vllm.checkpoint import RoutedCheckpoint
from mreader.vllm.phases import Rows, only_decodes, split_rows
from mreader.vllm.shards import Shard, read_share

if TYPE_CHECKING:
    from mreader.kernels.decode import DecodeLayer

logger = init_logger("vllm.mreader")  # vLLM shows what loggers below its own name say

_WEIGHTS = ("gate_up_proj", "down_proj")
_SPLIT = "mreader_rows"  # in the forward context, which is a step's
_TOKENS_AT_ONCE = 128  # as mreader.experts: what the kernels keep of a token is one to three MB


class RoutedExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """What vLLM calls for the routed experts of layer `number`. `budget` None is dense: no sketch is kept."""

    def __init__(
        self,
        moe: FusedMoEConfig,
        number: int,
        checkpoint: RoutedCheckpoint,
        options: FormatOptions,
        budget: Budget | None,
    ) -> None:
        super().__init__(moe)
        self.number, self.checkpoint, self.options, self.budget = number, checkpoint, options, budget
        config = get_current_vllm_config()
        self.compilation = config.compilation_config  # the mode of graphs is settled later
        self.routing_is_asked_for = asks_for_routing(config)
        self.stored = checkpoint.layers[number]
        self.activation = get_activation(checkpoint.activation)
        self.taken: set[str] = set()
        self.parameters: dict[str, nn.Parameter] = {}
        self.settings: ReadSettings | None = None
        self.repacked: DecodeLayer | None = None
        self.whole = False

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM hands over the router's logits: the first kernel of the reader can choose a token's experts."""
        return self.repacked is not None and self.whole and not self.routing_is_asked_for

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Parameters for the rank's part of the layer, under the format's names."""
        _refuse_unsupported(layer, self.activation)
        self.shard = _shard_of(layer, self.stored.experts, self.stored.channels)
        self.whole = layer.expert_map is None and len(self.shard.experts) == self.stored.experts
        sizes = (len(self.shard.experts), self.stored.hidden, len(self.shard.channels))
        if sizes != (num_experts, hidden_size, intermediate_size_per_partition):
            raise UnsupportedError(
                f"vLLM asks for {num_experts} experts of {hidden_size} x {intermediate_size_per_partition} in layer "
                f"{self.number}, the checkpoint has {sizes[0]} of {sizes[1]} x {sizes[2]} for a rank",
                "choose a number of GPUs that divides experts and channels",
            )
        self.settings = self._settle(layer.top_k, torch.empty(0).device)
        for part, spec in self.shard.specs(hidden_size, self.stored.dtype, self.options).items():
            if part not in _WEIGHTS and self.settings is None:
                continue
            dtype = params_dtype if part in _WEIGHTS else TORCH_DTYPES[spec.dtype]
            self.parameters[part] = nn.Parameter(torch.empty(spec.shape, dtype=dtype), requires_grad=False)
            layer.register_parameter(part, self.parameters[part])

    def take(self, part: str, tensor: Tensor) -> None:
        """Keep the rank's part of a tensor of the checkpoint."""
        self.taken.add(part)
        if part in self.parameters:
            self.shard.copy(part, tensor, self.parameters[part].data, self.options.code)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make of the tensors what is read. SourceError for one that did not come."""
        for part in self.shard.specs(self.stored.hidden, self.stored.dtype, self.options):
            if part not in self.taken:
                raise SourceError(
                    f"tensor {self.stored.prefix}.{part} is missing",
                    "download the checkpoint again, or convert the source again",
                )
        if self.settings is not None and runs_kernels(self.parameters["down_proj"].device):
            from mreader.kernels.decode import repack

            self.repacked = repack(self._layer())
            for part in ("sketch_codes", "sketch_scales", "sketch_errors"):  # which the kernels have in tiles
                delattr(layer, part)
                del self.parameters[part]

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """(T, H): the routed experts' part of the output, on this rank. vLLM computes shared experts by itself."""
        y: Tensor = torch.ops.vllm.mreader_routed_experts(x, topk_ids, topk_weights, layer.layer_name)
        return y

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """(T, H): `apply` with the experts that the router's logits name."""
        y: Tensor = torch.ops.vllm.mreader_routed_by_logits(x, router_logits, input_ids, layer.layer_name)
        return y

    def compute(self, layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """y = sum over the token's experts of this rank, by the reader where the token is decoded.

        x:       (T, H)
        ids:     (T, K) int - numbers of experts among all E
        weights: (T, K) float32
        returns: (T, H) dtype of x
        """
        if layer.expert_map is not None:
            ids = layer.expert_map[ids.long()]
        with current(x.device):
            forward = self._serving_all(x, ids.shape[1])
            if forward is not None:
                return forward(x, ids, weights)
            rows = _split_once(get_forward_context(), len(x))
            if rows is None:
                return self._dense(x, ids, weights)
            y = torch.empty_like(x)
            for part, forward in ((rows.decoded, self._sparse), (rows.others, self._dense)):
                y[part] = forward(x[part], ids[part], weights[part])
            return y

    def compute_by_logits(self, runner: Any, x: Tensor, logits: Tensor, input_ids: Tensor | None) -> Tensor:
        """`compute` with the experts that vLLM's router chooses; where it is a plain one, the reader does in its place.

        logits: (T, E)
        """
        router = runner.router
        # From 0.32 on vLLM may know rows that are padding, and its router gives them no experts.
        padding = getattr(get_forward_context(), "is_padding", None)
        fits = len(x) <= _TOKENS_AT_ONCE and (padding is None or len(padding) == len(x))
        fits = fits and logits.shape == (len(x), self.stored.experts)
        if fits and is_plain(router) and self._serving_all(x, router.top_k) == self._sparse:
            return self._sparse_by_logits(x, logits, router.top_k, router.renormalize, padding)
        weights, ids = router.select_experts(hidden_states=x, router_logits=logits, input_ids=input_ids)
        return self.compute(runner.routed_experts, x, ids, weights)

    def _serving_all(self, x: Tensor, routed: int) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What computes the experts of all rows of the step; None where some of them decode and others do not."""
        context = get_forward_context()
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.settings is None or serves_any_mixture(context, capturing, self.compilation.cudagraph_mode):
            return self._dense
        if only_decodes(context.attn_metadata):
            return self._dense if self._is_faster_dense(x, routed) else self._sparse
        return None

    def _sparse(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert self.settings is not None
        if self.repacked is None:
            return read_share(x, ids, weights, self._layer(), self.settings)
        from mreader.kernels.decode import decode, decode_share

        forward = decode if self.whole else decode_share
        parts = [slice(start, start + _TOKENS_AT_ONCE) for start in range(0, len(x), _TOKENS_AT_ONCE)]
        outputs = [forward(x[part], ids[part], weights[part], self.repacked, self.settings) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _sparse_by_logits(
        self, x: Tensor, logits: Tensor, routed: int, renormalize: bool, padding: Tensor | None
    ) -> Tensor:
        assert self.settings is not None
        assert self.repacked is not None
        from mreader.kernels.decode import Router, decode_routed

        with current(x.device):
            return decode_routed(x, Router(logits, routed, renormalize, padding), self.repacked, self.settings)

    def _dense(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate_up, down = (self.parameters[part] for part in _WEIGHTS)
        if runs_kernels(x.device):
            from mreader.kernels.dense import dense

            return dense(x, ids, weights, gate_up, down, self.activation.name)
        every = torch.ones(*ids.shape, down.shape[1], dtype=torch.bool, device=x.device)
        return exact(x, ids, weights.float(), every, gate_up, down, self.activation).to(x.dtype)

    def _is_faster_dense(self, x: Tensor, routed: int) -> bool:
        """Whether the kernels read all channels of so large a batch faster than some."""
        if self.repacked is None:
            return False
        from mreader.kernels.tuning import LayerShape, device_name, largest_sparse_batch

        experts, channels, hidden = self.parameters["down_proj"].shape
        return len(x) > largest_sparse_batch(device_name(x.device), LayerShape(experts, routed, hidden, channels))

    def _layer(self) -> ExpertLayer:
        gate_up, down = (self.parameters[part].data for part in _WEIGHTS)
        return ExpertLayer.of(gate_up, down, self.parameters, self.options.code, self.activation)

    def _settle(self, routed: int, device: torch.device) -> ReadSettings | None:
        """What the budget means for the rank's part of the layer, None for dense; the first layer says it."""
        shape = BlockShape(
            hidden=self.stored.hidden,
            channels=len(self.shard.channels),
            routed=routed,
            rank=self.options.rank,
            code=self.options.code,
            element_size=TensorSpec(self.stored.dtype, ()).alignment,
            layout=layout_on(device),
        )
        settings = self.budget.resolve(shape) if self.budget else None
        # Kernels that keep every channel only lose time.
        if settings is not None and settings.k == shape.candidates and runs_kernels(device):
            settings = None
        if self.number == min(self.checkpoint.layers):
            logger.info("mreader: a decoded token reads %s", _in_words(settings, shape))
        return settings


def serves_any_mixture(context: Any, capturing: bool, graphs: CUDAGraphMode) -> bool:
    """Whether the step is one of a CUDA graph that also serves steps with other tokens decoding than this one.

    context:   vLLM's forward context
    capturing: whether a graph is being recorded
    graphs:    which graphs vLLM records; those of mixed steps are PIECEWISE by default, and may look like decoding
    """
    if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
        return True
    return capturing and (graphs.mixed_mode() == CUDAGraphMode.FULL or not only_decodes(context.attn_metadata))


def asks_for_routing(config: Any) -> bool:
    """Whether vLLM is to return which experts served a token: it asks its own router then."""
    parts = (getattr(config, name, None) for name in ("model_config", "aux_output_config"))  # vLLM 0.25, 0.32
    return any(getattr(part, "enable_return_routed_experts", False) for part in parts)


def is_plain(router: Any) -> bool:
    """Whether vLLM's router takes the largest of a softmax, and nobody else wants to know which.

    router: with the attributes of vLLM 0.25's; of a later one that lacks some, that is not known
    """
    wanted = {"scoring_func": "softmax", "eplb_state": None, "capture_fn": None, "_routing_replay_out": None}
    missing = object()
    return (
        type(router) is FusedTopKRouter
        and all(getattr(router, name, missing) == value for name, value in wanted.items())
        and router.global_num_experts <= MOST_EXPERTS
    )


def _split_once(context: Any, rows: int) -> Rows | None:
    """`split_rows` of the step, which the first layer works out for all."""
    known = context.additional_kwargs
    if _SPLIT not in known:
        known[_SPLIT] = split_rows(context.attn_metadata, rows)
    found: Rows | None = known[_SPLIT]
    return found


def _in_words(settings: ReadSettings | None, shape: BlockShape) -> str:
    if settings is None:
        return f"all of its experts' {shape.candidates} channels, dense"
    reads = count_reads(shape, settings.k, settings.coordinates, settings.score, settings.rank)
    return (
        f"{settings.k} of its experts' {shape.candidates} channels, {settings.coordinates} coordinates, "
        f"score {settings.score}: {100 * reads.total:.2f} %"
    )


def _shard_of(layer: Any, experts: int, channels: int) -> Shard:
    """The part that vLLM gives this rank."""
    places = list(range(experts)) if layer.expert_map is None else layer.expert_map.tolist()
    here = sorted((expert for expert in range(experts) if places[expert] >= 0), key=lambda expert: places[expert])
    ranks = layer.moe_config.moe_parallel_config.tp_size
    own, rank = channels // ranks, layer.moe_config.moe_parallel_config.tp_rank
    return Shard(tuple(here), range(rank * own, (rank + 1) * own), channels)


def _refuse_unsupported(layer: Any, activation: Activation) -> None:
    """UnsupportedError for what vLLM may ask of routed experts and the reader does not do."""
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    refused = {
        "experts with biases": moe.has_bias,
        "experts without a gate": not moe.is_act_and_mul,
        "routing weights on the input": layer.apply_router_weight_on_input,
        "a limited activation": layer.swiglu_limit is not None or not activation.is_linear_in_up,
        "data parallel serving": parallel.dp_size > 1,
        "LoRA": moe.is_lora_enabled,
    }
    for what, asked in refused.items():
        if asked:
            raise UnsupportedError(f"mreader does not support {what} in vLLM", "serve the source checkpoint instead")


def _routed_experts(x: Tensor, ids: Tensor, weights: Tensor, name: str) -> Tensor:
    """`RoutedExpertsMethod.compute` of a layer by its name.

    An operation, since vLLM may trace what surrounds it once for all steps: which tokens decode is asked in each.
    """
    layer = get_forward_context().no_compile_layers[name].routed_experts
    y: Tensor = layer.quant_method.compute(layer, x, ids, weights)
    return y


def _routed_by_logits(x: Tensor, logits: Tensor, input_ids: Tensor | None, name: str) -> Tensor:
    """`RoutedExpertsMethod.compute_by_logits` likewise."""
    runner = get_forward_context().no_compile_layers[name]
    y: Tensor = runner.routed_experts.quant_method.compute_by_logits(runner, x, logits, input_ids)
    return y


def _like_x(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


for _name, _operation in (
    ("mreader_routed_experts", _routed_experts),
    ("mreader_routed_by_logits", _routed_by_logits),
):
    direct_register_custom_op(_name, _operation, fake_impl=_like_x)
