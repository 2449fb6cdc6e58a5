"""The command line, in this process, and folders before and after it."""

from __future__ import annotations

import io
import stat
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from mreader.cli.main import main


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def cause(self) -> str:
        """The one line that says what went wrong; there must be one line of help after it, and nothing else."""
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert lines[0].startswith("error: "), self.err
        assert lines[1].startswith("help: "), self.err
        assert len(lines[1]) > len("help: "), self.err
        return lines[0]


def mreader(*arguments: object) -> Ran:
    """`mreader ARGUMENTS`."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["mreader", *map(str, arguments)])
    with argv, redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def contents(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Every file, link and folder below `folder` -> mode and bytes (of a link: where it leads)."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = mode, str(path.readlink())
        else:
            found[name] = mode, path.read_bytes() if stat.S_ISREG(mode) else b""
    return found
