"""A captured step decodes what transformers decodes; without a GPU the same step runs as plain forwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import ARCHITECTURES, LAYERS, VOCABULARY, save_tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import mreader
from mreader import experts, runtime
from mreader.captured import CapturedStep, CustomGenerate, captured_generate, why_not_static
from mreader.errors import UnsupportedError, UsageError
from mreader.generate import Sampling, _decoding_loop, encode_prompt, generate
from mreader.runtime import set_budget

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
# With the prompt more than the sliding window of 32 that some of the models have.
LONG = {"max_new_tokens": 28, "min_new_tokens": 28, "do_sample": False}
# On a GPU the experts of gpt_oss are torch's, and its steps are not captured.
CAPTURED_ON_A_GPU = [name for name in ARCHITECTURES if name != "gpt_oss"]
# What waits for the device, or copies from the host's memory: neither can be captured.
NOT_CAPTURED = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.lift_fresh,
}


class Tokens:
    """A streamer that keeps what comes."""

    def __init__(self) -> None:
        self.came: list[torch.Tensor] = []
        self.ended = False

    def put(self, tokens: torch.Tensor) -> None:
        assert not self.ended
        self.came.append(tokens)

    def end(self) -> None:
        self.ended = True


class OnTheDevice(TorchDispatchMode):
    """Fails where an operation needs the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in NOT_CAPTURED, func
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """architecture -> (source folder, augmented folder), made when first asked for."""
    made: dict[str, tuple[Path, Path]] = {}

    def convert(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("captured")
            save_tiny(folder / "source", name)
            mreader.convert(folder / "source", folder / "out", device="cpu")
            made[name] = folder / "source", folder / "out"
        return made[name]

    return convert


@pytest.fixture
def olmoe(converted: Callable[[str], tuple[Path, Path]]) -> PreTrainedModel:
    return _load(converted("olmoe")[1])


def _load(path: Path, device: str = "cpu") -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(device)
    if hasattr(model, "mreader"):
        set_budget(model, channels=0.5)
    return model


def _generate(model: PreTrainedModel, ids: torch.Tensor, mode: runtime.Mode = "decode", **arguments: Any) -> Any:
    """Tokens of the captured loop, and the streamer."""
    streamer = Tokens()
    ids = ids.to(model.device)
    loop = captured_generate(mode, streamer)
    return model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=loop, **arguments), streamer


