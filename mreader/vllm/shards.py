"""A rank's part of an augmented layer: some of its experts, or some channels of all of them."""

# E experts, H hidden size, I channels of an expert; a rank has E' of the experts and I' of the channels

from dataclasses import dataclass

from torch import Tensor

from mreader.formats.augmented import FormatOptions, tensor_specs
from mreader.formats.codes import Code, pack, unpack
from mreader.formats.safetensors_file import TensorSpec

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
