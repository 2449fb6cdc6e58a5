"""The routed experts of a loaded model: what computes a call, and from which tensors.

A decode step goes through the reader, everything else is dense. On a CUDA device both are Triton kernels, which read
the model's own weights and a repacked sketch; elsewhere, and for experts that the kernels do not know, they are torch,
on the layout of the checkpoint.
"""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from mreader.backend import current, layout_on, runs_kernels
from mreader.budget import DISK, Layout
from mreader.formats.augmented import FormatOptions, tensor_specs
from mreader.formats.tensors import TORCH_DTYPES
from mreader.kernels.layout import MOST_CANDIDATES
from mreader.kernels.route import MOST_EXPERTS, rms_norm, route
from mreader.kernels.tuning import LayerShape, device_name, largest_sparse_batch
from mreader.reader import ExpertLayer, read

if TYPE_CHECKING:
    from mreader.kernels.decode import DecodeLayer, Gate
    from mreader.runtime import Runtime

_WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of a call that sends every token through the reader: what the kernels keep of a token is one to three MB.
_TOKENS_AT_ONCE = 128


class RoutedExpertsSketch(nn.Module):
    """Sketch, norms and recovery map of one layer: tensors whose dtypes are part of the format.

    `.to(dtype)` moves the model's weights to another dtype, and these nowhere but to another device. For a device that
    runs the kernels they stay on the host, as stored: all that the device holds is what `repack` makes of them, so that
    copies, pickles, `state_dict` and the way back to the CPU are those of the checkpoint.

    for_kernels: whether the layer is one that the kernels serve where they run
    """

    def __init__(self, tensors: Mapping[str, Tensor], for_kernels: bool) -> None:
        super().__init__()
        self.for_kernels = for_kernels
        self.repacked: DecodeLayer | None = None
        for name, tensor in tensors.items():
            self.register_buffer(name, self._at_home(tensor.detach(), tensor.device))

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """name -> tensor, on a device."""
        return {name: tensor.to(device) for name, tensor in self.named_buffers()}

    def send_home(self) -> None:
        """Put the tensors where they belong, should a library have moved them one by one, as accelerate does."""
        for name, tensor in self.named_buffers():
            self._buffers[name] = self._at_home(tensor, tensor.device)

    def _at_home(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor where it is kept for a model on `device`."""
        return tensor.to("cpu" if self.for_kernels and runs_kernels(device) else device)

    def _apply(self, fn: Any, recurse: bool = True) -> RoutedExpertsSketch:
        self.repacked = None
        for name, tensor in self.named_buffers():
            self._buffers[name] = self._at_home(tensor, fn(torch.empty(0, device=tensor.device)).device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.repacked = None
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "repacked": None}


def is_biased(module: Any) -> bool:
    """Whether the experts have biases."""
    return bool(getattr(module, "has_bias", False))


def kernels_know(module: Any) -> bool:
    """Whether the Triton kernels compute these experts: they add no biases, and take a channel for phi(gate) * up."""
    return not is_biased(module) and module.mreader_activation.is_linear_in_up


def layout_of(module: Any) -> Layout:
    """How the layer's sketch is laid out where its device reads it."""
    return layout_on(module.down_proj.device) if kernels_know(module) else DISK


def expect_layer(module: Any, options: FormatOptions) -> None:
    """Give an experts module parameters on the meta device, in the shapes and dtypes that the format stores."""
    E, I, H = module.down_proj.shape if _is_transposed(module) else module.down_proj.mT.shape
    dtype = module.down_proj.dtype
    for part, spec in tensor_specs(int(E), int(I), int(H), "F32", options, is_biased(module)).items():
        stored = dtype if part in _WEIGHTS else TORCH_DTYPES[spec.dtype]
        empty = torch.empty(spec.shape, dtype=stored, device="meta")
        setattr(module, part, nn.Parameter(empty, requires_grad=False))


def view_as_stock(module: Any, options: FormatOptions) -> None:
    """Stock shapes on the stored bytes, and everything else of the format in a submodule.

    `gate_up_proj` (E, 2, I, H) becomes the view (E, 2I, H), `down_proj` (E, I, H) the transposed view (E, H, I), both
    once more transposed where transformers has them so, and a bias of gate and up (E, 2, I) becomes (E, 2I): every
    dense implementation of transformers runs on the stored weights. No view has gate and up in turns: a module that
    takes them so is given them by `_gate_in_turns`.
    """
    E, two, I, H = module.gate_up_proj.shape
    extra = [part for part in tensor_specs(1, 1, 1, "F32", options) if part not in _WEIGHTS]
    module.sketch = RoutedExpertsSketch({part: getattr(module, part) for part in extra}, kernels_know(module))
    for part in extra:
        delattr(module, part)
    gate_up, down = module.gate_up_proj.data.view(E, two * I, H), module.down_proj.data.mT
    if _is_transposed(module):
        gate_up, down = gate_up.mT, down.mT
    module.gate_up_proj = nn.Parameter(gate_up, requires_grad=False)
    module.down_proj = nn.Parameter(down, requires_grad=False)
    if is_biased(module):
        module.gate_up_proj_bias = nn.Parameter(module.gate_up_proj_bias.data.flatten(1), requires_grad=False)
    if not getattr(module, "is_concatenated", True):
        module._apply_gate = partial(_gate_in_turns, module)


def _is_transposed(module: Any) -> bool:
    """Whether transformers has the experts' matrices with their last two axes swapped."""
    return bool(getattr(module, "is_transposed", False))


def _gate_in_turns(module: Any, gate_up: Tensor) -> Tensor:
    """The module's own gating (..., 2I) -> (..., I), of gate and up one after the other."""
    gated: Tensor = type(module)._apply_gate(module, torch.unflatten(gate_up, -1, (2, -1)).mT.flatten(-2))
    return gated


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The routed experts' output: by the reader in a decode step, dense elsewhere and where that is faster.

    hidden_states: (N, H) - tokens
    top_k_index:   (N, K) int - their routed experts
    top_k_weights: (N, K) - routing weights
    returns:       (N, H)
    """
    forward = _sparse if _reads_sparsely(module, hidden_states, top_k_index.shape[1]) else _dense
    with current(hidden_states.device):
        return forward(module, hidden_states, top_k_index, top_k_weights)


def experts_by_logits(module: Any, hidden_states: Tensor, logits: Tensor, routed: int, renormalize: bool) -> Tensor:
    """`experts_forward` of experts that are chosen by their router's logits, as `mreader.kernels.route.route` does.

    hidden_states: (N, H) - tokens
    logits:        (N, E)
    routed:        K
    returns:       (N, H)
    """
    if not chooses_experts(module, hidden_states, routed):
        ids, weights = route(logits, routed, renormalize)
        return experts_forward(module, hidden_states, ids, weights)
    return _choosing(module, hidden_states, logits, routed, renormalize)


def experts_by_gate(
    module: Any,
    hidden_states: Tensor,
    rows: Tensor,
    norm: Tensor,
    epsilon: float,
    routed: int,
    renormalize: bool,
) -> Tensor:
    """`experts_by_logits` of tokens that are given before their norm: see `mreader.kernels.decode.Gate`.

    hidden_states: (N, H) - few tokens: each reads the whole gate
    rows:          (E, H)
    norm:          (H,)
    epsilon:       the norm's
    routed:        K
    returns:       (N, H)
    """
    if not chooses_experts(module, hidden_states, routed):
        x = rms_norm(hidden_states, norm, epsilon)
        return experts_by_logits(module, x, x @ rows.mT, routed, renormalize)
    from mreader.kernels.decode import Gate

    logits = hidden_states.new_empty(len(hidden_states), len(rows))
    return _choosing(module, hidden_states, logits, routed, renormalize, Gate(rows, norm, epsilon))


def chooses_experts(module: Any, x: Tensor, routed: int) -> bool:
    """Whether the kernels read such a call's experts sparsely, and choose them by their router's logits."""
    E, I, _ = stored_weights(module)[1].shape
    fits = E <= MOST_EXPERTS and routed * I <= MOST_CANDIDATES and 0 < len(x) <= _TOKENS_AT_ONCE
    return fits and _has_kernels(module, x) and _reads_sparsely(module, x, routed)


def _choosing(
    module: Any, x: Tensor, logits: Tensor, routed: int, renormalize: bool, gate: Gate | None = None
) -> Tensor:
    from mreader.kernels.decode import Router, decode_routed

    router = Router(logits, routed, renormalize, gate=gate)
    with current(x.device):
        return decode_routed(x, router, _repacked(module, x.device), module.mreader.settings)


def _reads_sparsely(module: Any, x: Tensor, routed: int) -> bool:
    runtime: Runtime = module.mreader
    if runtime.mode != "decode":
        return runtime.mode == "always"
    if not runtime.decoding:
        return False
    return not _has_kernels(module, x) or len(x) <= _largest_sparse_batch(module, x.device, routed)


def _largest_sparse_batch(module: Any, device: torch.device, routed: int) -> int:
    E, I, H = stored_weights(module)[1].shape
    return largest_sparse_batch(device_name(device), LayerShape(E, routed, H, I))


def _has_kernels(module: Any, x: Tensor) -> bool:
    fits = x.dtype == module.down_proj.dtype and x.dtype in _KERNEL_DTYPES
    return fits and runs_kernels(x.device) and kernels_know(module)


def _sparse(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    settings = module.mreader.settings
    if not _has_kernels(module, x):
        return read(x, ids, weights, _layer_of(module, x.device), settings)
    from mreader.kernels.decode import decode

    if ids.shape[1] * stored_weights(module)[1].shape[1] > MOST_CANDIDATES:
        return read(x, ids, weights, _layer_of(module, x.device), settings)
    layer = _repacked(module, x.device)
    parts = [slice(start, start + _TOKENS_AT_ONCE) for start in range(0, max(len(x), 1), _TOKENS_AT_ONCE)]
    outputs = [decode(x[part], ids[part], weights[part], layer, settings) for part in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _dense(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    # The kernels have no backward pass.
    differentiated = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
    if _has_kernels(module, x) and not differentiated:
        from mreader.kernels.dense import dense

        return dense(x, ids, weights, *stored_weights(module), module.mreader_activation.name)
    eager = type(module).forward.__wrapped__
    stock = ALL_EXPERTS_FUNCTIONS.get_interface(module.mreader_dense, eager)
    output: Tensor = stock(module, x, ids, weights)
    return output


def _repacked(module: Any, device: torch.device) -> DecodeLayer:
    """The layer as the kernels read it, made by the first step on these weights."""
    sketch: RoutedExpertsSketch = module.sketch
    layer = sketch.repacked
    if layer is None or layer.down.data_ptr() != module.down_proj.data_ptr():
        from mreader.kernels.decode import repack

        sketch.send_home()
        layer = sketch.repacked = repack(_layer_of(module, device))
    return layer


def _layer_of(module: Any, device: torch.device) -> ExpertLayer:
    stored = module.sketch.on(device)
    gate_up, down = stored_weights(module)
    if is_biased(module):
        E, _, I, _ = gate_up.shape
        stored |= {"gate_up_proj_bias": module.gate_up_proj_bias.view(E, 2, I), "down_proj_bias": module.down_proj_bias}
    return ExpertLayer.of(gate_up, down, stored, module.mreader.stored.code, module.mreader_activation)


def stored_weights(module: Any) -> tuple[Tensor, Tensor]:
    """gate_up (E, 2, I, H) and down (E, I, H), the layout of the checkpoint."""
    gate_up, down = module.gate_up_proj, module.down_proj.mT
    if _is_transposed(module):
        gate_up, down = gate_up.mT, down.mT
    return gate_up.unflatten(1, (2, -1)), down
