"""Registers augmented checkpoints with transformers, once transformers is there.

transformers takes seconds to import and most commands do without it, so `import mreader` does not import it: the
registration runs now if transformers' quantizers are imported already, and else right after they are.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AWAITED = "transformers.quantizers.auto"
_REGISTERS = "mreader.quantizer"


def register() -> None:
    """Register now or as soon as transformers is imported. May be called again."""
    if _AWAITED in sys.modules:
        importlib.import_module(_REGISTERS)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds the awaited module as always, and has the registration run after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(_REGISTERS)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
