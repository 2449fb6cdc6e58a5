"""Scores, keep rules, splits and recovery of every selector, against definitions written out here in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mreader.activations import get_activation
from mreader.budget import BlockShape
from mreader.errors import UsageError
from mreader.formats.augmented import DEFAULT_OPTIONS
from mreader.formats.coding import fit
from mreader.kernels.rotate import rotate
from mreader.reader import ReadSettings, read
from mreader.selectors.jobs import Job, Reader
from mreader.selectors.keep import Calibrating, Threshold, TopK, TopKPerExpert, pooled_threshold
from mreader.selectors.kept import Kept, nbytes_of
from mreader.selectors.layers import Batch, Layer, factorise, round_rows
from mreader.selectors.plans import Split, make_plan, run_block
from mreader.selectors.prepare import Preparer
from mreader.selectors.reads import InfeasibleError, Plan
from mreader.selectors.recovery import fit_map, recover, weight_map
from mreader.selectors.scores import SCORES, Score, Scored, get_score
from mreader.selectors.sketching import Native, Sketching

# Odd on purpose: H no multiple of 128, I none of 5 or 32, E no power of two.
E, K, H, I, N = 6, 3, 192, 80, 40
ALL = Plan(k=K * I, coordinates=128, factor_rank=4)
# Sums of 192 float32 products of size one, in another order than float64 has them
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_batch(seed: int, tokens: int = N) -> Batch:
    routing = draw(tokens, E, seed=seed + 1).softmax(-1).topk(K)
    return Batch(draw(tokens, H, seed=seed) * draw(H, seed=99).abs(), routing.indices, routing.values)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer()


def make_layer(kept: Kept | None = None) -> Layer:
    gate_up, down = draw(E, 2, I, H, seed=1) / H**0.5, draw(E, H, I, seed=2).transpose(1, 2) / I**0.5
    shape = BlockShape(H, I, K, DEFAULT_OPTIONS.rank, DEFAULT_OPTIONS.code)
    native = Native(gate_up, down, get_activation("silu"))
    return Layer(native, 0, shape, Kept() if kept is None else kept, Sketching(), calibration=draw_batch(50, 64))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return draw_batch(10)


def of_slots(batch: Batch, table: Tensor) -> Tensor:
    return table[batch.ids].double()


def products(batch: Batch, layer: Layer) -> tuple[Tensor, Tensor]:
    """g_j . x and v_j . x in float64, (N, K, I)."""
    weights = of_slots(batch, layer.gate_up)
    gate, up = torch.einsum("nh,nkcih->cnki", batch.x.double(), weights)
    return gate, up


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def dense(batch: Batch, layer: Layer) -> Tensor:
    gate, up = products(batch, layer)
    return torch.einsum("nk,nki,nkih->nh", batch.weights.double(), silu(gate) * up, of_slots(batch, layer.down))


def scored(name: str, batch: Batch, layer: Layer, plan: Plan = ALL) -> Scored:
    return get_score(name).function(batch, layer, plan, TopK())


class TestScores:
    """Each score by its formula; `ALL` reads every input, so that nothing is approximate but copies of weights."""

    def test_oracle(self, batch: Batch, layer: Layer) -> None:
        gate, up = products(batch, layer)
        norms = of_slots(batch, layer.down).norm(dim=-1)
        expected = batch.weights.double().unsqueeze(-1) * norms * (silu(gate) * up).abs()
        torch.testing.assert_close(scored("oracle", batch, layer).scores.double(), expected, **CLOSE)

    @pytest.mark.parametrize("name", ["cats", "park"])
    def test_gate_first(self, name: str, batch: Batch, layer: Layer) -> None:
        gate, _ = products(batch, layer)
        torch.testing.assert_close(scored(name, batch, layer).scores.double(), silu(gate).abs(), **CLOSE)

    def test_countdown(self, batch: Batch, layer: Layer) -> None:
        _, up = products(batch, layer)
        torch.testing.assert_close(scored("m-countdown", batch, layer).scores.double(), up.abs(), **CLOSE)

    def test_chess_weighs_by_the_mean_square_of_up_on_calibration_tokens(self, batch: Batch, layer: Layer) -> None:
        assert layer.calibration is not None
        gate, _ = products(batch, layer)
        _, up = products(layer.calibration, layer)
        means = torch.stack([up[layer.calibration.ids == expert].square().mean(0) for expert in range(E)])
        expected = silu(gate).square() * means[batch.ids]
        torch.testing.assert_close(scored("chess", batch, layer).scores.double(), expected, **CLOSE)

    def test_teal_reads_the_largest_inputs(self, batch: Batch, layer: Layer) -> None:
        result = scored("teal", batch, layer, replace(ALL, gate=0.5, up=0.25))
        seen = []
        for share, side in ((96, 0), (48, 1)):
            smallest = batch.x.abs().topk(share).values[:, -1:]
            x = torch.where(batch.x.abs() >= smallest, batch.x, 0.0).double()
            seen.append(torch.einsum("nh,nkih->nki", x, of_slots(batch, layer.gate_up[:, side])))
        torch.testing.assert_close(result.scores.double(), (silu(seen[0]) * seen[1]).abs(), **CLOSE)
        # every routed expert reads the same 96 and 48 rows
        assert result.units.tolist() == [K * (96 + 48)] * N

    def test_wina_weighs_inputs_and_channels_by_their_columns(self, batch: Batch, layer: Layer) -> None:
        result = scored("wina", batch, layer, replace(ALL, gate=0.5))
        columns = of_slots(batch, layer.gate_up[:, 0]).norm(dim=2)
        weight = (batch.x.double().abs().unsqueeze(1) * columns).flatten(1)
        kept = torch.zeros_like(weight, dtype=torch.bool).scatter(1, weight.topk(K * 96).indices, True)
        x = batch.x.double().unsqueeze(1) * kept.view(N, K, H)
        gate = torch.einsum("nkh,nkih->nki", x, of_slots(batch, layer.gate_up[:, 0]))
        _, up = products(batch, layer)
        expected = (silu(gate) * up).abs() * of_slots(batch, layer.down).norm(dim=-1)
        torch.testing.assert_close(result.scores.double(), expected, **CLOSE)
        assert result.units.tolist() == [K * (96 + 192)] * N

    def test_rsparse_sends_what_it_drops_through_factors(self, batch: Batch, layer: Layer) -> None:
        """With factors of full rank nothing is lost, however few inputs are read."""
        result = scored("rsparse", batch, layer, replace(ALL, gate=0.1, up=0.1, factor_rank=I))
        gate, up = products(batch, layer)
        expected = (silu(gate) * up).abs() * of_slots(batch, layer.down).norm(dim=-1)
        torch.testing.assert_close(result.scores.double(), expected, **CLOSE)

    def test_prox_scores_by_rows_in_15_levels(self, batch: Batch, layer: Layer) -> None:
        weights = layer.gate_up.double()
        steps = weights.abs().amax(-1, keepdim=True) / 7
        rounded = of_slots(batch, (weights / steps).round() * steps)
        gate, up = torch.einsum("nh,nkcih->cnki", batch.x.double(), rounded)
        torch.testing.assert_close(scored("prox", batch, layer).scores.double(), (silu(gate) * up).abs(), **CLOSE)

    def test_hire_scores_what_is_nominated_exactly(self, batch: Batch, layer: Layer) -> None:
        result = scored("hire", batch, layer, replace(ALL, k=20, nominated=2.0))
        gate, up = products(batch, layer)
        nominated = result.scores.isfinite()
        assert nominated.flatten(1).sum(1).tolist() == [40] * N == result.units.tolist()
        torch.testing.assert_close(result.scores[nominated].double(), (silu(gate) * up).abs()[nominated], **CLOSE)

    def test_a_new_score_is_a_function(self, batch: Batch, layer: Layer) -> None:
        def first(batch: Batch, layer: Layer, plan: Plan, keep: object) -> Scored:
            known = get_score("oracle").function(batch, layer, plan, TopK())
            return replace(known, scores=-torch.arange(K * I).view(1, K, I).expand(N, -1, -1).float())

        output = run_block(batch, layer, Score("first", first, SCORES["oracle"].cost), Plan(k=5), TopK(), None)
        assert output.kept.tolist() == [5] * N

    def test_an_unknown_one_is_told(self) -> None:
        with pytest.raises(UsageError, match="known: reader, prox"):
            get_score("none")


@pytest.mark.parametrize("name", SCORES)
def test_with_everything_kept_every_selector_is_the_dense_layer(name: str, batch: Batch, layer: Layer) -> None:
    output = run_block(batch, layer, SCORES[name], ALL, TopK(), None)
    torch.testing.assert_close(output.y.double(), dense(batch, layer), **CLOSE)
    assert output.kept.tolist() == [K * I] * N


@pytest.mark.parametrize("recovered", [True, False])
def test_the_reader_s_block_is_the_reader(recovered: bool, batch: Batch, layer: Layer) -> None:
    rank = 32 if recovered else 0
    plan = Plan(k=30, coordinates=80, rank=rank)
    output = run_block(batch, layer, SCORES["reader"], plan, TopK(), weight_map(layer, rank) if recovered else None)
    expected = read(batch.x, batch.ids, batch.weights, layer.sketched, ReadSettings(30, 80, "variance", rank))
    torch.testing.assert_close(output.y, expected, **CLOSE)


class TestKept:
    """What is derived from weights takes no more memory than was allowed, and is the same either way."""

    def test_nothing_is_made_twice_while_it_fits(self) -> None:
        kept, made = Kept(1000), []
        for _ in range(2):
            for number in range(3):
                kept.get("a", number, lambda number=number: made.append(number) or torch.zeros(25))
        assert made == [0, 1, 2]
        assert kept.nbytes == 300

    def test_a_kind_that_does_not_fit_keeps_its_first(self) -> None:
        kept, made = Kept(250), []
        for _ in range(2):
            for number in range(4):
                for _ in range(2):  # the one that is being worked on is not made again either
                    kept.get("a", number, lambda number=number: made.append(number) or torch.zeros(25))
                assert kept.nbytes <= 250
        assert made == [0, 1, 2, 3, 2, 3]

    def test_the_kind_not_asked_for_longest_makes_room(self) -> None:
        kept = Kept(300)
        for kind in ("a", "b", "a", "c"):
            kept.get(kind, 0, lambda: torch.zeros(30))
        assert kept.get("a", 0, lambda: pytest.fail("was dropped")) is not None
        assert kept.nbytes == 240

    def test_what_can_never_fit_makes_nothing_else_go(self) -> None:
        kept = Kept(300)
        kept.get("a", 0, lambda: torch.zeros(30))
        assert len(kept.get("large", 0, lambda: torch.zeros(100))) == 100
        assert kept.get("a", 0, lambda: pytest.fail("was dropped")) is not None
        assert kept.nbytes == 120

    @pytest.mark.parametrize("name", SCORES)
    def test_scores_are_the_same_where_nothing_is_kept(self, name: str, batch: Batch) -> None:
        kept = Kept(0)
        plan = replace(ALL, coordinates=80, gate=0.5, up=0.5)
        found, expected = (scored(name, batch, make_layer(store), plan).scores for store in (kept, Kept()))
        assert torch.equal(found, expected)
        assert kept.nbytes == 0

    def test_a_layer_s_worth_of_large_tensors_is_counted(self, layer: Layer) -> None:
        """INT4 rows as bytes and a float32 scale each."""
        assert nbytes_of(layer.proxies) == E * 2 * I * (H + 4)


class TestSketching:
    def test_rows_that_are_not_rotated_are_those_of_the_code_s_own_fit(self, layer: Layer) -> None:
        raw = layer.sketched_as(Sketching(rotated=False)).sketched
        blocks = torch.nn.functional.pad(layer.gate_up, (0, -H % 128)).view(E, 2, I, -1, 128)
        _, scales, _ = fit(blocks.float(), raw.code)
        assert torch.equal(raw.scales, scales.transpose(2, 3))

    def test_a_token_is_cut_into_blocks_as_rows_are(self) -> None:
        x, signs = draw(3, H, seed=8), torch.ones(H, dtype=torch.int8)
        blocks = Sketching(rotated=False).rotate(x, signs)
        assert torch.equal(blocks.flatten(1)[:, :H], x)
        assert blocks.shape == (3, 2, 128)
        assert torch.equal(Sketching().rotate(x, signs), rotate(x, signs))

    def test_without_rotation_the_full_screen_estimates_the_same_products(self, batch: Batch, layer: Layer) -> None:
        """Quaternary codes of all coordinates, rotated and not: both within what such codes leave of a product."""
        gate, _ = products(batch, layer)
        errors = []
        for rotated in (True, False):
            other = layer.sketched_as(Sketching("quaternary", rotated=rotated))
            found = scored("reader", batch, other, ALL)
            errors.append(float((found.estimates.double() - found.values.double()).square().mean()))
        assert max(errors) < 0.5 * float(gate.square().mean())

    def test_reads_are_charged_for_the_sketch_in_use(self, layer: Layer) -> None:
        other = layer.sketched_as(Reader(codes="quaternary", rank=8, stored=8).sketching(layer.sketching))
        assert (other.shape.code.name, other.shape.rank) == ("quaternary", 8)
        assert other.sketched.basis.shape == (H, 8)

    @pytest.mark.parametrize(("rank", "stored", "made"), [(32, None, 32), (16, None, 32), (64, None, 64), (16, 16, 16)])
    def test_a_rank_below_the_stored_one_is_a_part_of_it(self, rank: int, stored: int | None, made: int) -> None:
        assert Reader(rank=rank, stored=stored).sketching(Sketching()).rank == made


class TestKeep:
    scores = draw(7, K, I, seed=5)

    def test_top_k_is_over_all_experts(self) -> None:
        kept = TopK()("channels", self.scores, 25)
        assert kept.flatten(1).sum(1).tolist() == [25] * 7
        assert self.scores[0][kept[0]].min() > self.scores[0][~kept[0]].max()

    def test_per_expert_every_expert_has_its_share(self) -> None:
        kept = TopKPerExpert()("channels", self.scores, 25)
        assert kept.sum(-1).tolist() == [[9, 8, 8]] * 7

    def test_a_threshold_is_strict(self) -> None:
        rule = Threshold({"channels": 1.0})
        assert rule("channels", torch.tensor([[[0.9, 1.0, 1.1]]]), 0).tolist() == [[[False, False, True]]]

    def test_calibration_meets_the_budget_on_average(self) -> None:
        rule = Calibrating()
        kept = rule("channels", self.scores, 25)
        counts = kept.flatten(1).sum(1)
        assert counts.sum() == 25 * 7
        assert counts.min() < 25 < counts.max()
        assert torch.equal(Threshold(rule.taus)("channels", self.scores, 25), kept)

    def test_ties_never_exceed_the_budget(self) -> None:
        assert int((torch.ones(4, 1, 5) > pooled_threshold(torch.ones(4, 1, 5), 2)).sum()) == 0

    def test_all_of_them(self) -> None:
        assert pooled_threshold(torch.zeros(4, 5), 5) == -float("inf")


class TestPlans:
    @pytest.mark.parametrize("name", SCORES)
    @pytest.mark.parametrize("reads", [0.45, 0.7])
    def test_top_k_reads_what_was_asked_for(self, name: str, reads: float, batch: Batch, layer: Layer) -> None:
        score = SCORES[name]
        plan = make_plan(score, layer, reads, Plan(), Split(layer, score) if score.inputs == "split" else None)
        output = run_block(batch, layer, score, plan, TopK(), None)
        used = output.sectors / layer.shape.native_sectors
        # what one more channel would cost, three rows of 12 sectors, and of HiRE two nominated ones
        assert (used <= reads + 1e-6).all()
        assert (used > reads - 60 / layer.shape.native_sectors).all()

    def test_a_split_is_better_than_an_even_share(self, layer: Layer) -> None:
        """On the tokens that it was found on: its first steps are chosen to cost the output least."""
        score = SCORES["teal"]
        split = make_plan(score, layer, 0.5, Plan(), Split(layer, score))
        even = replace(split, gate=0.5, up=0.5, k=K * I // 2)
        batch = layer.calibrated
        errors = [
            (run_block(batch, layer, score, plan, TopK(), None).y.double() - dense(batch, layer)).square().sum()
            for plan in (split, even)
        ]
        assert errors[0] <= errors[1]

    def test_it_is_found_once_for_all_jobs(self, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[Layer] = []

        def noted(of: Layer, score: Score) -> Split:
            found.append(of)
            return Split(of, score)

        monkeypatch.setattr("mreader.selectors.prepare.Split", noted)
        preparer = Preparer([layer])
        for reads in (0.5, 0.6):
            for recovery in ("none", "map"):
                preparer.prepare(Job("teal", "topk", recovery, reads))
        assert found == [layer]

    def test_a_path_is_the_same_with_masks_that_are_remembered(
        self, layer: Layer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("teal", "wina"):
            remembered = make_plan(SCORES[name], layer, 0.4, Plan(), Split(layer, SCORES[name]))
            monkeypatch.setattr("mreader.selectors.plans._SameTokens", TopK)
            assert make_plan(SCORES[name], layer, 0.4, Plan(), Split(layer, SCORES[name])) == remembered
            monkeypatch.undo()

    def test_prox_reads_at_least_three_tenths_of_its_inputs(self, layer: Layer) -> None:
        assert make_plan(SCORES["prox"], layer, 0.25, Plan(), None).gate == pytest.approx(0.3)
        # C = 3 * 0.4 of 3 matrices: 0.9 for channels, and (1.2 - 0.9) * 3 / 2 of the inputs
        assert make_plan(SCORES["prox"], layer, 0.4, Plan(), None).gate == pytest.approx(0.45)

    @pytest.mark.parametrize("name", ["cats", "park", "chess", "m-countdown"])
    def test_less_than_a_matrix_is_infeasible(self, name: str, layer: Layer) -> None:
        with pytest.raises(InfeasibleError, match=name):
            make_plan(SCORES[name], layer, 0.3, Plan(), None)

    def test_without_calibration_data_there_is_no_split(self, layer: Layer) -> None:
        bare = replace(layer, calibration=None)
        with pytest.raises(UsageError, match="--calibration"):
            make_plan(SCORES["teal"], bare, 0.3, Plan(), Split(bare, SCORES["teal"]))


class TestRecovery:
    def test_a_fitted_map_lowers_the_error_where_it_was_fitted(self, layer: Layer) -> None:
        batch, plan = layer.calibrated, Plan(k=60, rank=16)
        found = scored("cats", batch, layer, plan)
        kept = TopK()("channels", found.scores, plan.k)
        fitted = fit_map(batch, layer, found.values, found.estimates, kept, 16)
        without = run_block(batch, layer, SCORES["cats"], plan, TopK(), None).y
        errors = [
            (y.double() - dense(batch, layer)).square().sum()
            for y in (without, without + recover(batch, fitted, found.estimates, kept))
        ]
        assert errors[1] < errors[0]

    def test_a_gain_makes_an_activation_of_what_is_proportional_to_it(self, batch: Batch, layer: Layer) -> None:
        """Estimates of half the size fit a map with twice the gain."""
        a = scored("oracle", batch, layer).values
        kept = TopK()("channels", a.abs(), 100)
        maps = [fit_map(batch, layer, a, estimates, kept, 8) for estimates in (a, a / 2)]
        torch.testing.assert_close(maps[1].coeffs, 2 * maps[0].coeffs)


def test_factors_are_the_best_of_their_rank() -> None:
    weights = draw(I, H, seed=3)
    left, right = factorise(weights, 10)
    values = torch.linalg.svdvals(weights.double())
    error = (weights.double() - left.double() @ right.double()).square().sum()
    assert float(error) == pytest.approx(float(values[10:].square().sum()), rel=1e-4)


def test_rounded_rows_are_within_half_a_step() -> None:
    rows = draw(5, H, seed=4)
    levels, scales = round_rows(rows, 4)
    assert levels.abs().max() == 7
    assert ((rows - levels * scales.unsqueeze(-1)).abs() <= scales.unsqueeze(-1) / 2 + 1e-6).all()
