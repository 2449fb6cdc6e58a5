"""Compiled layers give what the layers give. Without a GPU: traced, rewritten and run as torch operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYERS, VOCABULARY, is_in_transformers, save_tiny
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import mreader
from mreader import compiled, opaque
from mreader.captured import CapturedStep
from mreader.compiled import CompiledLayers, one_token_attention, why_not_compiled
from mreader.kernels import attention
from mreader.runtime import Mode, decoder_layers, set_budget

TOKENS = torch.randint(1, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(0))
# Type -> compilations: one for each kind of layer. With the prompt, 31 steps go past the sliding windows of 32.
KINDS = {
    "olmoe": 1,
    "mixtral": 1,
    "qwen3_moe": 2,
    "qwen3_5_moe": 2,
    "gemma4": 3,
    "deepseek_v3": 2,
    "granitemoe": 1,
    "granitemoehybrid": 2,
    "qwen3_vl_moe": 2,
    "lfm2_moe": 2,
}
STEPS = 31
# Compiling takes up to twenty seconds each: those not named here are among the slow tests.
FAST = ("mixtral", "granitemoe", "lfm2_moe")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreTrainedModel]:
    made: dict[str, Path] = {}

    def load(name: str) -> PreTrainedModel:
        if not is_in_transformers(name):
            pytest.skip("this transformers does not have it")
        if name not in made:
            folder = tmp_path_factory.mktemp("compiled")
            save_tiny(folder / "source", name)
            mreader.convert(folder / "source", folder / "out", device="cpu")
            made[name] = folder / "out"
        model = mreader.load(made[name], dtype="float32", device="cpu")
        set_budget(model, channels=0.5)
        return model

    return load


@pytest.fixture(autouse=True)
def _compilers_start_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but generating code, which takes a C++ compiler half a minute."""
    monkeypatch.setattr(compiled, "lower", lambda graph, inputs: graph)


