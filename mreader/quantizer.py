"""What transformers asks about a checkpoint whose `quantization_config` says `mreader`.

Imports no more of transformers than defines these two classes, since transformers may be half imported itself when they
are registered (mreader/registration.py).
"""

import logging
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from mreader.errors import UsageError
from mreader.formats.augmented import METHOD, parse_config_entry

logger = logging.getLogger(__name__)


@register_quantization_config(METHOD)
class MreaderConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of an augmented checkpoint."""

    def __init__(self, **entry: Any) -> None:
        self.quant_method = METHOD
        self.options = parse_config_entry({**entry, "quant_method": METHOD})

    def to_dict(self) -> dict[str, Any]:
        return self.options.config_entry()


@register_quantizer(METHOD)
class MreaderQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads the tensors of an augmented checkpoint into a stock model: mreader/runtime.py does the work."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        logger.warning("An augmented checkpoint is saved by copying its folder; `mreader restore` gives its source.")
        return False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from mreader.runtime import expect_format

        files = kwargs.get("checkpoint_files")
        if not files:
            raise UsageError("an augmented checkpoint is loaded from files", "name its folder or its Hub id")
        self._expected = expect_format(model, self.quantization_config.options, [Path(file) for file in files])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        from mreader.runtime import attach

        attach(model, self.quantization_config.options, self._expected)
