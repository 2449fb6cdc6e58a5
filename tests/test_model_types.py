"""Every model type of the table, in the installed transformers: converted, restored, dense, sparse, and generating.

The sparse reader is held against a reference of its own, straight from docs/reader.md and SPEC.md: one token at a time,
in float64, from the tensors of the file. It shares no code with mreader.
"""

# E experts, K routed experts of a token, H hidden size, I channels of an expert, nb blocks of 128

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXPERTS, MODEL_TYPES, VOCABULARY, is_in_transformers, save_tiny
from commands import contents
from safetensors.torch import load_file
from sources import read_json
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.generation.streamers import BaseStreamer

import mreader
from mreader.captured import captured_generate, why_not_static
from mreader.formats.architectures import find_architecture, known_model_types
from mreader.formats.checkpoint import open_checkpoint
from mreader.inspection import inspect_checkpoint
from mreader.runtime import reader_mode, runtime_of, set_budget

TOKENS = torch.randint(1, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(0))
NEW_TOKENS = 16
OWN_CACHE = {"axk2", "deepseek_v32", "deepseek_v4", "glm5_next", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "minimax", "zaya"}


@dataclass(frozen=True)
class Case:
    """One type's tiny checkpoint, in the source's form, converted, and loaded in both, in float32."""

    name: str
    source: Path
    out: Path
    dense: PreTrainedModel
    reader: PreTrainedModel


# One of every layout and of every way to be different; the others are like one of these, and take minutes.
TELLING = {
    "aria",
    "olmoe",
    "mixtral",
    "qwen3_5_moe",
    "gemma4",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "qwen3_vl_moe",
    "lfm2_moe",
    "minimax",
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in TELLING else pytest.mark.slow) for name in MODEL_TYPES],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name = request.param
    if not is_in_transformers(name):
        pytest.skip("this transformers does not have it")
    folder = tmp_path_factory.mktemp("type")
    source, out = folder / "source", folder / "out"
    model = save_tiny(source, name)
    mreader.convert(source, out, device="cpu")
    dense = type(model).from_pretrained(source, dtype=torch.float32).eval()
    return Case(name, source, out, dense, mreader.load(out, dtype=torch.float32, device="cpu"))


@torch.inference_mode()
def logits(model: PreTrainedModel) -> Tensor:
    result: Tensor = thinker(model)(TOKENS, use_cache=False).logits
    return result


def thinker(model: PreTrainedModel) -> PreTrainedModel:
    """What makes text: the model, or the part of one that also speaks."""
    part: PreTrainedModel = getattr(model, "thinker", model)
    return part


def test_every_known_type_is_tried() -> None:
    assert {model_type for model_type, _ in MODEL_TYPES.values()} == set(known_model_types())


def test_every_layer_with_experts_is_converted(case: Case) -> None:
    modules = list(experts_modules(case.reader))
    layers = find_architecture(open_checkpoint(case.source)).layers
    assert len(layers) == len(modules) == runtime_of(case.reader).layers > 0
    assert all(layer.experts == EXPERTS for layer in layers)


def test_verified_against_the_source_and_inspected(case: Case) -> None:
    checked = mreader.verify(case.out, case.source)
    assert checked.layers_compared == runtime_of(case.reader).layers
    assert inspect_checkpoint(case.out).layers == checked.layers_compared


def test_restored_bit_for_bit(case: Case, tmp_path: Path) -> None:
    mreader.restore(case.out, tmp_path / "back")
    restored, source = contents(tmp_path / "back"), contents(case.source)
    assert {name: data for name, (_, data) in restored.items()} == {name: data for name, (_, data) in source.items()}


def test_dense_gives_the_source_s_logits(case: Case) -> None:
    """The same float32 products, possibly summed in another order: the down weights lie transposed."""
    torch.testing.assert_close(logits(case.reader), logits(case.dense), rtol=0, atol=1e-5)


def test_all_channels_give_the_dense_logits(case: Case) -> None:
    set_budget(case.reader, channels=1.0)
    with reader_mode(case.reader, "always"):
        torch.testing.assert_close(logits(case.reader), logits(case.dense), rtol=0, atol=1e-4)


def test_generates_the_source_s_tokens_with_all_channels(case: Case) -> None:
    set_budget(case.reader, channels=1.0)
    arguments: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens = thinker(case.reader).generate(TOKENS, **arguments)
    assert tokens.shape == (1, TOKENS.shape[1] + NEW_TOKENS)
    torch.testing.assert_close(tokens, thinker(case.dense).generate(TOKENS, **arguments), rtol=0, atol=0)


def test_steps_on_a_cache_of_fixed_size_give_the_same_tokens(case: Case) -> None:
    """What is captured in a graph on a GPU; and a type that keeps another cache says so."""
    model = thinker(case.reader)
    if why_not_static(model) is not None:
        assert case.name in OWN_CACHE
        return
    set_budget(case.reader, channels=0.5)
    arguments: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(TOKENS, **arguments)
    if model is case.reader:
        tokens = model.generate(TOKENS, custom_generate=captured_generate("decode", Silent()), **arguments)
        torch.testing.assert_close(tokens, expected, rtol=0, atol=0)