def decode(step: CapturedStep, prompts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Greedy tokens (N, steps) and the logits (N, steps, V) that they are the largest of."""
    logits = [step.prefill(prompts).clone()]
    for _ in range(steps - 1):
        logits.append(step.step(logits[-1].argmax(-1, keepdim=True)).clone())
    every = torch.stack(logits, 1)
    return every.argmax(-1), every


def assert_the_same(model: PreTrainedModel, batch: int) -> None:
    """Float32 sums in another order, through all layers: 1e-5 of the largest logit."""
    tokens, logits = decode(CapturedStep(model, batch, 40, compiled=True, note=pytest.fail), TOKENS[:batch], STEPS)
    expected_tokens, expected = decode(CapturedStep(model, batch, 40), TOKENS[:batch], STEPS)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in KINDS])
def test_tokens_are_those_of_the_layers_as_they_are(
    name: str, load: Callable[[str], PreTrainedModel], traced: None
) -> None:
    model = load(name)
    for ordinal, batch in enumerate((1, 3), start=1):
        assert_the_same(model, batch)
        assert counters["stats"]["unique_graphs"] == ordinal * KINDS[name], "layers of a kind share a compilation"
    assert not counters["graph_break"]


@pytest.mark.slow
def test_generated_code_gives_the_same_tokens(load: Callable[[str], PreTrainedModel]) -> None:
    if reason := why_not_compiled(torch.device("cpu")):
        pytest.skip(reason)
    assert_the_same(load("qwen3_moe"), 3)


@pytest.mark.parametrize(
    ("name", "mode", "few", "chooses"),
    [
        ("mixtral", "decode", 1 << 20, "experts_by_gate"),
        ("granitemoe", "decode", 1 << 20, "experts_by_logits"),
        ("mixtral", "decode", 0, "experts_by_logits"),
        ("mixtral", "never", 1 << 20, "experts_forward"),
    ],
)
def test_experts_that_kernels_choose_are_the_router_s(
    name: str,
    mode: Mode,
    few: int,
    chooses: str,
    load: Callable[[str], PreTrainedModel],
    traced: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU up to the kernels; a dense step is compiled by itself, with the router as it is."""
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Tensor]:
        experts = getattr(opaque, name)
        return lambda *args: (calls.append(name), experts(*args))[1]

    for each in ("experts_by_gate", "experts_by_logits", "experts_forward"):
        monkeypatch.setattr(opaque, each, counted(each))
    monkeypatch.setattr("mreader.captured.runs_kernels", lambda device: True)
    monkeypatch.setattr("mreader.routers.chooses_experts", lambda module, x, routed: True)
    monkeypatch.setattr("mreader.routers._FEW_PRODUCTS", few)
    model = load(name)
    CapturedStep(model, 3, 40, "never" if mode == "decode" else "decode", compiled=True, note=pytest.fail)
    steps = [CapturedStep(model, 3, 40, mode, compiled=compiled, note=pytest.fail) for compiled in (True, False)]
    calls.clear()
    (tokens, logits), (expected_tokens, expected) = (decode(step, TOKENS, STEPS) for step in steps)
    assert calls == [chooses] * len(decoder_layers(model)) * (STEPS - 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(tokens, expected_tokens)


def test_every_mode_decides_by_itself_what_kernels_choose(
    load: Callable[[str], PreTrainedModel], traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a batch at which "decode" is dense, whichever was compiled first."""
    calls: list[str] = []
    for name in ("experts_by_gate", "experts_forward"):
        monkeypatch.setattr(opaque, name, lambda module, x, *rest, name=name: (calls.append(name), x.clone())[1])
    monkeypatch.setattr("mreader.captured.runs_kernels", lambda device: True)
    monkeypatch.setattr("mreader.routers.chooses_experts", lambda module, *_: module.mreader.mode == "always")
    model = load("mixtral")
    modes: list[Mode] = ["always", "decode", "always"]
    for mode in modes:
        step = CapturedStep(model, 3, 40, mode, compiled=True, note=pytest.fail)
        step.prefill(TOKENS)
        calls.clear()
        step.step(TOKENS[:, :1])
        assert set(calls) == {"experts_by_gate" if mode == "always" else "experts_forward"}


def test_the_next_step_of_that_batch_is_not_compiled_again(
    load: Callable[[str], PreTrainedModel], traced: None
) -> None:
    model = load("olmoe")
    steps = [
        CapturedStep(model, 2, length, mode, compiled=True) for length in (20, 250) for mode in ("decode", "never")
    ]
    assert counters["stats"]["unique_graphs"] == 1, "neither the mode nor a length up to 256 makes a difference"
    assert len({id(step.cache) for step in steps}) == 4


def test_the_model_stays_as_it_is(load: Callable[[str], PreTrainedModel], traced: None) -> None:
    model = load("olmoe")
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    decode(CapturedStep(model, 1, 20, compiled=True), TOKENS[:1], 3)
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()} == before
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(model))
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_another_thread_gets_the_layers_as_they_are(load: Callable[[str], PreTrainedModel], traced: None) -> None:
    model = load("olmoe")
    expected = model(TOKENS).logits
    layers = CompiledLayers(model, CapturedStep(model, 3, 20).cache, choosing=None)
    found: list[Tensor] = []

    def forward() -> None:
        with torch.inference_mode():
            found.append(model(TOKENS).logits)

    with layers.in_force():
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
    assert not counters["stats"]["unique_graphs"]


def test_only_decode_steps_are_compiled(
    load: Callable[[str], PreTrainedModel], traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    experts = opaque.experts_forward
    monkeypatch.setattr(
        opaque, "experts_forward", lambda module, x, *rest: (calls.append(len(x)), experts(module, x, *rest))[1]
    )
    step = CapturedStep(load("olmoe"), 2, 12, compiled=True)
    calls.clear()
    step.prefill(TOKENS[:2])
    assert not calls
    step.step(TOKENS[:2, :1])
    assert calls == [2] * LAYERS


class TestWithoutACompiler:
    """The step decodes all the same, and a note says why it is slower."""

    def _decodes_with(self, model: PreTrainedModel, note: str) -> None:
        notes: list[str] = []
        step = CapturedStep(model, 1, 20, compiled=True, note=notes.append)
        assert notes == [f"decoding with layers that are not compiled, so more slowly: {note}"]
        tokens, _ = decode(step, TOKENS[:1], 5)
        assert torch.equal(tokens, decode(CapturedStep(model, 1, 20), TOKENS[:1], 5)[0])

    def test_that_is_not_there(
        self, load: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        self._decodes_with(load("olmoe"), "there is no g++")

    def test_that_fails(self, load: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(graph: object, inputs: object) -> Any:
            raise RuntimeError("out of registers")

        monkeypatch.setattr(compiled, "lower", fail)
        self._decodes_with(
            load("olmoe"), "torch.compile failed: backend='_backend' raised: RuntimeError: out of registers"
        )

    def test_that_is_switched_off(
        self, load: Callable[[str], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
        self._decodes_with(load("olmoe"), "TORCHDYNAMO_DISABLE is set")


class Heads:
    """What transformers' attention reads of a module."""

    is_causal, training = True, False

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("mask", ["bool", "addend", None])
def test_attention_of_one_token_is_sdpa_s(mask: str | None, by_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 heads on 2 key heads, values narrower than keys. Float32: 1e-5."""
    if by_kernel:
        monkeypatch.setattr(compiled, "_has_kernel", lambda *_: True)
        monkeypatch.setattr(compiled, "attend", attention.attend)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 20), torch.randn(3, 2, 11, 20), torch.randn(3, 2, 11, 12)
    seen = torch.arange(11).view(1, 1, 1, 11) < 7
    masks = {"bool": seen, "addend": torch.where(seen, 0.0, torch.finfo().min), None: None}
    expected, _ = sdpa_attention_forward(Heads(3), query, key, value, masks[mask], scaling=0.3)
    found, _ = one_token_attention(Heads(3), query, key, value, masks[mask], scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "mask", "dtype", "taken"),
    [
        ((1, 32, 128, 1024), (1, 1, 1, 1024), torch.bfloat16, True),
        ((4, 32, 128, 256), (4, 1, 1, 256), torch.float16, True),
        ((1, 32, 128, 1024), None, torch.float32, True),
        ((1, 32, 128, 1025), None, torch.bfloat16, False),
        ((5, 32, 128, 256), None, torch.bfloat16, False),
        ((1, 32, 128, 256), None, torch.float64, False),
        ((1, 32, 128, 256), (1, 32, 1, 256), torch.bfloat16, False),
        ((1, 32, 128, 256), (1, 1, 1, 300), torch.bfloat16, False),
    ],
)
def test_which_attention_has_a_kernel(
    sizes: tuple[int, int, int, int], mask: tuple[int, ...] | None, dtype: torch.dtype, taken: bool
) -> None:
    N, h, D, L = sizes
    with FakeTensorMode():
        for device, expected in (("cuda:0", taken), ("cpu", False)):
            query, key = (torch.empty(N, *size, dtype=dtype, device=device) for size in ((h, 1, D), (4, L, D)))
            seen = None if mask is None else torch.empty(mask, dtype=torch.bool, device=device)
            assert compiled._has_kernel(query, key, seen) == expected


def test_operations_say_what_they_return() -> None:
    """To the compiler, which does not look into them."""
    with FakeTensorMode():
        query, key, value = torch.empty(3, 6, 20), torch.empty(3, 2, 11, 20), torch.empty(3, 2, 11, 12)
        assert opaque.attend(query, key, value, None, 1.0).shape == (3, 6, 12)
        x, weight = torch.empty(1, 1, 7, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)
        y = opaque.product(x, weight, None)
        assert (y.shape, y.dtype) == ((1, 1, 5), torch.bfloat16)


@pytest.mark.gpu
# torch.compile's, of float32 products, and of a softmax in parts.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled")
@pytest.mark.parametrize("name", ["olmoe", "qwen3_5_moe", "gemma4"])
@pytest.mark.parametrize("mode", ["decode", "never"])
def test_a_graph_of_compiled_layers_gives_the_same_tokens(
    name: str, mode: Mode, load: Callable[[str], PreTrainedModel]
) -> None:
    """Float32, products of 192 terms in another order: 1e-4 of the largest logit, as kernels differ more than CPUs.

    Of some hundred sparse tokens a few differ by a percent or so: rounding takes a channel over the border, and later
    tokens of that sequence see it in the cache.
    """
    model, prompts = load(name).to("cuda"), TOKENS.cuda()
    steps = [CapturedStep(model, 3, 40, mode, compiled=compiled, note=pytest.fail) for compiled in (True, False)]
    (tokens, logits), (expected_tokens, expected) = (decode(step, prompts, STEPS) for step in steps)
    error = (logits - expected).abs().amax(-1) / expected.abs().max()
    assert (error > 1e-4).float().mean() <= {"never": 0, "decode": 0.5}[mode]
    assert error.max() < 0.05
    assert torch.equal(tokens, expected_tokens)
