"""mreader: decode Mixture-of-Experts models by reading only the expert channels that matter.

    mreader.convert("Qwen/Qwen3-30B-A3B", "out")    # once, from the weights alone
    model = mreader.load("out")                     # or AutoModelForCausalLM.from_pretrained("out")
    mreader.set_budget(model, reads=0.178)

Importing this package registers augmented checkpoints with transformers. It imports neither torch nor transformers,
which take seconds: every name below is imported where it is first used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mreader.registration import register

if TYPE_CHECKING:
    from mreader.convert import convert
    from mreader.errors import MreaderError
    from mreader.formats.augmented import FormatOptions
    from mreader.restore import restore
    from mreader.runtime import load, reader_budget, reader_mode, set_budget
    from mreader.verify import verify

__all__ = [
    "FormatOptions",
    "MreaderError",
    "convert",
    "load",
    "reader_budget",
    "reader_mode",
    "restore",
    "set_budget",
    "verify",
]

_HOMES = {
    "FormatOptions": "mreader.formats.augmented",
    "MreaderError": "mreader.errors",
    "convert": "mreader.convert",
    "load": "mreader.runtime",
    "reader_budget": "mreader.runtime",
    "reader_mode": "mreader.runtime",
    "restore": "mreader.restore",
    "set_budget": "mreader.runtime",
    "verify": "mreader.verify",
}


class _Package(ModuleType):
    """This package. `mreader.convert` is the function, as `restore` and `verify` are, whichever import came first."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            return  # Python's import, which makes every submodule an attribute of its package
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


sys.modules[__name__].__class__ = _Package
register()
