"""Where to compute."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mreader.errors import UsageError
from mreader.importing import uninterrupted, without_collecting

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def refuse_unknown_device(name: str) -> None:
    """UsageError where `name` is not one that `pick_device` takes, without torch, which takes seconds to import."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"there is no device {name}", "choose auto, cpu or cuda:N")


def pick_device(name: str) -> torch.device:
    """The torch device called "auto", "cpu" or "cuda[:N]"; UsageError where there is none."""
    refuse_unknown_device(name)
    with without_collecting(), uninterrupted():
        import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {name}: torch sees {torch.cuda.device_count()} CUDA devices", "choose cpu"
        )
    return device
