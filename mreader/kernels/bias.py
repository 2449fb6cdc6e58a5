"""Biases of gate, up and down: added to what the sketch estimates, and to the block's output whatever is skipped."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert

from dataclasses import replace

from torch import Tensor

from mreader.kernels.screen import Estimates


def with_bias(estimates: Estimates, ids: Tensor, bias: Tensor | None) -> Estimates:
    """ghat_j + beta(g_j) and vhat_j + beta(v_j); the estimates themselves where there are no biases.

    ids:  (N, K) int - routed experts; the slots that no expert serves get those of any
    bias: (E, 2, I) any float - gate first
    """
    if bias is None:
        return estimates
    gate, up = bias[_known(ids, bias)].float().unbind(2)
    return replace(estimates, gate=estimates.gate + gate, up=estimates.up + up)


def add_down_bias(y: Tensor, ids: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """y + sum over routed e of w_e * beta_e; y itself where there are no biases.

    y:       (N, H) float32
    ids:     (N, K) int - routed experts
    weights: (N, K) float32 - routing weights, 0 in the slots that no expert serves
    bias:    (E, H) any float
    """
    if bias is None:
        return y
    return y + (weights.unsqueeze(1) @ bias[_known(ids, bias)].float()).squeeze(1)


def _known(ids: Tensor, bias: Tensor) -> Tensor:
    return ids.clamp(0, len(bias) - 1)
