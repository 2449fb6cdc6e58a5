"""The layout of the repository: three folders that show at the root, live in the package, and shadow nothing."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("kernels", "cli", "formats")

CODE = {"mreader", *LINKED, "tests", "examples"}
USUAL = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", ".gitignore", ".ci"}
OPTIONAL = {"docs", ".gitattributes"}


@pytest.mark.parametrize("name", LINKED)
class TestLinkedFolders:
    def test_link_at_the_root_points_into_the_package(self, name: str) -> None:
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).readlink() == Path("mreader") / name
        assert (ROOT / "mreader" / name).is_dir()

    def test_folder_has_no_init(self, name: str) -> None:
        """With one, a script that runs from the root would import it in place of the PyPI package `kernels`."""
        assert not (ROOT / "mreader" / name / "__init__.py").exists()


def test_package_kernels_of_pypi_wins_over_our_link(tmp_path: Path) -> None:
    """Also from the root, where the link comes first: a folder without __init__.py gives way to a real package."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    code = "import kernels; print(kernels.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == tmp_path / "kernels" / "__init__.py"


def test_top_level_of_the_tracked_tree() -> None:
    top = {path.split("/")[0] for path in _tracked()}
    assert CODE | USUAL <= top <= CODE | USUAL | OPTIONAL


def test_wheel_carries_the_data_that_the_code_reads() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert set(data["mreader.formats"]) == {"architectures.toml", "SPEC.md"}
    assert "py.typed" in data["mreader"]
    for package, names in data.items():
        for name in names:
            assert (ROOT / package.replace(".", "/") / name).is_file(), f"{package} promises {name}"


def test_triton_was_told_to_interpret_before_it_was_imported() -> None:
    """As conftest.py does, where there is no GPU: Triton looks once, when it is imported."""
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: kernels are compiled")
    assert triton.knobs.runtime.interpret


def _tracked() -> list[str]:
    """The files that git knows; skips where this is no checkout, like an unpacked archive."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("nothing is tracked yet")
    return done.stdout.splitlines()
