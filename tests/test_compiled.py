"""Compiled layers give what the layers give. Without a GPU: traced, rewritten and run as torch operations."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import LAYERS, VOCABULARY, is_in_transformers, save_tiny
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import mreader
from mreader import compiled
from mreader.captured import CapturedStep
from mreader.compiled import CompiledLayers, one_token_attention, why_not_compiled
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
    monkeypatch.setattr(compiled, "_lower", lambda graph, inputs: graph)


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
    layers = CompiledLayers(model, CapturedStep(model, 3, 20).cache)
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
    experts = compiled.experts_forward
    monkeypatch.setattr(
        compiled, "experts_forward", lambda module, x, *rest: (calls.append(len(x)), experts(module, x, *rest))[1]
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

        monkeypatch.setattr(compiled, "_lower", fail)
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


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("mask", ["bool", "addend", None])
def test_attention_of_one_token_is_sdpa_s(mask: str | None, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores by sums and by matrix products; 6 heads on 2 key heads, values narrower than keys. Float32: 1e-5."""
    monkeypatch.setattr(compiled, "_FEW_SCORES", 3 * 6 * 11 * 20 if few else 0)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 20), torch.randn(3, 2, 11, 20), torch.randn(3, 2, 11, 12)
    seen = torch.arange(11).view(1, 1, 1, 11) < 7
    masks = {"bool": seen, "addend": torch.where(seen, 0.0, torch.finfo().min), None: None}
    expected, _ = sdpa_attention_forward(Heads(3), query, key, value, masks[mask], scaling=0.3)
    found, _ = one_token_attention(Heads(3), query, key, value, masks[mask], scaling=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("few", [True, False])
def test_the_largest_are_topk_s(few: bool, dim: int, largest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one and, where there are many numbers, by sorting; groups that are out of the running hold infinities."""
    monkeypatch.setattr(compiled, "_FEW_NUMBERS", 11 if few else 6)
    x = torch.randperm(77).view(7, 11) - 38.0
    x[2] = float("-inf")
    x[2, 4], x[2, 9] = 1.0, -2.0
    for found, expected in zip(compiled._topk(x, 2, dim, largest), x.topk(2, dim, largest), strict=True):
        assert found.dtype == expected.dtype
        if dim == 0 or largest:  # else equals decide, of which topk names any
            assert torch.equal(found, expected)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


@pytest.mark.parametrize("k", [0, 1, 16, 17, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_are_topk_s_in_every_dtype(dtype: torch.dtype, k: int) -> None:
    """None, few and many of a row; numbers that float32 cannot tell apart where the dtype can."""
    x = torch.randperm(3 * 40, generator=torch.Generator().manual_seed(0)).view(3, 40).to(dtype)
    if dtype in (torch.float64, torch.int64):
        x += 2**40
    values, indices = compiled._topk(x, k)
    expected = x.topk(k)
    assert values.dtype == dtype
    assert torch.equal(values, expected.values)
    assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("k", [3, 16])
def test_more_than_there_are_is_refused_as_by_topk(k: int) -> None:
    with pytest.raises(RuntimeError):
        compiled._topk(torch.zeros(2, 2), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [True, False])
def test_of_equal_numbers_the_first_are_chosen(largest: bool, dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.0, 5.0, 0.0, 5.0, 5.0]], dtype=dtype) * (1 if largest else -1)
    values, indices = compiled._topk(x, 5, -1, largest)
    assert indices.tolist() == [[1, 3, 4, 0, 2]]
    assert torch.equal(values, x[0, indices])


def test_places_of_what_is_no_number_are_places() -> None:
    """The largest: a router's choice stays one, whatever a token holds."""
    x = torch.tensor(
        [[1.0, math.nan, 3.0, math.inf, math.nan], [math.nan] * 5, [-math.inf, math.nan, -math.inf, 0.0, 0.0]]
    )
    x[0, 1] = -x[0, 1]  # the sign of what is no number is none
    values, indices = compiled._topk(x, 3)
    assert indices.tolist() == [[1, 4, 3], [0, 1, 2], [1, 3, 4]]
    torch.testing.assert_close(values, x.gather(-1, indices), rtol=0, atol=0, equal_nan=True)
    values, indices = compiled._topk(x, 3, largest=False)
    assert indices.tolist() == [[0, 2, 3], [0, 1, 2], [0, 2, 3]]
    torch.testing.assert_close(values, x.gather(-1, indices), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bias", [torch.arange(5.0), None])
def test_a_product_by_sums_is_linear_s(bias: Tensor | None) -> None:
    """Of float32 products of bfloat16 numbers, rounded once: half a unit in the last place, 2^-8."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 2, 33), (5, 33)))
    found = compiled._linear(x, weight, bias if bias is None else bias.bfloat16())
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias if bias is None else bias.double())
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


class Router(torch.nn.Module):
    """A product of 4 x 6 x 10 and one of 4 x 6 x 11."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.wide = torch.nn.Linear(6, 10), torch.nn.Linear(6, 11)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.router(x).topk(3), self.wide(x)


def test_what_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products up to the bound, and every topk."""
    monkeypatch.setattr(compiled, "_FEW_PRODUCTS", 4 * 6 * 10)
    targets: list[Any] = []
    model, x = Router(), torch.randn(4, 6)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        targets.extend(node.target for node in compiled._rewrite(graph).graph.nodes)
        return graph

    found, expected = torch.compile(model, backend=backend)(x), model(x)
    assert targets.count(compiled._linear) == targets.count(torch.nn.functional.linear) == 1
    assert targets.count(compiled._topk) == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


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
