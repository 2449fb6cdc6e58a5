"""Step 3 of the decode block, second half: the exact top k over all candidates of a token."""

# N tokens, K routed experts of a token, I channels of an expert

import torch
from torch import Tensor


def top_k_mask(values: Tensor, k: int) -> Tensor:
    """The k largest along the last axis, ties to the lower index; all of them where k is not less than their number.

    values:  (..., M) float, no NaN
    returns: (..., M) bool, exactly min(k, M) of them true in each row
    """
    if k <= 0:
        return torch.zeros_like(values, dtype=torch.bool)
    if k >= values.shape[-1]:
        return torch.ones_like(values, dtype=torch.bool)
    # torch.topk breaks ties as it likes. The k-th value does not depend on how, so its equals are counted off here.
    threshold = values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = values > threshold, values == threshold
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))


def select(scores: Tensor, k: int) -> Tensor:
    """The k highest scores of each token over ALL its routed experts, ties to the lower (slot, channel).

    scores:  (N, K, I) float32 - -inf for the slots that no expert serves: selected only when nothing else is left
    returns: (N, K, I) bool - the channels to read exactly; one expert may get many and another none
    """
    return top_k_mask(scores.flatten(1), k).view_as(scores)
