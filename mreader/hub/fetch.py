"""Reading a source from the Hub: its file list, texts and headers alone, or the whole checkpoint."""

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError

from mreader.errors import NoSpaceError, SourceError, UnreachableError
from mreader.formats.checkpoint import CONFIG, open_checkpoint, select_files
from mreader.hub.http import client, download, explained, patiently
from mreader.output import free_bytes

_HEADER_GUESS = 1 << 17
_LARGEST_TEXT = 200_000_000

_LOG = logging.getLogger("mreader")


@dataclass(frozen=True)
class RemoteRepo:
    """A model repository at one commit, read in pieces and without a download.

    repo:   id on the Hub
    commit: the commit that `revision` meant when the repository was opened
    files:  bytes of every file, by name
    Every method raises SourceError with the reason.
    """

    repo: str
    commit: str
    files: Mapping[str, int]
    _api: HfApi = field(repr=False, compare=False)

    def read_text(self, name: str) -> str:
        """The whole of a small file, decoded from UTF-8."""
        size = self._size(name)
        if size > _LARGEST_TEXT:
            raise SourceError(f"{name} of {self.repo} has {size} bytes, too many for a text file")
        try:
            return self._read(name).decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"{name} of {self.repo} is not UTF-8: {error}") from error

    def header(self, name: str) -> bytes:
        """The JSON header of a safetensors file: bytes 8 to 8 + n, n the little-endian number in bytes 0 to 8."""
        size = self._size(name)
        start = self._read(name, stop=min(size, _HEADER_GUESS))
        length = int.from_bytes(start[:8], "little")
        if size < 8 or length > min(size - 8, _LARGEST_TEXT):
            raise SourceError(f"{name} of {self.repo} is no safetensors file, or a part of one ({size} bytes)")
        if 8 + length > len(start):
            start += self._read(name, start=len(start), stop=8 + length)
        return start[8 : 8 + length]

    def _read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        with explained(self._api, self.repo, self.commit, SourceError):
            return download(self._api, self.repo, self.commit, name, start=start, stop=stop)

    def _size(self, name: str) -> int:
        if name not in self.files:
            raise SourceError(f"{self.repo} at {self.commit} has no file {name}")
        return self.files[name]


def remote_headers(repo: str, revision: str | None = None, token: str | None = None) -> RemoteRepo:
    """Open `repo` at `revision` (None: the default branch) for reading in pieces; the commit is fixed here.

    Raises UsageError for an impossible id, UnreachableError where the Hub cannot be asked, SourceError with the reason
    for everything else.
    """
    return _open(client(token), repo, revision)


def fetch_snapshot(repo: str, revision: str | None = None, token: str | None = None) -> Path:
    """Download the checkpoint of `repo` into the Hub cache, or find it there; returns the snapshot folder.

    The folder's name is the commit. Fetched is what belongs to the checkpoint, as in a local folder: never another
    format of the same weights. Where the Hub cannot be asked, the snapshot of an earlier run is used.
    Raises UsageError, SourceError, UnsupportedError, NoSpaceError with the reason and the remedy.
    """
    api = client(token)
    try:
        remote = _open(api, repo, revision)
    except UnreachableError:
        cached = _cached_snapshot(api, repo, revision)
        if cached is None:
            raise
        _LOG.warning("%s cannot be reached: using the snapshot in the cache, %s", api.endpoint, cached)
        return cached
    names = select_files(remote.files, remote.read_text).names
    _check_room(remote, names)
    patterns = [glob.escape(name) for name in names]
    with explained(api, repo, revision, SourceError):
        # By name, not by commit: the cache then knows what the branch was, for a later run without a network.
        folder = Path(str(api.snapshot_download(repo, revision=revision, allow_patterns=patterns)))
    if folder.name == remote.commit:
        _check_sizes(remote, folder, names)
    return folder


def _open(api: HfApi, repo: str, revision: str | None) -> RemoteRepo:
    with explained(api, repo, revision, SourceError):
        info = patiently(lambda: api.model_info(repo, revision=revision, files_metadata=True))
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return RemoteRepo(repo, str(info.sha), files, api)


def _cached_snapshot(api: HfApi, repo: str, revision: str | None) -> Path | None:
    """The snapshot of an earlier run, if its weights are whole."""
    try:
        found = api.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[CONFIG])
        return open_checkpoint(Path(str(found))).path
    except (LocalEntryNotFoundError, SourceError):
        return None


def _check_room(remote: RemoteRepo, names: Sequence[str]) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    absent = [name for name in names if not _is_cached(remote, name)]
    needed, free = sum(remote.files[name] for name in absent), free_bytes(cache)
    if needed > free:
        raise NoSpaceError(
            f"{remote.repo} needs {needed:,} bytes in the Hub cache {cache}, and {free:,} are free",
            "make room, or set HF_HOME to a folder on a larger disk",
        )


def _is_cached(remote: RemoteRepo, name: str) -> bool:
    return isinstance(try_to_load_from_cache(remote.repo, name, revision=remote.commit), str)


def _check_sizes(remote: RemoteRepo, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != remote.files[name]:
            raise SourceError(
                f"{path} has {size} bytes and {remote.repo} says {remote.files[name]}",
                "delete that file and run the same command again",
            )
