"""The Hugging Face Hub: publishing an augmented checkpoint, and reading a source from it.

Both sides end in one line of cause and one of remedy. What the Hub refuses (401, 403, 404) ends at once; what may pass
(429, 5xx, a dropped connection) is tried a few times; after that the same command run again takes up where it stopped.
"""

import errno
import glob
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    hf_hub_url,
    hf_raise_for_status,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, validate_repo_id  # type: ignore[attr-defined]

from mreader import card
from mreader.errors import MreaderError, NoSpaceError, SourceError, UnsupportedError, UsageError, VerifyError

MANIFEST = "mreader_manifest.json"
CARD = "README.md"
INDEX = "model.safetensors.index.json"
DEFAULT_BRANCH = "main"
DEFAULT_MESSAGE = "Upload augmented checkpoint (mreader)"

# huggingface_hub 1.x raises httpx's errors and 2.x those of httpx2: both are the base of its own error.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
_FAILURES = (_HTTP_ERROR, OSError, HFValidationError, RuntimeError, ValueError)
_PASSING = (408, 429, 500, 502, 503, 504)
_WAITS = (1.0, 3.0)
_CHUNK = 1 << 20
_HEADER_GUESS = 1 << 17
_LARGEST_TEXT = 200_000_000

_COPIED = (".json", ".jsonl", ".model", ".txt", ".jinja", ".py", ".md", ".tiktoken", ".spm", ".vocab", ".merges")
_LICENCES = ("license", "licence", "notice", "copying", "use_policy")
_TEMPLATES = "additional_chat_templates/"
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack", ".ckpt")

_LOG = logging.getLogger("mreader")

T = TypeVar("T")


# Publishing.


@dataclass(frozen=True)
class PushResult:
    """Where a checkpoint was published.

    url:         page of the repository, branch or pull request
    commit:      the commit that holds the checkpoint
    revision:    branch, or refs/pr/N of a pull request
    uploaded:    names of the files in the new commit; () if all were there already
    deleted:     names of files of an older conversion that the new commit removes
    notes:       what the user should know, one line each
    """

    url: str
    commit: str
    revision: str
    uploaded: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _File:
    """A file to publish: `content` is its bytes, or its path."""

    name: str
    size: int
    sha256: str
    content: bytes | Path

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(frozen=True)
class _Wish:
    """What the user asked for, with the full id of the repository and the name of the account."""

    repo: str
    user: str
    private: bool
    revision: str
    message: str
    create_pr: bool


@dataclass(frozen=True)
class _Place:
    """A revision as it is on the Hub now; `base` differs from `revision` while the branch or PR is yet to be made."""

    base: str
    revision: str | None
    commit: str
    files: Mapping[str, RepoFile]


@dataclass(frozen=True)
class _Plan:
    add: tuple[_File, ...]
    delete: tuple[str, ...]
    notes: tuple[str, ...]


def push_to_hub(
    out: Path,
    repo: str,
    *,
    verify: Callable[[Path], object],
    facts: Callable[[Path], card.CardFacts] = card.read_facts,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
) -> PushResult:
    """Publish the augmented checkpoint in `out` as `repo` in one commit; `out` itself is not changed.

    Uploads the files that the manifest names, the manifest, and a model card: one made from `facts(out)` and the
    metadata of the source's card, or README.md of `out` as it is if the user wrote it. A card that was edited on the
    Hub stays. Run again, it uploads what is missing and takes up the open pull request of the same title.

    verify: raises VerifyError for a checkpoint that must not be published; called before anything is sent
    facts:  what the card says; called after `verify`
    Raises UsageError, VerifyError, and MreaderError for what the Hub, the network or the account does not allow.
    """
    if create_pr and revision not in (None, DEFAULT_BRANCH):
        raise UsageError(
            f"--create-pr and --revision {revision} exclude each other",
            "a pull request is always opened against the default branch: leave one of the two out",
        )
    api = HfApi(token=_own_token(token), library_name="mreader")
    with _explained(api, repo, revision, MreaderError):
        validate_repo_id(repo)
        user = str(_patiently(api.whoami)["name"])
    verify(out)
    full = repo if "/" in repo else f"{user}/{repo}"
    wish = _Wish(full, user, private, revision or DEFAULT_BRANCH, commit_message or DEFAULT_MESSAGE, create_pr)
    files = [*_checkpoint_files(out), _card_file(out, card.for_repo(facts(out), full, _source_card(out)))]
    with _explained(api, full, revision, MreaderError):
        return _publish(api, wish, files, own_card=_users_card(out))


