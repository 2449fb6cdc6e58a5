"""Augmented checkpoints of random weights, which have no source: mreader/bench/checkpoint.py."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import mreader
from mreader.bench import checkpoint
from mreader.bench.checkpoint import with_layers, write_random
from mreader.bench.shapes import SHAPES, ModelShape
from mreader.errors import NoSpaceError, UsageError, VerifyError
from mreader.formats.augmented import FormatOptions, open_augmented
from mreader.formats.checkpoint import INDEX
from mreader.kernels.tuning import LayerShape
from mreader.progress import Progress

CPU = torch.device("cpu")
OPTIONS = FormatOptions(rank=8, channels=0.25, codes="quaternary")
# H is no multiple of 128, I none of 5 or 32; of BF16 torch multiplies matrices only where both are one of 8.
LAYER = LayerShape(experts=6, routed=2, hidden=192, channels=48)
LAYERS = 4  # one of four of Qwen3.5 has full attention
_SIZES = {"vocab_size": 90, "hidden_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2}
_EXPERTS = {**_ROUTED, "moe_intermediate_size": 48, "head_dim": 32, "num_key_value_heads": 2}
TINY = {
    "qwen3-30b-a3b": _EXPERTS,
    "olmoe": {**_ROUTED, "intermediate_size": 48, "num_key_value_heads": 4},
    "gemma4-26b": {**_EXPERTS, "top_k_experts": 2, "global_head_dim": 64},
    "qwen3.5-35b": _EXPERTS,
}


def tiny(name: str) -> ModelShape:
    """The model of that name with small sizes."""
    shape = SHAPES[name]
    return replace(shape, layer=LAYER, layers=LAYERS, config={**shape.config, **_SIZES, **TINY[name]})


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_a_checkpoint_that_decodes(name: str, tmp_path: Path) -> None:
    write_random(tmp_path / "out", tiny(name), OPTIONS, CPU, Progress())
    opened = open_augmented(tmp_path / "out")
    assert opened.options == OPTIONS
    assert [layer.number for layer in opened.architecture.layers] == list(range(LAYERS))
    mreader.verify(tmp_path / "out")
    model = mreader.load(tmp_path / "out", device="cpu")
    logits = model(torch.tensor([[5, 6, 7]])).logits
    assert bool(torch.isfinite(logits).all())
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, eos_token_id=None).shape == (
        1,
        7,
    )


def test_layers_share_the_experts_values_and_nothing_else(tmp_path: Path) -> None:
    write_random(tmp_path / "out", tiny("qwen3-30b-a3b"), OPTIONS, CPU, Progress())
    opened = open_augmented(tmp_path / "out")
    with opened.tensors() as tensors:
        first, last = (opened.layer(opened.architecture.layers[i], tensors) for i in (0, 3))
        for part, values in first.items():
            torch.testing.assert_close(values, last[part], rtol=0, atol=0)
        for matrix in ("mlp.gate.weight", "self_attn.q_proj.weight"):
            one, other = (tensors[f"model.layers.{layer}.{matrix}"] for layer in (0, 3))
            assert not torch.equal(one, other)
            assert float(one.std()) == pytest.approx(0.02, rel=0.1)
        assert tensors["model.norm.weight"].unique().tolist() == [1]


def test_it_is_the_same_each_time_and_whatever_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_random(tmp_path / "one", tiny("olmoe"), OPTIONS, CPU, Progress())
    monkeypatch.setattr(checkpoint, "make_plan", partial(checkpoint.make_plan, max_shard_bytes=200_000))
    write_random(tmp_path / "many", tiny("olmoe"), OPTIONS, CPU, Progress())
    assert len(set(json.loads((tmp_path / "many" / INDEX).read_text())["weight_map"].values())) > 2
    mreader.verify(tmp_path / "many")
    with open_augmented(tmp_path / "one").tensors() as one, open_augmented(tmp_path / "many").tensors() as many:
        assert set(one) == set(many)
        for name in one:
            torch.testing.assert_close(one[name], many[name], rtol=0, atol=0)


def test_there_is_no_source_to_restore(tmp_path: Path) -> None:
    write_random(tmp_path / "out", tiny("olmoe"), OPTIONS, CPU, Progress())
    with pytest.raises(VerifyError, match="would differ from the source"):
        mreader.restore(tmp_path / "out", tmp_path / "source")


def test_a_model_of_fewer_layers() -> None:
    shape = with_layers(SHAPES["qwen3-30b-a3b"], 5)
    assert (shape.layers, shape.config["num_hidden_layers"]) == (5, 5)
    with pytest.raises(UsageError, match="layers is 0"):
        with_layers(shape, 0)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for there in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UsageError, match=f"{there} is no empty folder"):
            write_random(there, tiny("olmoe"), OPTIONS, CPU, Progress())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_disk_that_is_too_small_is_found_before_anything_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "draw_layer", None)
    monkeypatch.setattr("mreader.output.free_bytes", lambda folder: 1000)
    with pytest.raises(NoSpaceError, match=r"needs .* MB"):
        write_random(tmp_path / "out", tiny("olmoe"), OPTIONS, CPU, Progress())
