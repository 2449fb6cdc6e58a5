"""What all tests share: an environment without network or GPU surprises, and the small model, converted once."""

import os
import shutil

# Triton reads this when it is imported: without a GPU its kernels run in the interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Workers that run side by side share the cores, and so do the processes that they start.
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


@pytest.fixture(autouse=True)
def offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks the real Hub; modules that start one of their own (tests/hub_server.py) are online, with that."""
    if hasattr(request.module, "HubServer"):
        return
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def olmoe_tiny() -> Path:
    """A small OLMoE, really trained; see its README.md."""
    return EXAMPLES / "olmoe-tiny"


@pytest.fixture(scope="session")
def olmoe_augmented(olmoe_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, converted with the default options. Shared: tests that change it copy it first."""
    from mreader.convert import convert

    out = tmp_path_factory.mktemp("augmented") / "olmoe-tiny"
    convert(olmoe_tiny, out, device="cpu")
    return out
