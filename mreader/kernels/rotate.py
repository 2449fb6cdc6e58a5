"""Step 1 of the decode block: rotate the token, and choose the coordinates whose codes are read."""

# N tokens, H hidden size, B block, nb = ceil(H/B) blocks

import math

import torch
from torch import Tensor

from mreader.formats.codes import BLOCK
from mreader.kernels.select import top_k_mask
from mreader.sketch import hadamard


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Rx, block by block: (Rx)_b = Hadamard_B / sqrt(B) . (signs * x)_b, the last block padded with zeros.

    x:       (N, H) any float - the tokens
    signs:   (H,) int8 - the layer's stored signs
    returns: (N, nb, B) float32; g . x = (Rg) . (Rx) for every row g rotated by the same signs
    """
    padded = torch.nn.functional.pad(x.float() * signs, (0, -x.shape[1] % BLOCK))
    blocks = padded.view(len(x), padded.shape[1] // BLOCK, BLOCK)
    return blocks @ hadamard(BLOCK).to(x.device) * (1 / math.sqrt(BLOCK))


def pick_coordinates(rx: Tensor, coordinates: int) -> Tensor:
    """The `coordinates` largest |Rx| of each block, ties to the lower coordinate.

    rx:      (N, nb, B) float32 - rotated tokens
    returns: (N, nb, B) bool - which coordinates are read; the same ones serve every expert of the token
    """
    return top_k_mask(rx.abs(), coordinates)
