"""A rank's part of an augmented layer: some of its experts, or some channels of all of them."""

# E experts, H hidden size, I channels of an expert; a rank has E' of the experts and I' of the channels

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mreader.formats.augmented import FormatOptions, tensor_specs
from mreader.formats.codes import Code
from mreader.formats.coding import pack, unpack
from mreader.formats.safetensors_file import TensorSpec
from mreader.reader import ExpertLayer, ReadSettings, read

# The axis of a part that counts channels; codes are packed along theirs, and what is not named belongs to no channel.
_CHANNEL_AXIS = {
    "gate_up_proj": 2,
    "down_proj": 1,
    "sketch_scales": 3,
    "sketch_errors": 3,
    "down_norms": 1,
    "recovery_coeffs": 1,
}
_OF_THE_LAYER = ("sketch_signs", "recovery_basis")


@dataclass(frozen=True)
class Shard:
    """What a rank has of a layer.

    experts:  numbers of its experts, in its own order
    channels: of each of them
    of:       I, how many the checkpoint has
    """

    experts: tuple[int, ...]
    channels: range
    of: int

    def specs(self, hidden: int, dtype: str, options: FormatOptions) -> dict[str, TensorSpec]:
        """Name below the experts' prefix -> dtype and shape of what the rank keeps of it."""
        return tensor_specs(len(self.experts), len(self.channels), hidden, dtype, options)

    def copy(self, part: str, stored: Tensor, target: Tensor, code: Code) -> None:
        """target = the rank's part of the stored tensor, in the dtype and on the device of `target`."""
        if part in _OF_THE_LAYER:
            target.copy_(stored)
            return
        for place, expert in enumerate(self.experts):
            target[place].copy_(self._channels_of(part, stored[expert], code))

    def _channels_of(self, part: str, stored: Tensor, code: Code) -> Tensor:
        """The rank's channels of one expert's tensor."""
        if len(self.channels) == self.of:
            return stored
        if part == "sketch_codes":
            return pack(unpack(stored, code, self.of)[..., self.channels.start : self.channels.stop], code)
        return stored.narrow(_CHANNEL_AXIS[part] - 1, self.channels.start, len(self.channels))


def read_share(x: Tensor, ids: Tensor, weights: Tensor, layer: ExpertLayer, settings: ReadSettings) -> Tensor:
    """`read` of the experts that a rank has, with k n / K channels for a token that has n of its K experts there.

    x:        (T, H) any float
    ids:      (T, K) int - places among the rank's experts, -1 for those of other ranks
    weights:  (T, K) any float
    settings: k is that of a token all of whose experts are here
    returns:  (T, H) dtype of x - what all ranks return adds up to the token's output
    """
    y = torch.zeros_like(x)
    here = (ids >= 0).sum(1)
    for n in sorted(set(here.tolist())):
        rows = here == n
        share = replace(settings, k=(2 * settings.k * n + ids.shape[1]) // (2 * ids.shape[1]))
        y[rows] = read(x[rows], ids[rows], weights[rows], layer, share)
    return y