def test_a_quarter_of_the_channels_agrees_with_the_reference(case: Case) -> None:
    """Each layer on the inputs that it got, so that nothing adds up. Float32 against float64: 1e-4 of the output."""
    settings = set_budget(case.reader, channels=0.25)
    calls: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def keep(_: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((arguments, output))

    modules = list(experts_modules(case.reader))
    hooks = [module.register_forward_hook(keep) for module in modules]
    with reader_mode(case.reader, "always"):
        logits(case.reader)
    for hook in hooks:
        hook.remove()

    stored = [layer for _, layer in sorted(layers_of(case.out).items())]
    gating = gating_of(case.source)
    assert len(calls) == len(stored)
    for ((x, ids, weights), output), layer in zip(calls, stored, strict=True):
        for token in range(len(x)):
            expected = read_by_definition(x[token], ids[token], weights[token], layer, gating, settings.k)
            size = float(expected.abs().max())
            torch.testing.assert_close(output[token].double(), expected, rtol=0, atol=1e-4 * size)


class Silent(BaseStreamer):  # type: ignore[misc]
    """Nobody waits for these tokens."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def experts_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (module for module in model.modules() if hasattr(module, "sketch"))


def layers_of(out: Path) -> dict[int, dict[str, Tensor]]:
    """layer -> name below its experts' prefix -> tensor, in float64 but for codes and signs."""
    found: dict[int, dict[str, Tensor]] = {}
    every = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in every.items():
        prefix, _, part = name.rpartition(".")
        if f"{prefix}.sketch_codes" in every:
            number = int(next(word for word in reversed(prefix.split(".")) if word.isdigit()))
            found.setdefault(number, {})[part] = tensor.double() if tensor.is_floating_point() else tensor
    return found


Elementwise = Callable[[Tensor], Tensor]


def gating_of(source: Path) -> tuple[Elementwise, Elementwise]:
    """phi and psi of a source's experts: a_j = phi(g_j . x + its bias) psi(v_j . x + its bias)."""
    config = read_json(source / "config.json")
    limit = config.get("text_config", config).get("swiglu_limit", 7.0 if config["model_type"] == "gpt_oss" else None)
    if limit is None:
        return ACT2FN[find_architecture(open_checkpoint(source)).activation], lambda up: up
    alpha, shift = (1.702, 1) if config["model_type"] in ("gpt_oss", "minimax_m3_vl") else (1, 0)

    def phi(gate: Tensor) -> Tensor:
        least = torch.minimum(gate, torch.full_like(gate, limit))
        return least / (1 + torch.exp(-alpha * least))

    def psi(up: Tensor) -> Tensor:
        edge = torch.full_like(up, limit)
        return shift + torch.minimum(torch.maximum(up, -edge), edge)

    return phi, psi


def read_by_definition(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    layer: dict[str, Tensor],
    gating: tuple[Elementwise, Elementwise],
    k: int,
) -> Tensor:
    """x: (H,); ids, weights: (K,); returns (H,). Ternary codes, 80 coordinates a block, score `variance`."""
    x, weights = x.double(), weights.double()
    turned = rotate(x, layer["sketch_signs"])  # (nb, 128)
    seen = torch.zeros_like(turned)
    for block, values in enumerate(turned.tolist()):
        for coordinate in sorted(range(128), key=lambda c: -abs(values[c]))[:80]:
            seen[block, coordinate] = values[coordinate]
    inside, outside = seen.square().sum(1), (turned - seen).square().sum(1)

    scores, exact, guessed = [], [], []
    for expert, weight in zip(ids.tolist(), weights, strict=True):
        bias = layer["gate_up_proj_bias"][expert] if "gate_up_proj_bias" in layer else 0.0  # (2, I)
        scales = layer["sketch_scales"][expert]  # (2, nb, I)
        channels = scales.shape[-1]
        codes = unpack(layer["sketch_codes"][expert], channels).view(2, -1, 128, channels)
        gate, up = torch.einsum("mbci,mbi,bc->mi", codes, scales, seen) + bias
        gate_noise, up_noise = torch.einsum("mbi,b->mi", scales.square(), 0.127 * inside + 0.667 * outside)
        (phi, slope), (psi, up_slope) = with_slope(gating[0], gate), with_slope(gating[1], up)
        up_noise = up_slope**2 * up_noise
        variance = (slope * psi) ** 2 * gate_noise + phi**2 * up_noise + slope**2 * gate_noise * up_noise
        length, map = layer["down_norms"][expert], layer["recovery_coeffs"][expert]
        scores.append(weight**2 * ((phi * psi) ** 2 * (length**2 - map.square().sum(1)) + variance * length**2))
        true = layer["gate_up_proj"][expert] @ x + bias
        exact.append((weight * gating[0](true[0]) * gating[1](true[1])).unsqueeze(1) * layer["down_proj"][expert])
        guessed.append((weight * phi * psi).unsqueeze(1) * (map @ layer["recovery_basis"].T))

    score = torch.cat(scores)
    kept = torch.zeros(len(score), dtype=torch.bool)
    kept[torch.sort(score, descending=True, stable=True).indices[:k]] = True
    y = torch.where(kept.unsqueeze(1), torch.cat(exact), torch.cat(guessed)).sum(0)
    if "down_proj_bias" in layer:  # of every routed expert, whatever is kept
        y = y + weights @ layer["down_proj_bias"][ids]
    return y


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """(H,) -> (nb, 128): each block times the Hadamard matrix, entry by entry of its definition."""
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)]).double()
    padded = torch.zeros(-(-len(x) // 128) * 128).double()
    padded[: len(x)] = x * signs
    return padded.view(-1, 128) @ hadamard / math.sqrt(128)


def unpack(packed: Tensor, channels: int) -> Tensor:
    """Five ternary codes a byte, the first in the least significant digit."""
    digits = [(packed.int() // 3**place) % 3 - 1 for place in range(5)]
    return torch.stack(digits, -1).flatten(-2)[..., :channels].double()


def with_slope(activation: Elementwise, z: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        at = z.clone().requires_grad_()
        value = activation(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), slope