def _own_token(token: str | None) -> str:
    found = token or get_token()
    if not found:
        raise MreaderError("no Hugging Face token", "run `hf auth login`, set HF_TOKEN or pass --token")
    return found


def _read_manifest(out: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise VerifyError(f"{out / MANIFEST} cannot be read: {error}", "convert again") from error
    return manifest


def _checkpoint_files(out: Path) -> list[_File]:
    """The manifest and every file that it names; nothing else that may lie in the folder."""
    named = _read_manifest(out)["files"]
    files = [
        _File(name, int(entry["bytes"]), str(entry["sha256"]), out / name)
        for name, entry in sorted(named.items())
        if name != CARD
    ]
    missing = [file.name for file in files if not (out / file.name).is_file()]
    if missing:
        raise VerifyError(f"{out / missing[0]} is named in the manifest and is not there", "convert again")
    return [*files, _bytes_file(MANIFEST, (out / MANIFEST).read_bytes())]


def _bytes_file(name: str, data: bytes) -> _File:
    return _File(name, len(data), hashlib.sha256(data).hexdigest(), data)


def _source_card(out: Path) -> str | None:
    path = out / CARD
    return path.read_text("utf-8", errors="replace") if path.is_file() else None


def _users_card(out: Path) -> bool:
    """Whether README.md of `out` is the user's own: neither the source's, byte for byte, nor made by mreader."""
    text = _source_card(out)
    if text is None or card.is_untouched(text):
        return False
    copied = _read_manifest(out).get("source", {}).get("files", {}).get(CARD)
    return copied is None or copied["sha256"] != hashlib.sha256((out / CARD).read_bytes()).hexdigest()


def _card_file(out: Path, facts: card.CardFacts) -> _File:
    data = (out / CARD).read_bytes() if _users_card(out) else card.model_card(facts).encode()
    return _bytes_file(CARD, data)


def _publish(api: HfApi, wish: _Wish, files: Sequence[_File], *, own_card: bool) -> PushResult:
    _make_repo(api, wish)
    place = _find_place(api, wish)
    plan = _make_plan(api, wish, place, files, own_card=own_card)
    if not plan.add and not plan.delete:
        notes = (*plan.notes, "everything is there already: nothing was uploaded")
        revision = place.revision or place.base
        return PushResult(_page(api, wish, revision), place.commit, revision, notes=notes)
    if place.revision is None and not wish.create_pr:
        _patiently(lambda: api.create_branch(wish.repo, branch=wish.revision, revision=place.base, exist_ok=True))
    commit, revision = _commit(api, wish, place, plan)
    _check_stored(api, wish, commit, plan.add)
    names = tuple(file.name for file in plan.add)
    return PushResult(_page(api, wish, revision), commit, revision, names, plan.delete, plan.notes)


def _make_repo(api: HfApi, wish: _Wish) -> None:
    """Create the repository unless it exists; refuse to fill a public one when a private one was asked for."""
    try:
        info = _patiently(lambda: api.model_info(wish.repo))
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        # None, not False, without --private: an organisation may have made private the default.
        _patiently(lambda: api.create_repo(wish.repo, private=wish.private or None, exist_ok=True))
        return
    if wish.private and not info.private:
        raise UsageError(
            f"{wish.repo} exists and is public, and --private was asked for",
            "make it private in its settings first, choose another name, or leave out --private",
        )


def _find_place(api: HfApi, wish: _Wish) -> _Place:
    """The open pull request or the branch to go on with, or the base of the one to be made."""
    if wish.create_pr:
        revision = _open_pull_request(api, wish)
        return _read_place(api, wish, revision or DEFAULT_BRANCH, revision)
    try:
        return _read_place(api, wish, wish.revision, wish.revision)
    except RevisionNotFoundError:
        if wish.revision.startswith("refs/"):
            raise
        return _read_place(api, wish, DEFAULT_BRANCH, None)


def _read_place(api: HfApi, wish: _Wish, base: str, revision: str | None) -> _Place:
    info = _patiently(lambda: api.model_info(wish.repo, revision=base))
    return _Place(base, revision, str(info.sha), _list_files(api, wish.repo, str(info.sha)))


def _list_files(api: HfApi, repo: str, commit: str) -> dict[str, RepoFile]:
    entries = _patiently(lambda: list(api.list_repo_tree(repo, recursive=True, revision=commit)))
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _open_pull_request(api: HfApi, wish: _Wish) -> str | None:
    """The newest open pull request that this account opened under this title: one that an earlier run left."""
    found = _patiently(
        lambda: list(
            api.get_repo_discussions(
                wish.repo, author=wish.user, discussion_type="pull_request", discussion_status="open"
            )
        )
    )
    numbers = [
        pr.num
        for pr in found
        if pr.is_pull_request and pr.status == "open" and _title(pr.title) == _title(wish.message)
    ]
    return f"refs/pr/{max(numbers)}" if numbers else None


def _title(message: str) -> str:
    return message.strip().split("\n")[0].strip()


def _make_plan(api: HfApi, wish: _Wish, place: _Place, files: Sequence[_File], *, own_card: bool) -> _Plan:
    names = {file.name for file in files}
    stale = _stale_files(api, wish, place, names)
    changed = [file for file in files if not _is_stored(file, place.files.get(file.name))]
    notes = []
    if own_card:
        notes.append(f"{CARD} of the checkpoint is your own: it was published as it is")
    elif any(file.name == CARD for file in changed) and not _may_replace_card(api, wish, place):
        changed = [file for file in changed if file.name != CARD]
        notes.append(
            f"{CARD} on the Hub is not mreader's, or was edited: it was kept (delete it there to get a new one)"
        )
    return _Plan(tuple(changed), stale, tuple(notes))


def _may_replace_card(api: HfApi, wish: _Wish, place: _Place) -> bool:
    if CARD not in place.files:
        return True
    return card.is_untouched(_download(api, wish.repo, place.commit, CARD).decode("utf-8", errors="replace"))


def _stale_files(api: HfApi, wish: _Wish, place: _Place, names: set[str]) -> tuple[str, ...]:
    """Files of an older conversion, named in its manifest, that a reader would take for part of the new one."""
    if MANIFEST in place.files:
        older = _named_files(_download(api, wish.repo, place.commit, MANIFEST))
        return tuple(sorted((older & place.files.keys()) - names - {CARD}))
    foreign = sorted(name for name in place.files if _is_weight(name) and "/" not in name)
    if foreign:
        raise UsageError(
            f"{wish.repo} holds another model ({foreign[0]}) at {place.base}, and no {MANIFEST}",
            "choose another repository, or delete those files there first",
        )
    return ()


def _named_files(manifest: bytes) -> set[str]:
    """The files of a manifest that somebody else may have written: none where it makes no sense."""
    try:
        return set(json.loads(manifest)["files"])
    except (ValueError, KeyError, TypeError):
        return set()


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".safetensors.index.json", *_OTHER_WEIGHTS))


