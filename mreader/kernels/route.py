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
