"""Experts with biases and a clamped activation (gpt_oss), where they go another way than others do."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CHANNELS, EXPERTS, HIDDEN, ROUTED, VOCABULARY, save_tiny
from commands import mreader as command
from sources import all_tensors, edit_json, edit_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import mreader
from mreader import backend, captured, experts
from mreader.activations import get_activation
from mreader.budget import DISK
from mreader.captured import why_not_static
from mreader.errors import UnsupportedError
from mreader.formats.architectures import find_architecture
from mreader.formats.checkpoint import open_checkpoint
from mreader.runtime import reader_mode, runtime_of, set_budget

TOKENS = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
EXPERTS_OF_1 = "model.layers.1.mlp.experts"
SOURCE, UNSUPPORTED, VERIFY = 3, 6, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("biases")
    save_tiny(folder / "source", "gpt_oss")
    mreader.convert(folder / "source", folder / "out", device="cpu")
    return folder / "source", folder / "out"


@pytest.fixture
def model(folders: tuple[Path, Path]) -> PreTrainedModel:
    return mreader.load(folders[1], dtype=torch.float32, device="cpu")


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    result: torch.Tensor = model(TOKENS, use_cache=False).logits
    return result


def test_on_disk_gate_and_up_lie_one_after_the_other(folders: tuple[Path, Path]) -> None:
    source, out = (all_tensors(folder) for folder in folders)
    for part in ("gate_up_proj", "gate_up_proj_bias"):
        taking_turns, stored = source[f"{EXPERTS_OF_1}.{part}"], out[f"{EXPERTS_OF_1}.{part}"]
        assert stored.shape[:3] == (EXPERTS, 2, CHANNELS)
        for matrix in (0, 1):
            torch.testing.assert_close(stored[:, matrix].mT if stored.dim() == 4 else stored[:, matrix],
                                       taking_turns[..., matrix::2], rtol=0, atol=0)  # fmt: skip
    assert out[f"{EXPERTS_OF_1}.down_proj_bias"].shape == (EXPERTS, HIDDEN)
    for part in ("down_proj", "down_proj_bias"):
        name = f"{EXPERTS_OF_1}.{part}"
        torch.testing.assert_close(out[name], source[name], rtol=0, atol=0)
    assert all(float(tensor.abs().max()) > 0 for name, tensor in out.items() if name.endswith("_bias"))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_dense_implementation_runs_on_the_stored_weights(
    implementation: str, model: PreTrainedModel, folders: tuple[Path, Path]
) -> None:
    dense = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    for module in (part for part in model.modules() if hasattr(part, "mreader_dense")):
        module.mreader_dense = implementation
    torch.testing.assert_close(logits(model), logits(dense), rtol=0, atol=1e-5)


def test_the_down_bias_counts_for_every_routed_expert_whatever_is_kept(model: PreTrainedModel) -> None:
    module: Any = model.model.layers[0].mlp.experts
    x, ids = torch.randn(4, HIDDEN), torch.randint(0, EXPERTS, (4, ROUTED))
    ids[3, 1] = EXPERTS  # elsewhere
    weights = torch.rand(4, ROUTED)
    set_budget(model, channels=0.05, rank=0)
    with torch.inference_mode(), reader_mode(model, "always"):
        with_biases = experts.experts_forward(module, x, ids, weights)
        bias, module.down_proj_bias = module.down_proj_bias, torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
        without = experts.experts_forward(module, x, ids, weights)
    expected = torch.zeros(4, HIDDEN)
    for token, slot in ((token, slot) for token in range(4) for slot in range(ROUTED) if ids[token, slot] < EXPERTS):
        expected[token] += weights[token, slot] * bias[ids[token, slot]]
    torch.testing.assert_close(with_biases - without, expected, rtol=0, atol=1e-5)


def test_a_copy_and_a_pickle_give_the_same_text(model: PreTrainedModel) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(TOKENS[:1], **arguments)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other.generate(TOKENS[:1], **arguments), expected, rtol=0, atol=0)


class TestWhereKernelsRun:
    """The Triton kernels know neither biases nor this activation: torch serves, on the layout of the checkpoint."""

    @pytest.fixture(autouse=True)
    def kernels_everywhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for where in (backend, experts, captured):
            monkeypatch.setattr(where, "runs_kernels", lambda device: True)

    def test_the_reader_and_the_stock_experts_serve(self, folders: tuple[Path, Path], model: PreTrainedModel) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for where in (backend, experts, captured):
                patch.setattr(where, "runs_kernels", lambda device: False)
            on_cpu = mreader.load(folders[1], dtype=torch.float32, device="cpu")
            expected = [logits(on_cpu)]
            with reader_mode(on_cpu, "always"):
                expected.append(logits(on_cpu))
        torch.testing.assert_close(logits(model), expected[0], rtol=0, atol=0)
        with reader_mode(model, "always"):
            torch.testing.assert_close(logits(model), expected[1], rtol=0, atol=0)

    def test_reads_are_those_of_the_layout_on_disk(self, model: PreTrainedModel) -> None:
        assert runtime_of(model).shape.layout is DISK
        assert runtime_of(model).shape.biased

    def test_the_kernels_refuse_the_layer(self, model: PreTrainedModel) -> None:
        pytest.importorskip("triton")
        from mreader.kernels.decode import repack

        layer = experts._layer_of(model.model.layers[0].mlp.experts, torch.device("cpu"))
        silu, clamped = get_activation("silu"), layer.activation
        for other in (replace(layer, activation=silu), replace(layer, down_bias=None, activation=clamped)):
            with pytest.raises(UnsupportedError, match="the kernels do not know the experts' biases or activation"):
                repack(other)

    def test_steps_are_not_captured(self, model: PreTrainedModel) -> None:
        assert why_not_static(model) == "the kernels do not know its experts' biases or activation"


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_it_is_on_a_cpu(folders: tuple[Path, Path], model: PreTrainedModel) -> None:
    expected = logits(model), model.generate(TOKENS[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    model.cuda()
    sketch = next(part for part in model.modules() if isinstance(part, experts.RoutedExpertsSketch))
    assert {buffer.device.type for buffer in sketch.buffers()} == {"cuda"}
    with torch.inference_mode():
        found = model(TOKENS.cuda(), use_cache=False).logits
    torch.testing.assert_close(found.cpu(), expected[0], rtol=0, atol=1e-3)
    tokens = model.generate(TOKENS[:1].cuda(), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    torch.testing.assert_close(tokens.cpu(), expected[1], rtol=0, atol=0)


class TestConfig:
    """The activation is that of config.json, where gpt-oss's own files leave out alpha."""

    @pytest.mark.parametrize(
        ("changes", "activation"),
        [
            ({}, "clamped_swiglu(alpha=1.702, limit=7.0)"),
            ({"swiglu_alpha": None, "swiglu_limit": None}, "clamped_swiglu(alpha=1.702, limit=7.0)"),
            ({"swiglu_alpha": 2, "swiglu_limit": 5.5}, "clamped_swiglu(alpha=2.0, limit=5.5)"),
        ],
    )
    def test_parameters(
        self, changes: dict[str, Any], activation: str, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        assert find_architecture(open_checkpoint(_changed(folders[0], tmp_path, changes))).activation == activation

    @pytest.mark.parametrize("value", [0, -7, True, "seven", [7.0], float("inf")])
    def test_bad_parameters(self, value: Any, folders: tuple[Path, Path], tmp_path: Path) -> None:
        source = _changed(folders[0], tmp_path, {"swiglu_limit": value})
        ran = command("convert", source, tmp_path / "out")
        assert "swiglu_limit" in ran.cause
        assert ran.code == SOURCE
        assert not (tmp_path / "out").exists()


def _changed(source: Path, folder: Path, changes: dict[str, Any]) -> Path:
    copied = folder / "source"
    copied.mkdir()
    for path in source.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    edit_json(copied / "config.json", lambda config: config.update(changes))
    return copied


@pytest.mark.parametrize("part", ["gate_up_proj_bias", "down_proj_bias"])
class TestDamage:
    """Of a bias."""

    def test_nan_in_the_source(self, part: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
        source = _changed(folders[0], tmp_path, {})
        edit_tensor(source, f"{EXPERTS_OF_1}.{part}", lambda bias: bias.__setitem__((4, 7), float("nan")))
        ran = command("convert", source, tmp_path / "out")
        assert f"{EXPERTS_OF_1}.{part} holds NaN or infinity (expert 4, row 7)" in ran.cause
        assert ran.code == SOURCE
        assert not (tmp_path / "out").exists()

    def test_another_value_than_the_source_s(self, part: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
        source = _changed(folders[0], tmp_path, {})
        edit_tensor(source, f"{EXPERTS_OF_1}.{part}", lambda bias: bias.__setitem__((4, 7), 0.5))
        ran = command("verify", folders[1], "--source", source)
        assert f"{EXPERTS_OF_1}.{part}" in ran.cause
        assert "of expert 4" in ran.cause
        assert ran.code == VERIFY


def test_selectors_refuse_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", TOKENS.flatten().repeat(20).numpy().astype(np.uint16))
    common = ("--tokens", tmp_path / "tokens.npy", "--windows", "1", "--length", "8", "--device", "cpu")
    for folder in folders:
        ran = command("compare", folder, *common)
        assert "selectors do not know the biases or the activation of gpt_oss's experts" in ran.cause
        assert ran.code == UNSUPPORTED