def _is_stored(file: _File, stored: RepoFile | None) -> bool:
    if stored is None or stored.size != file.size:
        return False
    if stored.lfs is not None:
        return stored.lfs.sha256 == file.sha256
    return stored.blob_id == hashlib.sha1(b"blob %d\0" % file.size + file.read()).hexdigest()


def _commit(api: HfApi, wish: _Wish, place: _Place, plan: _Plan) -> tuple[str, str]:
    """Commit the plan; returns the commit and the revision that holds it.

    An answer may be lost after the Hub has committed: before another try, look whether the files are there.
    """
    # The same operations at every try: what they hashed and uploaded is not hashed and uploaded again.
    additions = [
        CommitOperationAdd(file.name, file.content if isinstance(file.content, bytes) else str(file.content))
        for file in plan.add
    ]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        *additions,
        *(CommitOperationDelete(name) for name in plan.delete),
    ]
    for wait in (*_WAITS, None):
        try:
            return _commit_once(api, wish, place, operations)
        except _FAILURES as error:
            if wait is None or not _may_pass(error):
                raise
        time.sleep(wait)
        now = _find_place(api, wish)
        if all(_is_stored(file, now.files.get(file.name)) for file in plan.add) and not now.files.keys() & plan.delete:
            return now.commit, now.revision or now.base
    raise AssertionError("unreachable")


