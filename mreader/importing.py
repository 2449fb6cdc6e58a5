"""Importing what takes seconds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """No looking for garbage while torch is imported: it makes so many objects, to stay to the end, that looking
    through them over and over takes a tenth to a quarter of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
