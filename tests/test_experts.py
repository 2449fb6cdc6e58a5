"""What computes a call of the routed experts on a device with kernels; without one, stand-ins show who is called."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import CHANNELS, EXPERTS, HIDDEN, LAYERS, ROUTED, VOCABULARY, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import mreader
from mreader import backend, experts
from mreader.budget import DISK
from mreader.kernels.layout import GPU
from mreader.kernels.route import rms_norm, route
from mreader.kernels.tuning import LayerShape
from mreader.reader import ExpertLayer, read
from mreader.runtime import phase, reader_mode, runtime_of, set_budget

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


class Kernels:
    """Stand-ins for the kernels: the reference, and a record of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.repacked: list[ExpertLayer] = []

    def repack(self, layer: ExpertLayer) -> Any:
        self.repacked.append(layer)
        return SimpleNamespace(down=layer.down, layer=layer)

    def decode(self, x: Tensor, ids: Tensor, weights: Tensor, layer: Any, settings: Any) -> Tensor:
        self.calls.append(f"decode {len(x)}")
        return read(x, ids, weights, layer.layer, settings)

    def decode_routed(self, x: Tensor, router: Any, layer: Any, settings: Any) -> Tensor:
        self.calls.append(f"{'choose' if router.gate is None else 'norm and choose'} for {len(x)}")
        logits = router.logits
        if router.gate is not None:
            x = rms_norm(x, router.gate.norm, router.gate.epsilon)
            logits = x @ router.gate.rows.mT
        assert logits.shape == router.logits.shape
        return read(x, *route(logits, router.routed, router.renormalize), layer.layer, settings)

    def Router(self, logits: Tensor, routed: int, renormalize: bool, gate: Any = None) -> Any:
        return SimpleNamespace(logits=logits, routed=routed, renormalize=renormalize, gate=gate)

    def Gate(self, rows: Tensor, norm: Tensor, epsilon: float) -> Any:
        return SimpleNamespace(rows=rows, norm=norm, epsilon=epsilon)

    def dense(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
        assert gate_up.shape == (EXPERTS, 2, CHANNELS, HIDDEN)
        assert down.shape == (EXPERTS, CHANNELS, HIDDEN)
        assert gate_up.is_contiguous()
        assert down.is_contiguous()
        assert activation == "silu"
        self.calls.append(f"dense {len(x)}")
        return torch.zeros_like(x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    save_tiny(made / "source", "olmoe")
    mreader.convert(made / "source", made / "out", device="cpu")
    return made / "out"


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return loaded


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """As if the CPU had kernels."""
    stand_in = Kernels()
    for name, functions in {
        "decode": ("decode", "repack", "decode_routed", "Router", "Gate"),
        "dense": ("dense",),
    }.items():
        module = ModuleType(f"mreader.kernels.{name}")
        vars(module).update({function: getattr(stand_in, function) for function in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for where in (backend, experts):
        monkeypatch.setattr(where, "runs_kernels", lambda device: True)
    return stand_in


def _module(model: PreTrainedModel) -> Any:
    return model.model.layers[0].mlp.experts


def _routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, HIDDEN), torch.randint(0, EXPERTS, (tokens, ROUTED)), torch.rand(tokens, ROUTED)


def _call(model: PreTrainedModel, tokens: int) -> Tensor:
    with torch.inference_mode():
        return experts.experts_forward(_module(model), *_routed(tokens))


def test_prefill_is_dense_and_steps_decode(model: PreTrainedModel, kernels: Kernels) -> None:
    model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=3, min_new_tokens=3)
    assert kernels.calls == ["dense 18"] * LAYERS + ["decode 2"] * 2 * LAYERS


def test_a_step_is_what_the_reader_says(model: PreTrainedModel, kernels: Kernels) -> None:
    arguments = _routed(2)
    with phase(model, decoding=True):
        found = experts.experts_forward(_module(model), *arguments)
    (layer,) = kernels.repacked
    torch.testing.assert_close(found, read(*arguments, layer, runtime_of(model).settings), rtol=0, atol=0)


def test_a_large_batch_is_dense(model: PreTrainedModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, LayerShape]] = []
    monkeypatch.setattr(experts, "largest_sparse_batch", lambda *what: (asked.append(what), 4)[1])
    with phase(model, decoding=True):
        _call(model, 4)
        _call(model, 5)
    assert kernels.calls == ["decode 4", "dense 5"]
    assert set(asked) == {("cpu", LayerShape(EXPERTS, ROUTED, HIDDEN, CHANNELS))}


def test_every_token_through_the_reader(model: PreTrainedModel, kernels: Kernels) -> None:
    """However many: in parts."""
    with reader_mode(model, "always"):
        assert _call(model, 300).shape == (300, HIDDEN)
    assert kernels.calls == ["decode 128", "decode 128", "decode 44"]


def test_never_means_never(model: PreTrainedModel, kernels: Kernels) -> None:
    with reader_mode(model, "never"), phase(model, decoding=True):
        _call(model, 1)
    assert kernels.calls == ["dense 1"]


@pytest.mark.parametrize("renormalize", [True, False])
def test_kernels_choose_experts_of_a_step(renormalize: bool, model: PreTrainedModel, kernels: Kernels) -> None:
    """And where they do not, as in prefill, the experts are those that they would choose."""
    before, rows, norm = torch.randn(2, HIDDEN), torch.randn(EXPERTS, HIDDEN), torch.rand(HIDDEN)
    x = rms_norm(before, norm, 1e-3)
    module, logits, how = _module(model), x @ rows.mT, (ROUTED, renormalize)
    expected = route(logits, *how)
    with torch.inference_mode(), phase(model, decoding=True):
        by_ids = experts.experts_forward(module, x, *expected)
        assert torch.equal(experts.experts_by_logits(module, x, logits, *how), by_ids)
        assert torch.equal(experts.experts_by_gate(module, before, rows, norm, 1e-3, *how), by_ids)
    with torch.inference_mode():
        experts.experts_by_logits(module, x, logits, *how)
        experts.experts_by_gate(module, before, rows, norm, 1e-3, *how)
    assert kernels.calls == ["decode 2", "choose for 2", "norm and choose for 2", "dense 2", "dense 2"]


def test_without_kernels_torch_goes_through_norm_and_gate(model: PreTrainedModel) -> None:
    before, rows, norm = torch.randn(2, HIDDEN), torch.randn(EXPERTS, HIDDEN), torch.rand(HIDDEN)
    x = rms_norm(before, norm, 1e-3)
    with torch.inference_mode(), phase(model, decoding=True):
        found = experts.experts_by_gate(_module(model), before, rows, norm, 1e-3, ROUTED, True)
        expected = experts.experts_forward(_module(model), x, *route(x @ rows.mT, ROUTED, renormalize=True))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("tokens", "routed", "bounds"),
    [(0, ROUTED, {}), (129, ROUTED, {}), (2, ROUTED, {"MOST_EXPERTS": EXPERTS - 1}), (2, 4, {"MOST_CANDIDATES": 1})],
)
def test_experts_are_chosen_by_kernels_that_can(
    tokens: int,
    routed: int,
    bounds: dict[str, int],
    model: PreTrainedModel,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reader_mode(model, "always"):
        assert experts.chooses_experts(_module(model), torch.randn(128, HIDDEN), ROUTED)
        for name, bound in bounds.items():
            monkeypatch.setattr(experts, name, bound)
        assert not experts.chooses_experts(_module(model), torch.randn(tokens, HIDDEN), routed)
    with reader_mode(model, "never"):
        assert not experts.chooses_experts(_module(model), torch.randn(1, HIDDEN), ROUTED)


def test_gradients_need_the_stock_implementation(model: PreTrainedModel, kernels: Kernels) -> None:
    x, ids, weights = _routed(3)
    y = experts.experts_forward(_module(model), x.requires_grad_(), ids, weights)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not kernels.calls
    assert gradient.abs().max() > 0


def test_a_dtype_without_kernels_is_served_by_torch(model: PreTrainedModel, kernels: Kernels) -> None:
    model.double()
    x, ids, weights = _routed(2)
    with phase(model, decoding=True):
        assert experts.experts_forward(_module(model), x.double(), ids, weights).dtype == torch.float64
    assert not kernels.calls


class TestRepacked:
    """Made once for the weights that are there, from a sketch that stays as it is stored."""

    def _step(self, model: PreTrainedModel) -> None:
        with phase(model, decoding=True):
            _call(model, 1)

    def test_once(self, model: PreTrainedModel, kernels: Kernels) -> None:
        self._step(model)
        self._step(model)
        assert len(kernels.repacked) == 1

    def test_again_for_other_weights(self, model: PreTrainedModel, kernels: Kernels) -> None:
        self._step(model)
        model.to(torch.bfloat16)
        assert _module(model).sketch.repacked is None  # it would keep the old weights in memory
        with phase(model, decoding=True), torch.inference_mode():
            x, ids, weights = _routed(1)
            experts.experts_forward(_module(model), x.bfloat16(), ids, weights)
        assert [layer.down.dtype for layer in kernels.repacked] == [torch.float32, torch.bfloat16]
        assert kernels.repacked[1].scales.dtype == torch.float16

    def test_again_for_another_state(self, model: PreTrainedModel, kernels: Kernels) -> None:
        self._step(model)
        model.load_state_dict(model.state_dict())
        self._step(model)
        assert len(kernels.repacked) == 2

    def test_again_for_a_copy(self, model: PreTrainedModel, kernels: Kernels) -> None:
        self._step(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            kernels.repacked.clear()
            self._step(other)
            (layer,) = kernels.repacked
            assert layer.down.data_ptr() == _module(other).down_proj.data_ptr()

    def test_the_state_is_the_checkpoint_s(self, model: PreTrainedModel, kernels: Kernels) -> None:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._step(model)
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


class TestBudget:
    """It is counted in the layout that the device reads, and follows the model there and back."""

    # Codes of 80 channels are 64 bytes a coordinate in both; on a GPU there are scales for 128 channels.
    def test_the_layout_follows_the_device(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = runtime_of(model)
        k = set_budget(model, reads=0.5).k
        assert runtime.shape.layout is DISK
        with monkeypatch.context() as patch:
            patch.setattr(backend, "runs_kernels", lambda device: True)
            assert runtime.shape.layout is GPU
            assert runtime.settings.k < k
            assert runtime.reads.total <= 0.5
        assert runtime.settings.k == k

    def test_channels_are_the_same_everywhere(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        k, reads = set_budget(model, channels=0.25).k, runtime_of(model).reads
        monkeypatch.setattr(backend, "runs_kernels", lambda device: True)
        assert runtime_of(model).settings.k == k
        assert runtime_of(model).reads != reads


@pytest.mark.gpu
class TestOnAGpu:
    """The same model, moved there and back."""

    def test_the_sketch_stays_on_the_host_and_its_tiles_on_the_device(self, model: PreTrainedModel) -> None:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.cuda()
        with phase(model, decoding=True), torch.inference_mode():
            experts.experts_forward(_module(model), *(part.cuda() for part in _routed(1)))
        sketch = _module(model).sketch
        assert {tensor.device.type for tensor in sketch.buffers()} == {"cpu"}
        assert sketch.repacked.tiles.codes.device.type == "cuda"
        assert sketch.repacked.down.data_ptr() == _module(model).down_proj.data_ptr()
        assert runtime_of(model).shape.layout is GPU
        model.cpu()
        assert sketch.repacked is None
        assert runtime_of(model).shape.layout is DISK
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("tokens", [1, 2, 7, 130])
    def test_both_paths_are_the_references(self, tokens: int, model: PreTrainedModel) -> None:
        """With all channels both are the dense sum, up to the order of float32 sums."""
        set_budget(model, channels=1.0)
        arguments = _routed(tokens)
        with torch.inference_mode():
            expected = experts.experts_forward(_module(model), *arguments)
            model.cuda()
            for mode in ("never", "always"):
                with reader_mode(model, mode):  # type: ignore[arg-type]
                    found = experts.experts_forward(_module(model), *(part.cuda() for part in arguments))
                torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)

    def test_gradients_flow(self, model: PreTrainedModel) -> None:
        model.cuda()
        x, ids, weights = (part.cuda() for part in _routed(3))
        y = experts.experts_forward(_module(model), x.requires_grad_(), ids, weights)
        assert torch.autograd.grad(y.sum(), x)[0].abs().max() > 0