def _commit_once(
    api: HfApi, wish: _Wish, place: _Place, operations: Sequence[CommitOperationAdd | CommitOperationDelete]
) -> tuple[str, str]:
    new_pr = wish.create_pr and place.revision is None
    target = place.revision or (DEFAULT_BRANCH if new_pr else wish.revision)
    done = api.create_commit(
        wish.repo,
        operations,
        commit_message=wish.message,
        revision=target,
        create_pr=new_pr,
    )
    return done.oid, (done.pr_revision or target) if new_pr else target


def _check_stored(api: HfApi, wish: _Wish, commit: str, files: Sequence[_File]) -> None:
    """A .gitignore in the repository, for one, makes the Hub leave out files without an error."""
    stored = _list_files(api, wish.repo, commit)
    lost = [file.name for file in files if not _is_stored(file, stored.get(file.name))]
    if lost:
        raise MreaderError(
            f"{wish.repo} does not hold {lost[0]} as it was sent ({len(lost)} of {len(files)} files differ)",
            "look for a .gitignore in the repository, then push again",
        )


def _page(api: HfApi, wish: _Wish, revision: str) -> str:
    url = f"{api.endpoint}/{wish.repo}"
    if revision.startswith("refs/pr/"):
        return f"{url}/discussions/{revision.removeprefix('refs/pr/')}"
    return url if revision == DEFAULT_BRANCH else f"{url}/tree/{revision}"


