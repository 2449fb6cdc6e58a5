"""Keep rules: which of the scored things a token reads. A rule is a function of scores; it knows no score's name."""

# N tokens, S slots that compare (1, or the K routed experts), M things of a slot

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from mreader.kernels.select import top_k_mask


class Keep(Protocol):
    """(stage, scores (N, S, M), count) -> (N, S, M) bool, about `count` of them a token.

    stage: what is kept: "gate" or "up" inputs, "nominated" channels, "channels"
    """

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor: ...


class TopK:
    """Exactly the `count` highest of each token, over all its slots together; ties to the lower one."""

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor:
        return top_k_mask(scores.flatten(1), count).view_as(scores)


class TopKPerExpert:
    """count / S of each slot; what does not divide goes to the first slots, one each."""

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor:
        each, more = divmod(count, scores.shape[1])
        kept = top_k_mask(scores, each)
        if more:
            kept[:, :more] = top_k_mask(scores[:, :more], each + 1)
        return kept


@dataclass(frozen=True)
class Threshold:
    """Scores above a fixed value, strictly. How many that is, the token decides.

    taus: stage -> value, of one layer
    """

    taus: dict[str, float]

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor:
        return scores > self.taus[stage]


@dataclass(frozen=True)
class Calibrating:
    """Keeps by the threshold under which these tokens keep `count` each on average, and remembers it.

    Stages follow one another: each is calibrated on what the thresholds before it let through.
    """

    taus: dict[str, float] = field(default_factory=dict)

    def __call__(self, stage: str, scores: Tensor, count: int) -> Tensor:
        self.taus[stage] = pooled_threshold(scores, count)
        return scores > self.taus[stage]


def pooled_threshold(scores: Tensor, count: float) -> float:
    """The value that round(N * count) of all scores are above, ties aside: strictly greater, so never more.

    scores: (N, ...) - of N tokens
    """
    number = round(len(scores) * count)
    pooled = scores.flatten()
    if number >= pooled.numel():
        return -float("inf")
    return float(pooled.kthvalue(pooled.numel() - number).values)
