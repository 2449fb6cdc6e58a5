"""What computes the routed experts on a device: Triton kernels on a CUDA device, torch everywhere else."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from mreader.budget import DISK, Layout


def runs_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels serve the device."""
    return device.type == "cuda" and _has_triton()


def layout_on(device: torch.device) -> Layout:
    """How the sketch is laid out where the device reads it, which decides what a read costs."""
    if not runs_kernels(device):
        return DISK
    from mreader.kernels.layout import GPU

    return GPU


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within the block, the device is CUDA's current one: kernels are launched there, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
