"""Where to compute."""

import torch

from mreader.errors import UsageError


def pick_device(name: str) -> torch.device:
    """The torch device called "auto", "cpu" or "cuda[:N]"; UsageError where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device {name}", "choose auto, cpu or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {name}: torch sees {torch.cuda.device_count()} CUDA devices", "choose cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name} is not supported", "choose auto, cpu or cuda:N")
    return device
