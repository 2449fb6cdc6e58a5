"""The parts of the vLLM plugin that need no vLLM: which tokens decode, what a rank reads, whose budget counts."""

# T tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_reader import REORDERED, SHAPES, Shape, make_layer, make_tokens

from mreader.budget import Budget
from mreader.errors import UsageError
from mreader.formats.augmented import FormatOptions, open_augmented
from mreader.formats.codes import QUATERNARY, TERNARY, Code
from mreader.reader import ExpertLayer, ReadSettings, read
from mreader.vllm.budget import choose_budget
from mreader.vllm.checkpoint import layer_number, open_routed
from mreader.vllm.phases import only_decodes, split_rows
from mreader.vllm.shards import Shard, read_share

FIELDS = {
    "gate_up_proj": "gate_up",
    "down_proj": "down",
    "sketch_codes": "codes",
    "sketch_scales": "scales",
    "sketch_errors": "errors",
    "sketch_signs": "signs",
    "down_norms": "down_norms",
    "recovery_basis": "basis",
    "recovery_coeffs": "coeffs",
}


def test_mreader_does_not_import_vllm_by_itself() -> None:
    code = "import sys, mreader.cli.main, mreader.runtime, mreader.vllm; sys.exit('vllm' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestPhases:
    """A step holds requests one after the other: those that bring one token decode."""

    @staticmethod
    def _step(*lengths: int) -> dict[str, Any]:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return {"layer": SimpleNamespace(max_query_len=max(lengths), query_start_loc=starts)}

    def test_nothing_decodes_while_vllm_warms_up(self) -> None:
        assert not only_decodes(None)
        assert split_rows(None, 8) is None

    @pytest.mark.parametrize(("lengths", "only"), [((1, 1, 1), True), ((1,), True), ((5, 2), False), ((1, 2), False)])
    def test_a_step_of_single_tokens_only_decodes(self, lengths: tuple[int, ...], only: bool) -> None:
        assert only_decodes(self._step(*lengths)) == only

    def test_a_step_of_prompts_has_nothing_to_decode(self) -> None:
        assert split_rows(self._step(5, 2), 7) is None

    def test_a_mixed_step_decodes_the_single_tokens_and_no_padding(self) -> None:
        rows = split_rows(self._step(1, 3, 1, 1), 8)
        assert rows is not None
        assert rows.decoded.tolist() == [0, 4, 5]
        assert rows.others.tolist() == [1, 2, 3, 6, 7]

    def test_layers_that_say_nothing_of_queries_are_passed_over(self) -> None:
        linear = {"linear": SimpleNamespace(num_decodes=1)}
        assert only_decodes({**linear, **self._step(1)})
        assert not only_decodes(linear)
        assert split_rows(linear, 1) is None


