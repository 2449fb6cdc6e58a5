"""Memory of a process that works through many buffers of a few megabytes, and then ends."""

import atexit
import ctypes
import gc
import sys

# <malloc.h> of glibc
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Have glibc reuse freed buffers instead of giving them back to the kernel, which then clears every page again.

    Page faults are a third of a conversion's time otherwise. Only a command does this, never the library: the setting
    is for the whole process. Without glibc nothing happens.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):
            library.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
            library.mallopt(_M_MMAP_THRESHOLD, 1 << 25)


def end_at_once() -> None:
    """Have Python end without looking for garbage among all that torch has made, which takes it half a second.

    Only where the command is what imports torch: another program may count on being cleaned up. Not where something
    has brought triton in, whose bindings would list on stderr all that is left.
    """
    if "torch" not in sys.modules:
        atexit.register(_leave_garbage)


def _leave_garbage() -> None:
    if "triton" not in sys.modules:
        gc.freeze()
