"""mreader: decode Mixture-of-Experts models by reading only the expert channels that matter.

    mreader.convert("Qwen/Qwen3-30B-A3B", "out")    # once, from the weights alone
    model = mreader.load("out")                     # or AutoModelForCausalLM.from_pretrained("out")
    mreader.set_budget(model, reads=0.178)

Importing this package registers augmented checkpoints with transformers.
"""

from mreader.convert import convert
from mreader.errors import MreaderError
from mreader.formats.augmented import FormatOptions
from mreader.restore import restore
from mreader.runtime import load, reader_mode, register, set_budget
from mreader.verify import verify

__all__ = ["FormatOptions", "MreaderError", "convert", "load", "reader_mode", "restore", "set_budget", "verify"]

register()
