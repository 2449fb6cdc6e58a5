"""The dense blocks that the sparse one is measured against, in the same run on the same weights."""

# E experts, K routed experts of a token, H hidden size, I channels of an expert, N tokens

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from mreader.bench.layers import Call
from mreader.progress import Progress
from mreader.reader import ExpertLayer

_VLLM_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class Peer:
    """A dense block.

    prepare: a call -> the function to time: what the peer wants in another form is made ready before
    working:  routed tokens N * K -> bytes that a call allocates beside its inputs
    """

    name: str
    prepare: Callable[[Call], Callable[[], Tensor]]
    working: Callable[[int], int]

    def fits(self, call: Call) -> bool:
        """Whether the device has the memory for a call."""
        return self.working(call.ids.numel()) < 0.8 * torch.cuda.mem_get_info(call.x.device)[0]


def find_peers(layers: Sequence[ExpertLayer], progress: Progress) -> list[Peer]:
    """Our own dense path, transformers' two, and vLLM's where it is installed."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    stock = [_stock_experts(layer) for layer in layers]
    peers = [
        own_dense(layers),
        _transformers("grouped_mm", ALL_EXPERTS_FUNCTIONS["grouped_mm"], stock),
        _transformers("batched_mm", ALL_EXPERTS_FUNCTIONS["batched_mm"], stock),
    ]
    vllm = _vllm(layers[0].activation.name, stock, progress)
    return [*peers, vllm] if vllm else peers


def own_dense(layers: Sequence[ExpertLayer]) -> Peer:
    """The dense block of the kernels that the runtime takes itself."""
    from mreader.kernels.dense import dense

    def prepare(call: Call) -> Callable[[], Tensor]:
        layer = layers[call.layer]
        name = layer.activation.name
        return lambda: dense(call.x, call.ids, call.weights, layer.gate_up, layer.down, name)

    return Peer("dense", prepare, _rows(layers[0]))


def _transformers(name: str, forward: Callable[..., Tensor], stock: Sequence[SimpleNamespace]) -> Peer:
    experts = stock[0]
    expert_bytes = (experts.gate_up_proj[0].numel() + experts.down_proj[0].numel()) * experts.down_proj.element_size()

    def prepare(call: Call) -> Callable[[], Tensor]:
        return lambda: forward(stock[call.layer], call.x, call.ids, call.weights)

    # batched_mm copies the weights of every routed token's expert
    copied = expert_bytes if name == "batched_mm" else expert_bytes // experts.down_proj.shape[1]
    return Peer(name, prepare, lambda routed: copied * routed)


def _vllm(activation: str, stock: Sequence[SimpleNamespace], progress: Progress) -> Peer | None:
    """vLLM's fused_experts with the configuration that vLLM itself looks up; None where it cannot be had."""
    if importlib.util.find_spec("vllm") is None:
        return None
    if activation not in _VLLM_ACTIVATIONS:
        progress.note(f"vLLM is left out: its fused_experts has no {activation}")
        return None
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for data
    try:
        fused_moe = importlib.import_module("vllm.model_executor.layers.fused_moe")
        activations = importlib.import_module("vllm.model_executor.layers.fused_moe.activation")
    except ImportError as error:
        progress.note(f"vLLM is left out: it is installed, but {error}")
        return None
    chosen = activations.MoEActivation(_VLLM_ACTIVATIONS[activation])

    def prepare(call: Call) -> Callable[[], Tensor]:
        experts, weights, ids = stock[call.layer], call.weights.float(), call.ids.int()  # as its router gives them

        def run() -> Tensor:
            output: Tensor = fused_moe.fused_experts(
                call.x, experts.gate_up_proj, experts.down_proj, weights, ids, activation=chosen
            )
            return output

        return run

    rows = stock[0].gate_up_proj.shape[1] * 4
    return Peer("vllm", prepare, lambda routed: rows * routed)


def _stock_experts(layer: ExpertLayer) -> SimpleNamespace:
    """What transformers' implementations ask of an experts module; weights laid out as a stock checkpoint has them."""
    E, _, I, H = layer.gate_up.shape
    experts = SimpleNamespace(
        num_experts=E,
        gate_up_proj=layer.gate_up.view(E, 2 * I, H),
        down_proj=layer.down.transpose(1, 2).contiguous(),
        act_fn=layer.activation.function,
        has_gate=True,
        has_bias=False,
        has_post_expert_norm=False,
        is_transposed=False,
        is_concatenated=True,
        _is_expert_parallel=False,
    )

    def apply_gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.activation.function(gate) * up

    experts._apply_gate = apply_gate
    return experts


def _rows(layer: ExpertLayer) -> Callable[[int], int]:
    """A hidden row of (I,) and an output row of (H,) in float32 for each routed token."""
    _, _, I, H = layer.gate_up.shape
    return lambda routed: 4 * routed * (I + H)
