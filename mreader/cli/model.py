"""Loading model and tokenizer for the commands that run one."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mreader.errors import SourceError, UsageError
from mreader.formats.augmented import open_augmented

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("auto", "bfloat16", "float16", "float32")


def load_model(path: Path, dtype: str, device: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model in an augmented checkpoint's folder and its tokenizer; what is wrong with the folder is said first."""
    if dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype}", f"choose one of {', '.join(_DTYPES)}")
    open_augmented(path)

    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from mreader.runtime import load

    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # one bar is enough
    model = load(path, dtype=dtype, device=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} has no tokenizer", "copy the tokenizer files of the source into it") from error
    return model, tokenizer