# Reading.


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
        with _explained(self._api, self.repo, self.commit, SourceError):
            data = _download(self._api, self.repo, self.commit, name)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise SourceError(f"{name} of {self.repo} is not UTF-8: {error}") from error

    def header(self, name: str) -> bytes:
        """The JSON header of a safetensors file: bytes 8 to 8 + n, n the little-endian number in bytes 0 to 8."""
        size = self._size(name)
        with _explained(self._api, self.repo, self.commit, SourceError):
            start = _download(self._api, self.repo, self.commit, name, stop=min(size, _HEADER_GUESS))
            length = int.from_bytes(start[:8], "little")
            if size < 8 or length > size - 8:
                raise SourceError(f"{name} of {self.repo} is no safetensors file, or a part of one ({size} bytes)")
            if 8 + length > len(start):
                start += _download(self._api, self.repo, self.commit, name, start=len(start), stop=8 + length)
        return start[8 : 8 + length]

    def checkpoint_files(self) -> tuple[str, ...]:
        """The files that make the checkpoint: the indexed safetensors files and every small file beside them.

        Raises UnsupportedError for weights in other formats only, SourceError for an index that names absent files.
        """
        weights = self._weights()
        return tuple(sorted({*weights, *(name for name in self.files if _is_side_file(name))}))

    def _weights(self) -> list[str]:
        if INDEX in self.files:
            return self._indexed()
        if "model.safetensors" in self.files:
            return ["model.safetensors"]
        found = [name for name in self.files if name.endswith(".safetensors") and "/" not in name]
        other = sorted(name for name in self.files if name.endswith(_OTHER_WEIGHTS))
        if not found and other:
            raise UnsupportedError(
                f"{self.repo} holds its weights only as {Path(other[0]).suffix} ({other[0]})",
                "mreader reads safetensors: convert them first, or take a repository that has them",
            )
        if not found:
            raise SourceError(f"{self.repo} holds no weights", "check the id and the revision")
        return found

    def _indexed(self) -> list[str]:
        try:
            named = sorted({str(name) for name in json.loads(self.read_text(INDEX))["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(f"{INDEX} of {self.repo} is damaged: {error}") from error
        missing = [name for name in named if name not in self.files]
        if missing:
            raise SourceError(f"{INDEX} of {self.repo} names {missing[0]}, which is not in the repository")
        return named

    def _size(self, name: str) -> int:
        if name not in self.files:
            raise SourceError(f"{self.repo} at {self.commit} has no file {name}")
        return self.files[name]


def remote_headers(repo: str, revision: str | None = None, token: str | None = None) -> RemoteRepo:
    """Open `repo` at `revision` (None: the default branch) for reading in pieces; the commit is fixed here.

    Raises UsageError for an impossible id, SourceError with the reason for everything else.
    """
    api = HfApi(token=token, library_name="mreader")
    with _explained(api, repo, revision, SourceError):
        return _open_remote(api, repo, revision)


def fetch_snapshot(repo: str, revision: str | None = None, token: str | None = None) -> Path:
    """Download the checkpoint files of `repo` into the Hub cache, or find them there; returns the snapshot folder.

    The folder's name is the commit. Only safetensors weights and the small files are fetched, never another format of
    the same weights. Without a network a complete snapshot of an earlier time is used.
    Raises UsageError, SourceError, UnsupportedError, NoSpaceError with the reason and the remedy.
    """
    api = HfApi(token=token, library_name="mreader")
    with _explained(api, repo, revision, SourceError):
        try:
            remote = _open_remote(api, repo, revision)
        except _FAILURES as error:
            cached = _cached_snapshot(api, repo, revision) if _is_unreachable(error) else None
            if cached is None:
                raise
            _LOG.warning("%s cannot be reached: using the snapshot in the cache, %s", api.endpoint, cached)
            return cached
        names = remote.checkpoint_files()
        _check_room(remote, names)
        patterns = [glob.escape(name) for name in names]
        # By name, not by commit: the cache then knows what the branch was, for a later run without a network.
        folder = Path(str(api.snapshot_download(repo, revision=revision, allow_patterns=patterns)))
    if folder.name == remote.commit:
        _check_sizes(remote, folder, names)
    return folder


def _open_remote(api: HfApi, repo: str, revision: str | None) -> RemoteRepo:
    info = _patiently(lambda: api.model_info(repo, revision=revision, files_metadata=True))
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return RemoteRepo(repo, str(info.sha), files, api)


def _is_side_file(name: str) -> bool:
    if name.startswith(_TEMPLATES):
        return name.endswith(".jinja")
    if "/" in name or name.startswith(".") or name.endswith(".index.json"):
        return name == INDEX
    return name.endswith(_COPIED) or name.lower().startswith(_LICENCES)


def _cached_snapshot(api: HfApi, repo: str, revision: str | None) -> Path | None:
    """The snapshot of an earlier run, if all that its index names is there."""
    try:
        found = api.snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=["config.json"])
    except LocalEntryNotFoundError:
        return None
    folder = Path(str(found))
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if INDEX not in files:
        return folder if any(name.endswith(".safetensors") for name in files) else None
    named = set(json.loads(files[INDEX].read_text("utf-8"))["weight_map"].values())
    return folder if named <= files.keys() else None


def _check_room(remote: RemoteRepo, names: Sequence[str]) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    absent = [name for name in names if not isinstance(_cached_file(remote, name), str)]
    needed = sum(remote.files[name] for name in absent)
    existing = next((folder for folder in (cache, *cache.parents) if folder.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise NoSpaceError(
            f"{remote.repo} needs {needed:,} bytes in the Hub cache {cache}, and {free:,} are free",
            "make room, or set HF_HOME to a folder on a larger disk",
        )


def _cached_file(remote: RemoteRepo, name: str) -> object:
    return try_to_load_from_cache(remote.repo, name, revision=remote.commit)


def _check_sizes(remote: RemoteRepo, folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size != remote.files[name]:
            raise SourceError(
                f"{path} has {size} bytes and {remote.repo} says {remote.files[name]}",
                "delete that file and run the same command again",
            )


# Requests and what goes wrong with them.


def _download(api: HfApi, repo: str, commit: str, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
    """Bytes start..stop of a file, the whole of it by default; asks for no more, even where ranges are ignored."""
    url = hf_hub_url(repo, name, revision=commit, endpoint=api.endpoint)
    headers = build_hf_headers(token=api.token, library_name="mreader")
    headers["Accept-Encoding"] = "identity"
    if stop is not None:
        headers["Range"] = f"bytes={start}-{stop - 1}"

    def read() -> bytes:
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            if response.status_code == 416:
                return b""
            hf_raise_for_status(response)
            skip = start if response.status_code == 200 else 0
            wanted = None if stop is None else skip + stop - start
            data = bytearray()
            for chunk in response.iter_bytes(_CHUNK):
                data += chunk
                if wanted is not None and len(data) >= wanted:
                    break
            return bytes(data[skip:wanted])

    return _patiently(read)


def _patiently(step: Callable[[], T]) -> T:
    """The step's result, after a few more tries where the failure may pass."""
    for wait in _WAITS:
        try:
            return step()
        except _FAILURES as error:
            if not _may_pass(error):
                raise
        time.sleep(wait)
    return step()


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _PASSING
    return isinstance(error, _HTTP_ERROR) and not isinstance(error, OfflineModeIsEnabled)


def _is_unreachable(error: Exception) -> bool:
    return _may_pass(error) or isinstance(error, OfflineModeIsEnabled)


@contextmanager
def _explained(api: HfApi, repo: str, revision: str | None, failure: type[MreaderError]) -> Iterator[None]:
    """Turns whatever huggingface_hub raises inside into `failure` with one line of cause and one of remedy."""
    try:
        yield
    except MreaderError:
        raise
    except _FAILURES as error:
        raise _explain(_root(error), api, repo, revision, failure) from error


def _root(error: BaseException) -> BaseException:
    """The failure itself under the wrappers that huggingface_hub puts around it."""
    cause = error.__cause__
    wrapped = isinstance(error, (RuntimeError, LocalEntryNotFoundError)) and isinstance(cause, _FAILURES)
    return _root(cause) if wrapped and cause is not None else error


def _explain(
    error: BaseException, api: HfApi, repo: str, revision: str | None, failure: type[MreaderError]
) -> MreaderError:
    if isinstance(error, HFValidationError):
        return UsageError(f"{repo!r} is no repository id: {_line(error)}", "ids look like name or owner/name")
    if isinstance(error, GatedRepoError):
        return failure(
            f"{repo} is gated, and this account has no access to it",
            f"ask for access at {api.endpoint}/{repo}, then run `hf auth login` or pass --token",
        )
    if isinstance(error, RevisionNotFoundError):
        return failure(f"{repo} has no revision {revision or DEFAULT_BRANCH}", f"see {api.endpoint}/{repo}/tree/main")
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, error.response.status_code, api, repo, failure)
    if isinstance(error, OfflineModeIsEnabled):
        return failure(f"{repo} cannot be reached: HF_HUB_OFFLINE is set", "unset it, or use a local folder")
    if isinstance(error, PermissionError):
        return failure(f"{repo}: {_line(error)}", "check the permissions of that file, or of the token")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError(f"the disk is full: {_line(error)}", "make room, then run the same command again")
    if isinstance(error, (_HTTP_ERROR, LocalEntryNotFoundError)):
        return failure(
            f"no connection to {api.endpoint}: {_line(error)}",
            "check the network and HF_ENDPOINT, then run the same command again: it takes up where it stopped",
        )
    return failure(f"{repo}: {_line(error)}", "run the same command again: it takes up where it stopped")


def _explain_status(
    error: HfHubHTTPError, status: int, api: HfApi, repo: str, failure: type[MreaderError]
) -> MreaderError:
    said = _line(error.server_message or error)
    tokens = f"{api.endpoint}/settings/tokens"
    if status == 401 and "authorization" in error.response.request.headers:
        return failure(
            f"the Hub does not know this token (401: {said})", "run `hf auth login`, or pass another --token"
        )
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return failure(
            f"no repository {repo}, or no access to it ({status}: {said})",
            "check the id; for a private repository run `hf auth login` or pass --token",
        )
    if status == 403:
        return failure(f"the Hub refuses access to {repo} (403: {said})", f"see what the token may do: {tokens}")
    if status == 429:
        return failure(f"the Hub limits requests (429: {said})", "wait some minutes, then run the same command again")
    if status >= 500:
        again = "run the same command again: it takes up where it stopped"
        return failure(f"the Hub failed at {error.response.request.url} ({status}: {said})", again)
    return failure(f"the Hub refused a request for {repo} ({status}: {said})", "check the arguments")


def _line(value: object) -> str:
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= 300 else text[:299] + "…"