class TestRanks:
    """What ranks read of a layer adds up to what one reads of the whole."""

    @staticmethod
    def _part(layer: ExpertLayer, shard: Shard, code: Code) -> ExpertLayer:
        hidden = layer.gate_up.shape[3]
        options = FormatOptions(codes=code.name, rank=layer.basis.shape[1])
        parts = {}
        for part, spec in shard.specs(hidden, "F32", options).items():
            stored = getattr(layer, FIELDS[part])
            parts[FIELDS[part]] = torch.empty(spec.shape, dtype=stored.dtype)
            shard.copy(part, stored, parts[FIELDS[part]], code)
        return dataclasses.replace(layer, **parts)

    def test_one_rank_has_all(self) -> None:
        layer = make_layer(SHAPES[0])
        E, _, _, I = SHAPES[0]
        whole = self._part(layer, Shard(tuple(range(E)), range(I), I), TERNARY)
        for field in FIELDS.values():
            torch.testing.assert_close(getattr(whole, field), getattr(layer, field), rtol=0, atol=0)

    @pytest.mark.parametrize("code", [TERNARY, QUATERNARY], ids=["ternary", "quaternary"])
    @pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=["80 channels", "33 channels"])
    @pytest.mark.parametrize("every", [True, False], ids=["all channels", "none"])
    def test_channels_dealt_out(self, shape: Shape, code: Code, every: bool) -> None:
        """With all kept the exact part adds up, with none the estimates do: codes were cut right."""
        layer = make_layer(shape, code)
        E, K, _, I = shape
        x, ids, weights = make_tokens(shape)
        settings = ReadSettings(K * I if every else 0, 80, "variance", 6)
        cuts = [0, I // 3, I]
        ranks = [self._part(layer, Shard(tuple(range(E)), range(*cut), I), code) for cut in pairwise(cuts)]
        total = sum(read(x, ids, weights, rank, settings) for rank in ranks)
        torch.testing.assert_close(total, read(x, ids, weights, layer, settings), **REORDERED)

    @pytest.mark.parametrize("every", [True, False], ids=["all channels", "none"])
    def test_experts_dealt_out(self, every: bool) -> None:
        shape = E, K, _, I = SHAPES[0]
        layer = make_layer(shape)
        x, ids, weights = make_tokens(shape)
        settings = ReadSettings(K * I if every else 0, 80, "variance", 6)
        total = torch.zeros_like(x)
        for experts in ((4, 0, 2), (1, 3, 5)):
            place = torch.full((E,), -1)
            place[list(experts)] = torch.arange(len(experts))
            rank = self._part(layer, Shard(experts, range(I), I), TERNARY)
            total += read_share(x, place[ids], weights, rank, settings)
        torch.testing.assert_close(total, read(x, ids, weights, layer, settings), **REORDERED)

    def test_a_token_s_channels_are_shared_by_its_experts(self) -> None:
        """A rank that has n of K experts reads k n / K channels of them."""
        layer = make_layer(SHAPES[0])
        x, ids, weights = make_tokens(SHAPES[0])
        ids[0], ids[1, 1], ids[2, 1:] = -1, -1, -1
        settings = ReadSettings(90, 80, "variance", 6)
        y = read_share(x, ids, weights, layer, settings)
        for token, k in ((0, 0), (1, 60), (2, 30), (3, 90)):
            own = slice(token, token + 1)
            alone = read(x[own], ids[own], weights[own], layer, dataclasses.replace(settings, k=k))
            torch.testing.assert_close(y[own], alone, **REORDERED)


class TestBudget:
    """config.json, then MREADER_READS, then the override."""

    OPTIONS = FormatOptions(channels=0.1)

    def _choose(self, variable: str | None = None, override: Any = None) -> Budget | None:
        return choose_budget(self.OPTIONS, {} if variable is None else {"MREADER_READS": variable}, override)

    @pytest.mark.parametrize(
        ("variable", "override", "channels", "reads"),
        [
            (None, None, 0.1, None),
            ("", None, 0.1, None),
            ("0.2", None, None, 0.2),
            (None, 0.3, None, 0.3),
            (None, "0.3", None, 0.3),
            ("0.2", {"channels": 0.4}, 0.4, None),
            ("dense", {"channels": 0.4}, 0.4, None),
            ("dense", {"coordinates": 128}, 0.1, None),
            ("0.2", {"coordinates": 128}, None, 0.2),
        ],
    )
    def test_the_last_word(
        self, variable: str | None, override: Any, channels: float | None, reads: float | None
    ) -> None:
        budget = self._choose(variable, override)
        assert budget is not None
        assert (budget.channels, budget.reads) == (channels, reads)
        assert budget.coordinates == (128 if isinstance(override, dict) and "coordinates" in override else 80)

    @pytest.mark.parametrize(("variable", "override"), [("dense", None), (None, "dense"), ("0.2", "dense")])
    def test_dense(self, variable: str | None, override: str | None) -> None:
        assert self._choose(variable, override) is None

    @pytest.mark.parametrize(
        ("variable", "override", "message"),
        [
            ("fast", None, "MREADER_READS is 'fast'"),
            (None, [0.1], "mreader in hf_overrides is"),
            (None, {"k": 3}, "mreader in hf_overrides has a key 'k'"),
            (None, {"channels": 0.1, "reads": 0.2}, "both channels and reads"),
            (None, {"coordinates": "80"}, "coordinates is '80'"),
        ],
    )
    def test_nonsense_is_refused(self, variable: str | None, override: Any, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            self._choose(variable, override)


def test_a_checkpoint_says_what_it_promises(olmoe_augmented: Path) -> None:
    routed = open_routed(olmoe_augmented)
    names = {name for name in open_augmented(olmoe_augmented).checkpoint.tensors if ".experts." in name}
    assert set(routed.tensors) == names
    assert routed.tensors["model.layers.2.mlp.experts.sketch_codes"] == (2, "sketch_codes")
    assert routed.activation == "silu"


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("language_model.model.layers.12", 12),
        ("model.norm", None),
        ("model.mlayers.3.mlp", None),
    ],
)
def test_a_module_s_name_tells_its_layer(name: str, number: int | None) -> None:
    assert layer_number(name) == number
