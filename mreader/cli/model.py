"""Loading model and tokenizer for the commands that run one."""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mreader.backend import layout_on
from mreader.budget import Budget
from mreader.device import pick_device
from mreader.errors import SourceError, UsageError
from mreader.formats.augmented import open_augmented
from mreader.inspection import block_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class BudgetOptions:
    """The budget as the command line gives it; None is the checkpoint's default."""

    channels: float | None
    reads: float | None
    coordinates: int | None
    score: str | None
    rank: int | None


def load_model(
    path: Path, budget: BudgetOptions, dtype: str, device: str
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model in an augmented checkpoint's folder, under `budget`, and its tokenizer.

    What is wrong with the options or the folder is said before anything large is loaded.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype}", f"choose one of {', '.join(_DTYPES)}")
    layout = layout_on(pick_device(device))
    augmented = open_augmented(path)
    default = Budget.of(augmented.options)
    default.change(**asdict(budget)).resolve(replace(block_shape(augmented), layout=layout))

    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from mreader.runtime import load, set_budget, text_part

    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # one bar is enough
    model = load(path, dtype=dtype, device=device)
    set_budget(model, **asdict(budget))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} has no tokenizer", "copy the tokenizer files of the source into it") from error
    return text_part(model), tokenizer
