"""Routers that are left to the reader's kernels, and those that stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mreader import opaque, routers
from mreader.kernels.route import rms_norm, route
from mreader.opaque import Experts


@pytest.fixture(autouse=True)
def _compilers_start_afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


E, H, K = 10, 6, 3
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]
"""logits (N, E) -> ids (N, K) and weights (N, K)."""


class Block(nn.Module):
    """A router and the experts that it chooses."""

    def __init__(self, choose: Choice) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = Experts(nn.Parameter(torch.zeros(E, 4, H), requires_grad=False))
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x, *self.choose(self.logits(x)))
        return output

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.gate(x)
        return found


def shares(logits: Tensor) -> Tensor:
    return nn.functional.softmax(logits, dtype=torch.float32, dim=-1)


def as_qwen3(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(shares(logits), K, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return ids, values.to(logits.dtype)


def as_olmoe(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(shares(logits), K, dim=-1)
    return ids, values.to(logits.dtype)


def as_mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(nn.functional.softmax(logits.float(), dim=-1), K, dim=-1)
    return ids, values / values.sum(dim=-1, keepdim=True)


def as_granite(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().topk(K, dim=-1)
    return ids, torch.softmax(values, dim=-1).type_as(logits)


def by_positions(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(torch.softmax(logits.to(torch.float32), -1), K, -1, True, True)
    return ids, torch.div(values, torch.sum(values, 1, keepdim=True))


def by_methods(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().softmax(1).topk(k=K, dim=1, largest=True, sorted=True)
    return ids, values.div(values.sum(dim=-1, keepdim=True))


PLAIN = [
    *((as_qwen3, True), (as_olmoe, False), (as_mixtral, True), (as_granite, True)),
    *((by_positions, True), (by_methods, True)),
]


def rounded_before(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).bfloat16().topk(K)
    return ids, values


def in_bfloat16(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.bfloat16().softmax(-1).topk(K)
    return ids, values


def narrowed(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits.to(torch.bfloat16)).topk(K)
    return ids, values


def narrowed_and_widened(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.to(torch.float8_e4m3fn).float().topk(K)
    return ids, shares(values)


def smallest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, largest=False)
    return ids, values


def smallest_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(K, -1, False)
    return ids, shares(values)


def in_any_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, sorted=False)
    return ids, values


def along_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().softmax(0).topk(K)
    return ids, values


def largest_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K, dim=0)
    return ids.mT, values.mT


def by_sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.sigmoid().topk(K)
    return ids, values / values.sum(-1, keepdim=True)


def with_a_bias(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = shares(logits)
    ids = (every + torch.arange(E)).topk(K)[1]
    return ids, every.gather(-1, ids)


def bias_on_the_shares(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = (shares(logits) + torch.arange(E)).topk(K)
    return ids, values


def scaled(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, 2.5 * values


def scaled_by_expert(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.sum(-1, keepdim=True) * torch.arange(E)[ids]


def scaled_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    values *= 2.5
    return ids, values


def divided_by_more(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / (values.sum(-1, keepdim=True) + 1e-2)


def divided_by_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = logits.exp()
    values, ids = every.topk(K)
    return ids, values / every.sum(-1, keepdim=True)


def divided_along_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.sum(0, keepdim=True)


def divided_by_a_rounded_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.sum(-1, keepdim=True, dtype=torch.bfloat16)


def divided_and_rounded(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, torch.div(values, values.sum(-1, keepdim=True), rounding_mode="floor")


def named_arguments(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(input=nn.functional.softmax(input=logits, dim=-1), k=K)
    return ids, torch.div(values, other=torch.sum(input=values, dim=-1, keepdim=True))


def named_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = nn.functional.softmax(input=logits, dim=-1).topk(K)
    return ids, values


def named_scores(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(input=shares(logits), k=K)
    return ids, values


def weights_are_integers(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values.to(torch.int64)


def divided_the_other_way(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values.sum(-1, keepdim=True) / values


def divided_by_a_named_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / torch.sum(input=values, dim=-1, keepdim=True)


def divided_sum_of_others(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, values / values.square().sum(-1, keepdim=True)


def of_other_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, _ = shares(logits).topk(K)
    return (-logits).topk(K)[1], values


def moved_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return (ids + 1) % E, values


def ids_changed_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    ids.fmod_(4)
    return ids, values


def logits_changed_after(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    logits.zero_()
    return ids, values


def logits_are_a_view(logits: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([logits, logits])
    values, ids = shares(both[: len(logits)]).topk(K)
    both.zero_()
    return ids, values


def weights_changed_in_place(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    weights = values / values.sum(-1, keepdim=True)
    weights[:, 0] = 1.0
    return ids, weights


def turned_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids.flip(-1), values


def places_as_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    _, ids = shares(logits).topk(K)
    return ids, ids / ids.sum(-1, keepdim=True)


def from_groups(logits: Tensor) -> tuple[Tensor, Tensor]:
    every = shares(logits)
    best = every.unflatten(-1, (2, -1)).amax(-1).argmax(-1, keepdim=True)
    values, ids = every.masked_fill(torch.arange(E) // (E // 2) != best, 0.0).topk(K)
    return ids, values


def of_masked_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    masked = logits.masked_fill(logits > 0.5, float("-inf"))
    values, ids = shares(masked).topk(K)
    return ids, values


def softmax_twice(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = shares(logits).topk(K)
    return ids, shares(values)


OTHERS = [
    *(narrowed, narrowed_and_widened, divided_by_a_rounded_sum, divided_and_rounded, named_arguments),
    divided_by_a_named_sum,
    named_scores,
    named_logits,
    weights_are_integers,
    *(rounded_before, in_bfloat16, smallest, smallest_logits, in_any_order, along_tokens, largest_tokens, by_sigmoid),
    *(with_a_bias, bias_on_the_shares, scaled, scaled_by_expert, scaled_in_place, divided_by_more, divided_by_all),
    *(divided_along_tokens, divided_the_other_way, divided_sum_of_others, of_other_ids, moved_ids),
    *(
        ids_changed_in_place,
        logits_changed_after,
        logits_are_a_view,
        weights_changed_in_place,
        turned_ids,
        places_as_weights,
        from_groups,
        of_masked_logits,
        softmax_twice,
    ),
]


class Chosen:
    """What the experts of a compiled block were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, chooses: bool = True) -> None:
        self.ids = self.weights = torch.empty(0)
        self.renormalize: bool | None = None  # none where the experts were told ids
        self.norms = False
        self.asked: list[int] = []
        monkeypatch.setattr(routers, "chooses_experts", lambda module, x, k: (self.asked.append(k), chooses)[1])
        monkeypatch.setattr(opaque, "experts_forward", self._forward)
        monkeypatch.setattr(opaque, "experts_by_logits", self._by_logits)
        monkeypatch.setattr(opaque, "experts_by_gate", self._by_gate)

    def of(self, choose: Choice, x: Tensor, *, dtype: torch.dtype = torch.float32) -> None:
        self.of_block(Block(choose).to(dtype), x)

    def of_block(self, block: Block, x: Tensor) -> None:
        with torch.no_grad(), opaque.serving({block.experts.down_proj.data_ptr(): block.experts}):
            block.gate.weight.copy_(torch.randn(E, H, generator=torch.Generator().manual_seed(1)))
            self.logits = block.logits(x.clone())
            self.expected = block.choose(self.logits.clone())
            torch.compile(block, backend=lambda graph, inputs: routers.route_in_kernels(graph))(x.clone())

    def _forward(self, module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.ids, self.weights, self.renormalize, self.norms = ids, weights, None, False
        return x.clone()

    def _by_logits(self, module: Any, x: Tensor, logits: Tensor, routed: int, renormalize: bool) -> Tensor:
        torch.testing.assert_close(logits, self.logits, rtol=0, atol=0)
        (self.ids, self.weights), self.renormalize = route(logits, routed, renormalize), renormalize
        self.norms = False
        return x.clone()

    def _by_gate(self, module: Any, x: Tensor, rows: Tensor, norm: Tensor, epsilon: float, *how: Any) -> Tensor:
        assert epsilon == EPSILON
        x = rms_norm(x, norm, epsilon)
        y = self._by_logits(module, x, nn.functional.linear(x, rows), *how)
        self.norms = True
        return y


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, H, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("choose", "renormalize"), PLAIN)
def test_a_plain_router_is_left_to_the_reader(
    choose: Choice, renormalize: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are those of the router but for their type, BF16 where that is the model's: half a unit, 2^-8."""
    chosen = Chosen(monkeypatch)
    chosen.of(choose, tokens(dtype), dtype=dtype)
    ids, weights = chosen.expected
    assert chosen.renormalize == renormalize
    assert chosen.asked == [K]
    assert torch.equal(chosen.ids, ids)
    tolerance = 1e-6 if weights.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(chosen.weights, weights.float(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("choose", OTHERS)
def test_any_other_router_stays(choose: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch)
    chosen.of(choose, tokens())
    ids, weights = chosen.expected
    assert chosen.renormalize is None
    assert torch.equal(chosen.ids, ids)
    torch.testing.assert_close(chosen.weights, weights)


def test_a_router_in_16_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shares that are rounded to the same number, the first is the largest; of their logits, another one may be."""
    chosen = Chosen(monkeypatch)
    chosen.of(lambda logits: logits.softmax(-1).topk(K)[::-1], tokens(torch.bfloat16), dtype=torch.bfloat16)
    assert chosen.renormalize is None


def test_a_router_stays_where_the_kernels_do_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, chooses=False)
    chosen.of(as_qwen3, tokens())
    assert chosen.renormalize is None
    assert chosen.asked == [K]


EPSILON = 1e-3


class Normed(Block):
    """The router of tokens that are normed as most models do it."""

    def __init__(self, choose: Choice, *, bias: bool = False) -> None:
        super().__init__(choose)
        self.gate = nn.Linear(H, E, bias=bias)
        self.weight = nn.Parameter(torch.rand(H, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        output: Tensor = self.experts(x, *self.choose(self.of_normed(x)))
        return output

    def logits(self, x: Tensor) -> Tensor:
        return self.of_normed(self.norm(x))

    def of_normed(self, x: Tensor) -> Tensor:
        found: Tensor = self.gate(x)
        return found

    def norm(self, x: Tensor) -> Tensor:
        number = x.to(torch.float32)
        number = number * torch.rsqrt(number.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * number.to(x.dtype)


class OfSequences(Normed):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x.view(2, 2, H)).view(-1, H)
        output: Tensor = self.experts(rows, *self.choose(self.of_normed(rows)))
        return output.view(2, 2, H)

    def of_normed(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.reshape(-1, H), self.gate.weight, None)


class InTheOtherOrder(Normed):
    def norm(self, x: Tensor) -> Tensor:
        number = x.float()
        root = (number.pow(2).mean(dim=-1, keepdim=True) + EPSILON).rsqrt()
        return (root * number).type_as(x) * self.weight


class WithAnExpertBetween(Normed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        ids, weights = self.choose(self.of_normed(x))
        shared = self.weight.tanh()
        output: Tensor = self.experts(x, ids, weights)
        return output + shared


class WithAnotherUse(Normed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        output: Tensor = self.experts(x, *self.choose(self.of_normed(x)))
        return output + x


class WithAnotherUseAndItsType(Normed):
    """What weights take their type from has nothing to do with them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        ids, weights = self.choose(self.of_normed(x))
        output: Tensor = self.experts(x, ids, weights.type_as(x))
        return output + x


class OfChangedTokens(Normed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        ids, weights = self.choose(self.of_normed(x))
        x.add_(1.0)
        output: Tensor = self.experts(x, ids, weights)
        return output


class OfTokensChangedBefore(Normed):
    """The kernels would norm what is there by then."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x.zero_()
        output: Tensor = self.experts(normed, *self.choose(self.of_normed(normed)))
        return output


class OfOtherTokens(Normed):
    def of_normed(self, x: Tensor) -> Tensor:
        return super().of_normed(2 * x)


class OfTokensBeforeTheirNorm(Normed):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        output: Tensor = self.experts(normed, *self.choose(self.of_normed(x)))
        return output

    def logits(self, x: Tensor) -> Tensor:
        return self.of_normed(x)


class OfOtherRows(Normed):
    """The same numbers, in rows that are others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        output: Tensor = self.experts(x.reshape(H, 4).mT.reshape(4, H), *self.choose(self.of_normed(x)))
        return output


class OfAMatrixThatIsMade(Normed):
    def of_normed(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.gate.weight)


class OfAMatrixThatLiesOtherwise(Normed):
    def __init__(self, choose: Choice) -> None:
        super().__init__(choose)
        self.gate.weight = nn.Parameter(torch.zeros(H, E).mT)


class OfAnotherType(Normed):
    def of_normed(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.double(), self.gate.weight.double())


class WithABias(Normed):
    def __init__(self, choose: Choice) -> None:
        super().__init__(choose, bias=True)


class WithAMadeNorm(Normed):
    """As Gemma's and Qwen3-Next's, whose weights are one less."""

    def norm(self, x: Tensor) -> Tensor:
        number = x.float()
        number = number * torch.rsqrt(number.pow(2).mean(-1, keepdim=True) + EPSILON)
        return (1.0 + self.weight) * number.to(x.dtype)


class WithOneWeight(Normed):
    def __init__(self, choose: Choice) -> None:
        super().__init__(choose)
        self.weight = nn.Parameter(torch.full((1,), 1.5))


class OfOneNumber(Normed):
    def norm(self, x: Tensor) -> Tensor:
        return super().norm(x[:, :1])


class OfRoundedTokens(Normed):
    def norm(self, x: Tensor) -> Tensor:
        number = x.bfloat16().float()
        return self.weight * (number * torch.rsqrt(number.pow(2).mean(-1, keepdim=True) + EPSILON))


class InFloat64(Normed):
    def norm(self, x: Tensor) -> Tensor:
        number = x.to(torch.float64)
        number = number * torch.rsqrt(number.pow(2).mean(-1, keepdim=True) + EPSILON)
        return self.weight * number.to(x.dtype)


class WithAnotherRoot(Normed):
    def norm(self, x: Tensor) -> Tensor:
        number = x.float()
        return self.weight * (number * torch.rsqrt(self.squared(number))).to(x.dtype)

    def squared(self, number: Tensor) -> Tensor:
        raise NotImplementedError


class WithAMeanTakenOff(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return (number - number.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + EPSILON


class WithAnotherPower(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(4).mean(-1, keepdim=True) + EPSILON


class WithNoPower(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.clamp(2).mean(-1, keepdim=True) + EPSILON


class WithASum(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(2).sum(-1, keepdim=True) + EPSILON


class WithTheMeanOfTokens(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(2).mean(0, keepdim=True) + EPSILON


class WithARoundedMean(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16) + EPSILON


class WithEpsilonTakenOff(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(2).mean(-1, keepdim=True) - EPSILON


class WithEpsilonsThatAreTaught(WithAnotherRoot):
    def squared(self, number: Tensor) -> Tensor:
        return number.pow(2).mean(-1, keepdim=True) + self.weight


class WithTheRootUsedElsewhere(Normed):
    def forward(self, x: Tensor) -> Tensor:
        number = x.float()
        root = torch.rsqrt(number.pow(2).mean(-1, keepdim=True) + EPSILON)
        x = self.weight * (number * root).to(x.dtype)
        output: Tensor = self.experts(x, *self.choose(self.of_normed(x)))
        return output * root


class OfSquaresOfLowPrecision(Normed):
    def norm(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Normed, OfSequences, InTheOtherOrder])
def test_a_gate_and_the_norm_before_it_are_left_to_the_reader(
    kind: type[Normed], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Chosen(monkeypatch)
    chosen.of_block(kind(as_qwen3).to(dtype), tokens(dtype))
    assert chosen.renormalize
    assert chosen.norms
    assert torch.equal(chosen.ids, chosen.expected[0])


@pytest.mark.parametrize(
    "kind",
    [
        *(WithAnExpertBetween, WithAnotherUse, WithAnotherUseAndItsType, OfChangedTokens, OfTokensChangedBefore),
        *(
            OfTokensBeforeTheirNorm,
            OfOneNumber,
            OfRoundedTokens,
            InFloat64,
            OfOtherTokens,
            OfOtherRows,
            OfAMatrixThatIsMade,
            OfAMatrixThatLiesOtherwise,
        ),
        *(OfAnotherType, WithABias, WithAMadeNorm, WithOneWeight, WithAMeanTakenOff, WithAnotherPower, WithNoPower),
        *(WithASum, WithTheMeanOfTokens, WithARoundedMean, WithEpsilonTakenOff, WithEpsilonsThatAreTaught),
        *(WithTheRootUsedElsewhere, OfSquaresOfLowPrecision),
    ],
)
def test_of_any_other_gate_or_norm_the_reader_gets_logits(kind: type[Normed], monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands between could change the tokens in place, which the kernels would norm as they are by then."""
    chosen = Chosen(monkeypatch)
    chosen.of_block(kind(as_qwen3), tokens())
    assert chosen.renormalize
    assert not chosen.norms
    assert torch.equal(chosen.ids, chosen.expected[0])


@pytest.mark.parametrize(("few", "norms"), [(4 * H * E, True), (4 * H * E - 1, False)])
def test_a_gate_is_left_to_the_reader_for_few_tokens(few: int, norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_FEW_PRODUCTS", few)
    chosen = Chosen(monkeypatch)
    chosen.of_block(Normed(as_olmoe), tokens())
    assert chosen.norms == norms
