"""mreader: decode Mixture-of-Experts models by reading only the expert channels that matter.

    mreader.convert("Qwen/Qwen3-30B-A3B", "out")    # once, from the weights alone
    model = mreader.load("out")                     # or AutoModelForCausalLM.from_pretrained("out")
    mreader.set_budget(model, reads=0.178)

Importing this package registers augmented checkpoints with transformers.
"""

from typing import TYPE_CHECKING, Any

from mreader.convert import convert
from mreader.errors import MreaderError
from mreader.formats.augmented import FormatOptions
from mreader.registration import register
from mreader.restore import restore
from mreader.verify import verify

if TYPE_CHECKING:
    from mreader.runtime import load, reader_mode, set_budget

__all__ = ["FormatOptions", "MreaderError", "convert", "load", "reader_mode", "restore", "set_budget", "verify"]

register()


def __getattr__(name: str) -> Any:
    """What runs a model needs transformers, which takes seconds to import: only where it is used."""
    if name in ("load", "reader_mode", "set_budget"):
        from mreader import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
