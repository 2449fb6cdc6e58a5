"""Augmented checkpoints in transformers: loaded by the stock classes, dense in prefill, sparse in decode steps."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, CHANNELS, EXPERTS, HIDDEN, LAYERS, ROUTED, VOCABULARY, save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import mreader
from mreader import experts
from mreader.errors import SourceError, UnsupportedError, UsageError
from mreader.experts import experts_forward
from mreader.runtime import reader_budget, reader_mode, runtime_of, set_budget

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """architecture -> (source folder, augmented folder), made when first asked for."""

    class Made(dict[str, tuple[Path, Path]]):
        def __missing__(self, name: str) -> tuple[Path, Path]:
            folder = tmp_path_factory.mktemp(name)
            save_tiny(folder / "source", name)
            mreader.convert(folder / "source", folder / "out")
            self[name] = folder / "source", folder / "out"
            return self[name]

    return Made()


@pytest.fixture
def olmoe(converted: dict[str, tuple[Path, Path]]) -> PreTrainedModel:
    return _load(converted["olmoe"][1])


@pytest.fixture
def damaged(converted: dict[str, tuple[Path, Path]], tmp_path: Path) -> Path:
    """A copy of an augmented checkpoint, to be spoilt."""
    shutil.copytree(converted["olmoe"][1], tmp_path / "out")
    return tmp_path / "out"


def _load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return model


def _logits(model: PreTrainedModel, ids: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_its_source_s_logits(name: str, converted: dict[str, tuple[Path, Path]]) -> None:
    source, out = converted[name]
    expected, model = _logits(_load(source)), _load(out)
    # the same float32 products, possibly summed in another order: the down weights lie transposed
    torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-5)
    set_budget(model, channels=1.0)
    with reader_mode(model, "always"):
        torch.testing.assert_close(_logits(model), expected, rtol=0, atol=1e-4)
    set_budget(model, channels=0.25)
    with reader_mode(model, "always"):
        sparse = _logits(model)
    assert torch.isfinite(sparse).all()
    assert (sparse - expected).abs().max() > 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_generates_its_source_s_tokens_with_all_channels(
    name: str, converted: dict[str, tuple[Path, Path]]
) -> None:
    source, out = converted[name]
    model = _load(out)
    set_budget(model, channels=1.0)
    arguments = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    torch.testing.assert_close(
        model.generate(TOKENS[:1], **arguments), _load(source).generate(TOKENS[:1], **arguments), rtol=0, atol=0
    )


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_dense_implementation_runs_on_the_stored_weights(
    implementation: str, olmoe: PreTrainedModel, converted: dict[str, tuple[Path, Path]]
) -> None:
    expected = _logits(_load(converted["olmoe"][0]))
    olmoe.set_experts_implementation(implementation)
    torch.testing.assert_close(_logits(olmoe), expected, rtol=0, atol=1e-5)


def test_only_decode_steps_are_sparse(olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = experts.read
    monkeypatch.setattr(experts, "read", lambda x, *rest: (seen.append(len(x)), read(x, *rest))[1])
    olmoe.generate(TOKENS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    # the first token comes from the prefill, the other three from a step of both sequences in every layer
    assert seen == [2] * 3 * LAYERS


def test_a_prompt_of_one_token_is_a_prefill(olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "read", lambda *_: pytest.fail("sparse"))
    with torch.inference_mode():
        olmoe(TOKENS[:, :1], use_cache=True)
        olmoe(TOKENS[:, :1], use_cache=False)
    olmoe.generate(TOKENS[:1, :1], max_new_tokens=1, do_sample=False)


def test_a_decode_step_reads_what_the_reader_says(olmoe: PreTrainedModel) -> None:
    """One step on a cache gives the logits of a forward in which only the last token went through the reader."""
    set_budget(olmoe, channels=0.25)
    with torch.inference_mode():
        cache = olmoe(TOKENS[:, :-1], use_cache=True).past_key_values
        step = olmoe(TOKENS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
        cache = olmoe(TOKENS[:, :-1], use_cache=True).past_key_values
        with reader_mode(olmoe, "always"):
            expected = olmoe(TOKENS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
    torch.testing.assert_close(step, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "imports",
    [
        "import mreader; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import mreader",
        "import transformers; import mreader; from transformers import AutoModelForCausalLM",
        "import transformers.quantizers.auto; import mreader; from transformers import AutoModelForCausalLM",
        "import mreader.runtime; from transformers import AutoModelForCausalLM",
    ],
)
def test_the_order_of_imports_does_not_matter(imports: str, converted: dict[str, tuple[Path, Path]]) -> None:
    code = f"{imports}; print(AutoModelForCausalLM.from_pretrained({str(converted['olmoe'][1])!r}).mreader.settings.k)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{round(0.122 * ROUTED * CHANNELS)}\n", done.stderr


def test_importing_it_does_not_import_transformers() -> None:
    code = "import sys, mreader, mreader.cli.main; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_reader_mode_is_put_back(olmoe: PreTrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), reader_mode(olmoe, "always"):
        raise ZeroDivisionError
    assert runtime_of(olmoe).mode == "decode"


def test_a_failed_step_does_not_leave_the_model_decoding(olmoe: PreTrainedModel) -> None:
    with torch.inference_mode():
        cache = olmoe(TOKENS, use_cache=True).past_key_values
        with pytest.raises(IndexError):
            olmoe(torch.tensor([[VOCABULARY + 1]] * 2), past_key_values=cache)
    assert not runtime_of(olmoe).decoding


def test_an_expert_that_is_elsewhere_contributes_nothing(olmoe: PreTrainedModel) -> None:
    module = olmoe.model.layers[0].mlp.experts
    x, weights = torch.randn(4, HIDDEN), torch.rand(4, ROUTED)
    ids = torch.randint(0, EXPERTS, (4, ROUTED))
    with reader_mode(olmoe, "always"):
        missing = experts_forward(module, x, ids.index_fill(1, torch.tensor([1]), EXPERTS), weights)
        without = experts_forward(module, x, ids, weights.index_fill(1, torch.tensor([1]), 0.0))
    torch.testing.assert_close(missing, without, rtol=1e-5, atol=1e-6)


def test_a_cast_moves_the_weights_and_not_the_sketch(olmoe: PreTrainedModel) -> None:
    stored = {name: tensor.clone() for name, tensor in olmoe.model.layers[0].mlp.experts.sketch.named_buffers()}
    olmoe.to(torch.bfloat16)
    experts = olmoe.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == torch.bfloat16
    for name, tensor in experts.sketch.named_buffers():
        assert tensor.dtype == stored[name].dtype
        torch.testing.assert_close(tensor, stored[name], rtol=0, atol=0)
    assert torch.isfinite(olmoe.generate(TOKENS[:1], max_new_tokens=3)).all()


@pytest.mark.parametrize("name", ["olmoe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_asked_for_is_the_dtype_of_every_weight(
    name: str, dtype: torch.dtype, converted: dict[str, tuple[Path, Path]]
) -> None:
    model = _load(converted[name][1], dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.layers[0].mlp.experts.sketch.sketch_scales.dtype == torch.float16


def test_load_takes_a_folder_and_puts_it_on_a_device(converted: dict[str, tuple[Path, Path]]) -> None:
    source, out = converted["olmoe"]
    model = mreader.load(out, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(_logits(model), _logits(_load(source)), rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match="not an augmented checkpoint"):
        mreader.load(source)


def test_an_augmented_model_is_not_saved_by_transformers(olmoe: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable"):
        olmoe.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved" / "model.safetensors").exists()


class TestBudget:
    """set_budget: what is given changes, what is not stays."""

    def test_defaults_come_from_the_config(self, olmoe: PreTrainedModel) -> None:
        settings = runtime_of(olmoe).settings
        assert (settings.coordinates, settings.score, settings.rank) == (80, "variance", 32)
        assert settings.k == round(0.122 * runtime_of(olmoe).shape.candidates)

    def test_channels(self, olmoe: PreTrainedModel) -> None:
        assert set_budget(olmoe, channels=0.5).k == round(0.5 * runtime_of(olmoe).shape.candidates)

    def test_reads_are_never_exceeded(self, olmoe: PreTrainedModel) -> None:
        settings = set_budget(olmoe, reads=0.4)
        assert runtime_of(olmoe).reads.total <= 0.4
        set_budget(olmoe, channels=(settings.k + 1) / runtime_of(olmoe).shape.candidates)
        assert runtime_of(olmoe).reads.total > 0.4

    def test_reads_are_kept_when_coordinates_change(self, olmoe: PreTrainedModel) -> None:
        with_80 = set_budget(olmoe, reads=0.4)
        with_128 = set_budget(olmoe, coordinates=128)
        assert with_128.k < with_80.k
        assert runtime_of(olmoe).reads.total <= 0.4

    @pytest.mark.parametrize(
        ("budget", "message"),
        [
            ({"channels": 0.1, "reads": 0.2}, "both channels and reads"),
            ({"channels": 0.0}, "channels of 0"),
            ({"channels": 1.5}, "channels of 1.5"),
            ({"reads": 0.01}, "the least possible is"),
            ({"coordinates": 129}, "129 coordinates"),
            ({"score": "best"}, "best"),
            ({"rank": 33}, "rank 33"),
            ({"channels": "0.3"}, "channels is '0.3'"),
            ({"reads": True}, "reads is True"),
            ({"coordinates": 80.5}, "coordinates is 80.5"),
            ({"rank": True}, "rank is True"),
            ({"score": 1}, "score is 1"),
        ],
    )
    def test_bad_ones_change_nothing(self, budget: dict[str, object], message: str, olmoe: PreTrainedModel) -> None:
        before = runtime_of(olmoe).settings
        with pytest.raises(UsageError, match=message):
            set_budget(olmoe, **budget)  # type: ignore[arg-type]
        assert runtime_of(olmoe).settings == before

    def test_a_plain_model_has_none(self, converted: dict[str, tuple[Path, Path]]) -> None:
        model = _load(converted["olmoe"][0])
        with pytest.raises(UsageError, match="not loaded from an augmented checkpoint"):
            set_budget(model, channels=0.1)
        with pytest.raises(UsageError, match="not loaded from an augmented checkpoint"), reader_budget(model):
            pass

    def test_a_block_changes_what_is_given_and_is_put_back(self, olmoe: PreTrainedModel) -> None:
        before = runtime_of(olmoe).settings
        with reader_budget(olmoe, channels=0.5) as half:
            assert half == runtime_of(olmoe).settings == replace(before, k=round(0.5 * ROUTED * CHANNELS))
            with reader_budget(olmoe, coordinates=128):
                assert runtime_of(olmoe).settings == replace(half, coordinates=128)
            assert runtime_of(olmoe).settings == half
        assert runtime_of(olmoe).settings == before
        with pytest.raises(ZeroDivisionError), reader_budget(olmoe, channels=0.5):
            raise ZeroDivisionError
        assert runtime_of(olmoe).settings == before

    def test_a_block_does_not_see_what_is_set_within_it(self, olmoe: PreTrainedModel) -> None:
        with reader_budget(olmoe, channels=0.5) as half:
            default = set_budget(olmoe, channels=0.25)
            assert runtime_of(olmoe).settings == half
        assert runtime_of(olmoe).settings == default

    def test_a_block_is_of_one_model(self, olmoe: PreTrainedModel) -> None:
        other = copy.deepcopy(olmoe)
        before = runtime_of(other).settings
        with reader_budget(olmoe, channels=0.5):
            assert runtime_of(other).settings == before

    def test_a_bad_block_is_not_entered(self, olmoe: PreTrainedModel) -> None:
        with pytest.raises(UsageError, match=r"channels of 1.5"), reader_budget(olmoe, channels=1.5):
            pytest.fail("entered")


class TestDamage:
    """transformers warns about these, and goes on with random weights."""

    EXPERTS = "model.layers.1.mlp.experts."

    def _rewrite(self, folder: Path, change: dict[str, torch.Tensor | None]) -> None:
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in change.items():
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    @pytest.mark.parametrize("part", ["sketch_codes", "down_proj", "recovery_basis"])
    def test_a_missing_tensor(self, part: str, damaged: Path) -> None:
        self._rewrite(damaged, {self.EXPERTS + part: None})
        with pytest.raises(SourceError, match=rf"experts\.{part} is missing"):
            _load(damaged)

    def test_an_extra_tensor(self, damaged: Path) -> None:
        self._rewrite(damaged, {self.EXPERTS + "sketch_more": torch.zeros(3)})
        with pytest.raises(SourceError, match=r"experts\.sketch_more is unknown"):
            _load(damaged)

    @pytest.mark.parametrize("part", ["sketch_codes", "down_norms", "gate_up_proj"])
    def test_a_wrong_shape(self, part: str, damaged: Path) -> None:
        tensor = load_file(damaged / "model.safetensors")[self.EXPERTS + part]
        self._rewrite(damaged, {self.EXPERTS + part: tensor[:-1].clone()})
        with pytest.raises(SourceError, match=rf"experts\.{part} is "):
            _load(damaged)

    def test_a_newer_format(self, damaged: Path) -> None:
        config = json.loads((damaged / "config.json").read_text())
        config["quantization_config"]["format_version"] = 2
        (damaged / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedError, match="format version 2"):
            _load(damaged)


def test_a_copy_reads_sparsely_on_its_own(olmoe: PreTrainedModel) -> None:
    other = copy.deepcopy(olmoe)
    set_budget(other, channels=0.5)
    assert runtime_of(olmoe).settings != runtime_of(other).settings
    set_budget(other, channels=0.122)
    tokens = [
        model.generate(TOKENS[:1], max_new_tokens=6, min_new_tokens=6, do_sample=False) for model in (olmoe, other)
    ]
    torch.testing.assert_close(*tokens, rtol=0, atol=0)
    pickle.loads(pickle.dumps(other))


def test_a_copy_counts_its_own_decode_steps(olmoe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    other = copy.deepcopy(olmoe)
    calls: list[int] = []
    read = experts.read
    monkeypatch.setattr(experts, "read", lambda x, *rest: (calls.append(len(x)), read(x, *rest))[1])
    other.generate(TOKENS[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert calls == [1] * 2 * LAYERS


def test_threads_may_share_a_model(olmoe: PreTrainedModel) -> None:
    """A decode step in one thread leaves a prefill in another dense."""
    set_budget(olmoe, channels=0.02)
    expected = _logits(olmoe)
    stop = threading.Event()

    def decode() -> None:
        while not stop.is_set():
            olmoe.generate(TOKENS[:1], max_new_tokens=4, do_sample=False)

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        for _ in range(10):
            torch.testing.assert_close(_logits(olmoe), expected, rtol=0, atol=1e-6)
    finally:
        stop.set()
        thread.join()


def test_threads_that_share_a_model_have_budgets_of_their_own(olmoe: PreTrainedModel) -> None:
    """Both are within their blocks whenever either computes; a third has the model's."""

    def sparse_logits() -> torch.Tensor:
        with reader_mode(olmoe, "always"):
            return _logits(olmoe)

    budgets = (0.02, 0.25)
    expected, found = {}, {}
    for channels in budgets:
        set_budget(olmoe, channels=channels)
        expected[channels] = sparse_logits()
    set_budget(olmoe, channels=1.0)
    together = threading.Barrier(len(budgets) + 1, timeout=60)

    def compute(channels: float) -> None:
        with reader_budget(olmoe, channels=channels):
            together.wait()
            found[channels] = sparse_logits()
            together.wait()

    threads = [threading.Thread(target=compute, args=(channels,)) for channels in budgets]
    for thread in threads:
        thread.start()
    together.wait()
    assert runtime_of(olmoe).settings.k == ROUTED * CHANNELS
    together.wait()
    for thread in threads:
        thread.join()
    assert (expected[budgets[0]] - expected[budgets[1]]).abs().max() > 1e-4
    for channels in budgets:
        torch.testing.assert_close(found[channels], expected[channels], rtol=0, atol=1e-6)


def test_a_block_does_not_reach_the_threads_that_it_starts(olmoe: PreTrainedModel) -> None:
    """As everything that a thread does with a model: it has to be within a block of its own."""
    before, seen = runtime_of(olmoe).settings, []
    with reader_budget(olmoe, channels=0.5):
        thread = threading.Thread(target=lambda: seen.append(runtime_of(olmoe).settings))
        thread.start()
        thread.join()
    assert seen == [before]
