"""Step 4 of the decode block: the kept channels, from their native weights."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert

import torch
from torch import Tensor

from mreader.activations import Activation
from mreader.kernels.screen import tokens_by_expert


def exact(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    kept: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
) -> Tensor:
    """y = sum over kept j of w_e * phi(g_j . x) * psi(v_j . x) * d_j, in float32; biases are added to the products.

    x:       (N, H) any float - the tokens, not rotated
    ids:     (N, K) int - routed experts; anything outside 0..E-1 contributes nothing
    weights: (N, K) float32 - routing weights
    kept:    (N, K, I) bool - the channels to read
    gate_up: (E, 2, I, H) any float - g_j and v_j, gate first
    down:    (E, I, H) any float - d_j, one contiguous row a channel
    bias:    (E, 2, I) any float - of gate and up
    returns: (N, H) float32
    """
    x, y = x.float(), torch.zeros_like(x, dtype=torch.float32)
    for expert, tokens, slots in tokens_by_expert(ids, down.shape[0]):
        mine = kept[tokens, slots]
        # A row is touched only if one of the expert's tokens keeps it; at N = 1 that is exactly the kept ones.
        channels = mine.any(0).nonzero().squeeze(1)
        both = x[tokens] @ gate_up[expert].index_select(1, channels).float().mT
        if bias is not None:
            both = both + bias[expert].index_select(1, channels).float().unsqueeze(1)
        a = torch.where(mine.index_select(1, channels), activation.gated(*both), 0.0)
        weighted = weights[tokens, slots].unsqueeze(-1) * a
        y.index_add_(0, tokens, weighted @ down[expert].index_select(0, channels).float())
    return y