def _stock(model: PreTrainedModel, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    ids = ids.to(model.device)
    tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    return tokens


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_are_those_of_generate(name: str, converted: Callable[[str], tuple[Path, Path]]) -> None:
    model = _load(converted(name)[1])
    assert why_not_static(model) is None
    tokens, streamer = _generate(model, TOKENS, **LONG)
    assert torch.equal(tokens, _stock(model, TOKENS, **LONG))
    assert torch.equal(torch.stack(streamer.came, 1), tokens[:, TOKENS.shape[1] :])
    assert streamer.ended


@pytest.mark.parametrize("name", CAPTURED_ON_A_GPU)
def test_a_step_asks_the_device_for_nothing(
    name: str, converted: Callable[[str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _load(converted(name)[1])
    # Not the routed experts: on a GPU those are kernels, with their own tests.
    monkeypatch.setattr(experts, "_sparse", lambda module, x, ids, weights: x / 2)
    model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=2)  # may leave state in the model
    step = CapturedStep(model, 2, 40)
    step.prefill(TOKENS)
    with OnTheDevice():
        for _ in range(31):
            step.step(TOKENS[:, :1])


def test_prompts_are_dense_and_steps_sparse(olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a prompt of one token, on a cache that was in use."""
    seen: list[int] = []
    read = experts.read
    monkeypatch.setattr(experts, "read", lambda x, *rest: (seen.append(len(x)), read(x, *rest))[1])
    step = CapturedStep(olmoe, 2, 12)
    for prompt in (TOKENS, TOKENS[:, :1]):
        step.prefill(prompt)
        assert not seen
        step.step(TOKENS[:, :1])
        assert seen == [2] * LAYERS
        seen.clear()


def test_dense_steps_are_the_source_s(olmoe: PreTrainedModel, converted: Callable[[str], tuple[Path, Path]]) -> None:
    source = _load(converted("olmoe")[0])
    tokens, _ = _generate(olmoe, TOKENS, "never", **LONG)
    assert torch.equal(tokens, _stock(source, TOKENS, **LONG))


def test_a_prefill_starts_all_over(olmoe: PreTrainedModel) -> None:
    step, fresh = CapturedStep(olmoe, 2, 20), CapturedStep(olmoe, 2, 20)
    step.prefill(TOKENS.flip(1))
    step.step(TOKENS[:, 2:3])
    for each in (step, fresh):
        each.prefill(TOKENS)
    for column in (0, 3):
        token = TOKENS[:, column : column + 1]
        torch.testing.assert_close(step.step(token), fresh.step(token), rtol=0, atol=0)


def test_a_step_of_another_form_is_refused(olmoe: PreTrainedModel) -> None:
    step = CapturedStep(olmoe, 2, 10)
    with pytest.raises(UsageError, match="without a prompt"):
        step.step(TOKENS[:, :1])
    logits = step.prefill(TOKENS[:, :4])
    with pytest.raises(UsageError, match="1 sequences for a step made for 2"):
        step.step(TOKENS[:1, :1])
    with pytest.raises(UsageError, match=r"tokens of shape \(2, 2\)"):
        step.step(TOKENS[:, :2])
    with pytest.raises(UsageError, match="3 sequences"):
        step.prefill(TOKENS[:1].expand(3, -1))
    with pytest.raises(UsageError, match="do not fit"):
        step.prefill(TOKENS[:, :1].expand(-1, 11))
    assert step.step(TOKENS[:, 4:5]).shape == logits.shape, "what was refused has changed nothing"


def test_what_does_not_fit_is_refused(olmoe: PreTrainedModel) -> None:
    step = CapturedStep(olmoe, 2, 10)
    with pytest.raises(UsageError, match="11 tokens do not fit a step made for 10"):
        step.prefill(torch.ones(2, 11, dtype=torch.int64))
    step.prefill(TOKENS)
    step.step(TOKENS[:, :1])
    with pytest.raises(UsageError, match="11 tokens"):
        step.step(TOKENS[:, :1])


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 7}])
def test_draws_with_a_seed_are_those_of_generate(sampling: dict[str, Any], olmoe: PreTrainedModel) -> None:
    arguments = {**sampling, "do_sample": True, "max_new_tokens": 12, "min_new_tokens": 12}
    torch.manual_seed(3)
    expected = _stock(olmoe, TOKENS, **arguments)
    torch.manual_seed(3)
    assert torch.equal(_generate(olmoe, TOKENS, **arguments)[0], expected)


def test_it_ends_where_every_sequence_ended(olmoe: PreTrainedModel) -> None:
    """What ended early is padded, as transformers does it."""
    free = _stock(olmoe, TOKENS, **LONG)[:, TOKENS.shape[1] :]
    ends = [int(free[0, 3]), int(free[1, 6])]
    arguments = {"max_new_tokens": 28, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    expected = _stock(olmoe, TOKENS, **arguments)
    assert expected.shape[1] < TOKENS.shape[1] + 28
    assert torch.equal(_generate(olmoe, TOKENS, **arguments)[0], expected)


class TestModelsThatCannot:
    """They are known by a property, and the caller decides."""

    def _refused(self, model: PreTrainedModel, reason: str) -> None:
        assert reason in str(why_not_static(model))
        with pytest.raises(UnsupportedError, match=reason):
            CapturedStep(model, 1, 8)

    def test_attention_that_needs_the_host(self, olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(olmoe.config, "_attn_implementation_internal", "flash_attention_2")
        self._refused(olmoe, "its attention is flash_attention_2")

    def test_frequencies_that_follow_the_length(self, olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(olmoe.config, "rope_parameters", {"rope_type": "dynamic", "factor": 2.0})
        self._refused(olmoe, "its dynamic rotary embedding")

    def test_a_cache_that_grows(self, olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        grows = DynamicCache(config=olmoe.config).layers
        monkeypatch.setattr("mreader.captured._static_layers", lambda *_: grows)
        self._refused(olmoe, "its cache has DynamicLayer")

    def test_a_model_on_several_devices(self, olmoe: PreTrainedModel) -> None:
        olmoe.lm_head.to("meta")
        self._refused(olmoe, "it is spread over cpu, meta")


class TestGenerate:
    """mreader.generate over a captured step: as on a GPU, here without one."""

    def test_text_and_pieces_are_the_same(self, olmoe_augmented: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def captured(
            model: PreTrainedModel, mode: runtime.Mode, streamer: BaseStreamer, compiled: bool, note: object
        ) -> CustomGenerate:
            return captured_generate(mode, streamer)

        tokenizer = AutoTokenizer.from_pretrained(olmoe_augmented)
        # float32: attention over a longer cache is summed in another order, and a draw in BF16 would show it
        model = mreader.load(olmoe_augmented, dtype="float32", device="cpu")
        ids = encode_prompt(tokenizer, "def read(path):\n", chat=False)
        for sampling in (Sampling(16), Sampling(16, temperature=0.8, top_p=0.9, seed=5)):
            pieces: list[str] = []
            expected = generate(model, tokenizer, ids, sampling)
            with monkeypatch.context() as patch:
                patch.setattr("mreader.generate._decoding_loop", captured)
                found = generate(model, tokenizer, ids, sampling, emit=pieces.append)
            assert (found.text, found.tokens) == (expected.text, expected.tokens)
            assert "".join(pieces) == found.text
            assert len(pieces) > 1

    def test_a_note_says_why_a_model_on_a_gpu_decodes_without_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model: Any = SimpleNamespace(device=torch.device("cuda"))
        notes: list[str] = []
        for reason, captured in ((None, True), ("its cache grows", False)):
            monkeypatch.setattr("mreader.generate.why_not_static", lambda _, reason=reason: reason)
            assert (_decoding_loop(model, "decode", Tokens(), True, notes.append) is not None) == captured
        assert notes == ["decoding without a CUDA graph, so more slowly: its cache grows"]


@pytest.mark.gpu
class TestOnAGpu:
    """The graph replays what the same step does without one."""

    @pytest.mark.parametrize("name", CAPTURED_ON_A_GPU)
    @pytest.mark.parametrize("mode", ["decode", "never"])
    def test_a_graph_gives_the_tokens_of_plain_steps(
        self,
        name: str,
        mode: runtime.Mode,
        converted: Callable[[str], tuple[Path, Path]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        model = _load(converted(name)[1], "cuda")
        found, _ = _generate(model, TOKENS, mode, **LONG)
        monkeypatch.setattr(CapturedStep, "_capture", lambda step: step._decode)
        expected, _ = _generate(model, TOKENS, mode, **LONG)
        assert torch.equal(found, expected)

    @pytest.mark.parametrize("name", CAPTURED_ON_A_GPU)
    def test_dense_tokens_are_the_source_s(self, name: str, converted: Callable[[str], tuple[Path, Path]]) -> None:
        source, out = converted(name)
        found, _ = _generate(_load(out, "cuda"), TOKENS, "never", **LONG)
        assert torch.equal(found, _stock(_load(source, "cuda"), TOKENS, **LONG))

    def test_a_prompt_after_another(self, converted: Callable[[str], tuple[Path, Path]]) -> None:
        """The graph keeps reading the cache that the second prompt filled."""
        model = _load(converted("qwen3_5_moe_text")[1], "cuda")
        prompt, token = TOKENS.cuda(), TOKENS[:, :1].cuda()
        step, fresh = CapturedStep(model, 2, 20), CapturedStep(model, 2, 20)
        step.prefill(prompt.flip(1))
        step.step(token)
        for each in (step, fresh):
            each.prefill(prompt)
        torch.testing.assert_close(step.step(token), fresh.step(token), rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_trained_model_keeps_its_text(self, dtype: str, olmoe_augmented: Path) -> None:
        """With all channels, the sparse block is the dense one: the same greedy tokens in float32."""
        tokenizer = AutoTokenizer.from_pretrained(olmoe_augmented)
        model = mreader.load(olmoe_augmented, dtype=dtype, device="cuda")
        ids = encode_prompt(tokenizer, "def read(path):\n", chat=False)
        set_budget(model, channels=1.0)
        sparse, dense = (generate(model, tokenizer, ids, Sampling(32), mode=mode) for mode in ("decode", "never"))
        assert sparse.tokens > 1
        if dtype == "float32":
            assert sparse.text == dense.text
