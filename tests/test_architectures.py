"""Every supported architecture, from a checkpoint that transformers saved and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import ARCHITECTURES
from commands import contents, mreader
from sources import INDEX, make_source, read_json, shards

from mreader.formats.architectures import find_architecture, known_model_types
from mreader.formats.checkpoint import open_checkpoint

MOE_LAYERS = {"qwen2_moe": [0, 2], "qwen3_moe": [1, 2]}


@pytest.fixture(scope="module", params=[(name, files) for name in ARCHITECTURES for files in (1, 5)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, files = request.param
    return name, make_source(tmp_path_factory.mktemp(name) / "source", name, files=files)


def test_converted_verified_and_restored(case: tuple[str, Path], tmp_path: Path) -> None:
    _, source = case
    before = contents(source)
    for arguments in (
        ("convert", source, tmp_path / "out", "--device", "cpu", "--max-shard-size", "700KB"),
        ("verify", tmp_path / "out", "--source", source),
        ("restore", tmp_path / "out", tmp_path / "back"),
    ):
        ran = mreader(*arguments)
        assert ran.code == 0, ran.err
    assert {name: data for name, (_, data) in contents(tmp_path / "back").items()} == {
        name: data for name, (_, data) in before.items()
    }
    assert contents(source) == before


def test_layers_with_and_without_experts(case: tuple[str, Path]) -> None:
    name, source = case
    architecture = find_architecture(open_checkpoint(source))
    assert [layer.number for layer in architecture.layers] == MOE_LAYERS.get(name, [0, 1, 2])
    assert [layer.ordinal for layer in architecture.layers] == list(range(len(architecture.layers)))
    for layer in architecture.layers:
        assert (layer.experts, layer.channels, layer.hidden, layer.dtype) == (6, 80, 192, "BF16")
    assert architecture.routed == 3
    assert not [tensor for tensor in architecture.transformed if "shared_expert" in tensor or ".gate.weight" in tensor]


def test_borders_of_shards_cut_through_experts(tmp_path: Path) -> None:
    """What the cases above rely on."""
    source = make_source(tmp_path / "source", "olmoe", files=5)
    assert len(shards(source)) == 5
    where = read_json(source / INDEX)["weight_map"]
    experts = {name.rsplit(".", 2)[0] for name in where if ".experts." in name}
    assert [e for e in experts if len({where[f"{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}) > 1]


def test_every_known_type_is_tried() -> None:
    assert {model_type for model_type, _ in ARCHITECTURES.values()} == set(known_model_types())
