"""Which experts serve a token, and with what weights: the usual router, where the decode block takes its logits."""

# N tokens, E experts, K routed experts of a token

from torch import Tensor

MOST_EXPERTS = 256  # that the kernel chooses from: it compares all with all


def route(logits: Tensor, routed: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The K largest logits, weighted by their softmax over all experts; renormalized, over the K.

    logits:  (N, E) any float
    routed:  K
    returns: ids (N, K) int64 by falling logit, equal ones by number; weights (N, K) float32

    Of logits that are no numbers the kernel may choose others.
    """
    logits = logits.float()
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :routed]
    shares = logits.softmax(-1).gather(-1, ids)
    return ids, shares / shares.sum(-1, keepdim=True) if renormalize else shares


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean of x^2 + epsilon): mean and root in float32, the quotient rounded to x's dtype.

    x:       (..., H) any float
    weight:  (H,) dtype of x
    returns: (..., H) dtype of x
    """
    number = x.float()
    scale = (number.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return weight * (number * scale).to(x.dtype)
