"""Every supported architecture, from a checkpoint that transformers saved and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ARCHITECTURES
from commands import contents, mreader
from sources import INDEX, make_source, read_json, shards

from mreader.errors import SourceError, UnsupportedError
from mreader.formats.architectures import find_architecture, known_model_types, model_types
from mreader.formats.checkpoint import Checkpoint, assemble, open_checkpoint
from mreader.formats.safetensors_file import parse_header

MOE_LAYERS = {"qwen2_moe": [0, 2], "qwen2_moe, every second layer": [1, 3], "qwen3_moe": [1, 2]}


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


def headers_only(config: dict[str, Any], routed_layers: list[int]) -> Checkpoint:
    """A checkpoint of two experts a layer, of which only config.json and the header of the one shard exist."""
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", shape)
        for layer in routed_layers
        for expert in range(2)
        for part, shape in (("gate", (8, 16)), ("up", (8, 16)), ("down", (16, 8)))
    ]
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [256 * i, 256 * (i + 1)]}
        for i, (name, shape) in enumerate(names)
    }
    header = json.dumps(entries).encode()
    size = 8 + len(header) + 256 * len(names)
    return assemble(
        None,
        {"config.json": 0, "model.safetensors": size},
        lambda _: json.dumps(config),
        lambda name: parse_header(header, size, name),
    )


FIRST_TWO_DENSE = {
    **{"model_type": "olmoe", "num_experts": 2, "num_experts_per_tok": 1, "hidden_act": "silu"},
    **{"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 4, "first_k_dense_replace": 2},
}


def test_first_layers_without_experts() -> None:
    """The key means the same in every config that has it; none of the types that transformers can save here does."""
    layers = find_architecture(headers_only(FIRST_TWO_DENSE, [2, 3])).layers
    assert [(layer.number, layer.ordinal) for layer in layers] == [(2, 0), (3, 1)]
    for wrong, number in (([1, 2, 3], 1), ([3], 2), ([0, 1, 2, 3], 0)):
        with pytest.raises(SourceError, match=f"layer {number} has"):
            find_architecture(headers_only(FIRST_TWO_DENSE, wrong))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 3}, [2, 5, 8]),
        ({"decoder_sparse_step": 3, "first_k_dense_replace": 2}, [2, 5, 8]),
        ({"decoder_sparse_step": 3, "first_k_dense_replace": 3}, [5, 8]),
        ({"decoder_sparse_step": 2, "first_k_dense_replace": 4, "mlp_only_layers": [7]}, [5, 9]),
        (
            {"decoder_sparse_step": 0, "first_k_dense_replace": None, "mlp_only_layers": [0, 2, 4, 6, 8]},
            [1, 3, 5, 7, 9],
        ),
    ],
)
def test_every_so_many_layers(changes: dict[str, Any], layers: list[int]) -> None:
    config = {**FIRST_TWO_DENSE, "num_hidden_layers": 10, "first_k_dense_replace": 0, **changes}
    assert [layer.number for layer in find_architecture(headers_only(config, layers)).layers] == layers
    for wrong in (layers[:-1], [*layers, 10]):
        with pytest.raises(SourceError, match=f"layer {max({*layers, *wrong})} has"):
            find_architecture(headers_only(config, wrong))


def test_experts_in_the_layers_that_predict_and_in_no_other() -> None:
    config = {**FIRST_TWO_DENSE, "num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    with pytest.raises(UnsupportedError, match="dense model"):
        find_architecture(headers_only(config, [2, 3]))


def test_borders_of_shards_cut_through_experts(tmp_path: Path) -> None:
    """What the cases above rely on."""
    source = make_source(tmp_path / "source", "olmoe", files=5)
    assert len(shards(source)) == 5
    where = read_json(source / INDEX)["weight_map"]
    experts = {name.rsplit(".", 2)[0] for name in where if ".experts." in name}
    assert [e for e in experts if len({where[f"{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}) > 1]


class TestFormats:
    """`mreader formats` is the table, in text and as JSON."""

    def test_json_lists_what_is_supported_and_why_the_rest_is_not(self) -> None:
        found = json.loads(mreader("formats", "--json").out)
        types = {entry["model_type"]: entry for entry in found["model_types"]}
        assert [name for name, entry in types.items() if entry["supported"]] == known_model_types()
        assert types["granitemoe"]["experts"] == ["model.layers.{layer}.block_sparse_moe.experts"]
        assert types["granitemoe"]["layouts"] == ["fused_linear", "fused"]
        assert all(entry["supported"] != bool(entry["reason"]) for entry in types.values())
        named = {layout["name"]: layout for layout in found["layouts"]}
        assert {name for entry in types.values() for name in entry["layouts"]} == set(named)
        assert named["per_expert_w"]["tensors"]["down"] == "{expert}.w2.weight"
        assert [name for name, layout in named.items() if layout["transposed"]] == [
            "fused_transposed",
            "fused_fc",
            "fused_interleaved",
        ]

    def test_the_readme_has_the_same_tables(self) -> None:
        """Otherwise put what `mreader formats --markdown` prints there."""
        readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
        tables = mreader("formats", "--markdown").out
        assert tables.strip() in readme
        for model_type in model_types():
            assert f" {model_type.model_type}" in tables

    def test_text_names_every_type_and_layout(self) -> None:
        found, shown = json.loads(mreader("formats", "--json").out), mreader("formats").out
        for entry in (*found["model_types"], *found["layouts"]):
            assert entry.get("model_type", entry.get("name")) in shown


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("openai_privacy_filter", "no decode steps"),
        ("llama4", "experts' input"),
        ("muse_spark", "norm"),
        ("nemotron_h", "no gate"),
    ],
)
def test_a_type_that_cannot_work_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    """Also where its weights are quantized, which another checkpoint would not help."""
    config = {**FIRST_TWO_DENSE, "model_type": model_type, "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedError, match=f"{model_type} cannot be converted: .*{reason}"):
        find_architecture(headers_only(config, [2, 3]))


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"num_dense_layers": 3}, [3, 4, 5]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}, [1, 2, 3]),
        ({"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2}, [1, 3, 5]),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, [1, 3, 5]),
        ({"expert_layer_period": 2, "expert_layer_offset": 3}, [1, 3, 5]),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "dense", "sparse", "sparse"]}, [1, 4, 5]),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [1, 2, 4, 5]),
        ({"moe_layer_freq": 1, "first_k_dense_replace": 4}, [4, 5]),
        ({"num_nextn_predict_layers": 2, "first_k_dense_replace": 4}, [4, 5, 6, 7]),
    ],
)
def test_which_layers_config_json_promises(keys: dict[str, Any], layers: list[int]) -> None:
    config = {**FIRST_TWO_DENSE, "num_hidden_layers": 6, "first_k_dense_replace": 0, **keys}
    expected = [number for number in layers if number < 6]
    assert [layer.number for layer in find_architecture(headers_only(config, layers)).layers] == expected
    wrong = [number for number in range(6) if number not in expected] or expected[1:]
    with pytest.raises(SourceError, match=r"config\.json says otherwise"):
        find_architecture(headers_only(config, wrong))
