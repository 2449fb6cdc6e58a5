"""Step 5 of the decode block: the skipped channels, estimated and laid through the recovery map."""

# N tokens, E experts, K routed experts of a token, H hidden size, I channels of an expert, r rank in use

from torch import Tensor

from mreader.kernels.screen import tokens_by_expert


def recover(p: Tensor, ids: Tensor, weights: Tensor, kept: Tensor, basis: Tensor, coeffs: Tensor) -> Tensor:
    """y = U . sum over skipped j of w_e * p_j * b_j, in float32.

    p:       (N, K, I) float32 - estimated activations phi(ghat_j) * vhat_j
    ids:     (N, K) int - routed experts; anything outside 0..E-1 contributes nothing
    weights: (N, K) float32 - routing weights
    kept:    (N, K, I) bool - the channels that were read, which have nothing to recover
    basis:   (H, r) float16 - U
    coeffs:  (E, I, r) float16 - b_j
    returns: (N, H) float32
    """
    folded = p.new_zeros(p.shape[0], basis.shape[1])
    skipped = p.masked_fill(kept, 0.0) * weights.unsqueeze(-1)
    for expert, tokens, slots in tokens_by_expert(ids, coeffs.shape[0]):
        folded.index_add_(0, tokens, skipped[tokens, slots] @ coeffs[expert].float())
    return folded @ basis.float().mT
