"""Publishing an augmented checkpoint: one commit, resumed by running it again."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from mreader import card
from mreader.errors import MreaderError, UsageError, VerifyError
from mreader.formats.augmented import MANIFEST, read_manifest
from mreader.formats.checkpoint import is_weights
from mreader.hub import http
from mreader.hub.http import DEFAULT_BRANCH, client, download, explained, patiently
from mreader.output import CARD

DEFAULT_MESSAGE = "Upload augmented checkpoint (mreader)"

_Operation = CommitOperationAdd | CommitOperationDelete


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

    def is_stored(self, stored: RepoFile | None) -> bool:
        if stored is None or stored.size != self.size:
            return False
        if stored.lfs is not None:
            return stored.lfs.sha256 == self.sha256
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return stored.blob_id == hashlib.sha1(b"blob %d\0" % self.size + data).hexdigest()

    def operation(self) -> CommitOperationAdd:
        return CommitOperationAdd(self.name, self.content if isinstance(self.content, bytes) else str(self.content))


@dataclass(frozen=True)
class _Changes:
    """What one commit has to do, and what the user should know of it."""

    add: tuple[_File, ...]
    delete: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """A revision as it is on the Hub now; `base` differs from `revision` while the branch or PR is yet to be made."""

    base: str
    revision: str | None
    commit: str
    files: Mapping[str, RepoFile]


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
    api = client(_own_token(token))
    with explained(api, repo, revision, MreaderError):
        validate_repo_id(repo)
        user = str(patiently(api.whoami)["name"])
    verify(out)
    full = repo if "/" in repo else f"{user}/{repo}"
    own_card = _users_card(out)
    text = own_card or card.model_card(card.for_repo(facts(out), full, _card_of(out))).encode()
    files = [*_checkpoint_files(out), _bytes_file(CARD, text)]
    target = _Target(
        api, full, user, private, revision or DEFAULT_BRANCH, commit_message or DEFAULT_MESSAGE, create_pr
    )  # fmt: skip
    with explained(api, full, revision, MreaderError):
        return target.publish(files, own_card is not None)


def _own_token(token: str | None) -> str:
    found = token or get_token()
    if not found:
        raise MreaderError("no Hugging Face token", "run `hf auth login`, set HF_TOKEN or pass --token")
    return found


def _checkpoint_files(out: Path) -> list[_File]:
    """The manifest and every file that it names; nothing else that may lie in the folder."""
    named = read_manifest(out)["files"]
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


def _card_of(out: Path) -> str | None:
    path = out / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _users_card(out: Path) -> bytes | None:
    """README.md of `out` if it is the user's own: neither the source's, byte for byte, nor made by mreader."""
    text = _card_of(out)
    if text is None or card.is_untouched(text):
        return None
    data = (out / CARD).read_bytes()
    copied = read_manifest(out)["source"]["files"].get(CARD)
    return data if copied is None or copied["sha256"] != hashlib.sha256(data).hexdigest() else None


@dataclass(frozen=True)
class _Target:
    """The repository, whose account asks, and what the user asked for."""

    api: HfApi
    repo: str
    user: str
    private: bool
    revision: str
    message: str
    create_pr: bool

    def publish(self, files: Sequence[_File], own_card: bool) -> PushResult:
        self._make_repo()
        place = self._find_place()
        changes = self._compare(place, files, own_card)
        if not changes.add and not changes.delete:
            notes = (*changes.notes, "everything is there already: nothing was uploaded")
            revision = place.revision or place.base
            return PushResult(self._page(revision), place.commit, revision, notes=notes)
        if place.revision is None and not self.create_pr:
            patiently(
                lambda: self.api.create_branch(self.repo, branch=self.revision, revision=place.base, exist_ok=True)
            )
        commit, revision = self._commit(place, changes)
        self._check_stored(commit, changes.add)
        names = tuple(file.name for file in changes.add)
        return PushResult(self._page(revision), commit, revision, names, changes.delete, changes.notes)

    def _make_repo(self) -> None:
        """Create the repository unless it exists; refuse to fill a public one when a private one was asked for."""
        try:
            info = patiently(lambda: self.api.model_info(self.repo))
        except GatedRepoError:
            raise
        except RepositoryNotFoundError:
            # None, not False, without --private: an organisation may have made private the default.
            patiently(lambda: self.api.create_repo(self.repo, private=self.private or None, exist_ok=True))
            return
        if self.private and not info.private:
            raise UsageError(
                f"{self.repo} exists and is public, and --private was asked for",
                "make it private in its settings first, choose another name, or leave out --private",
            )

    def _find_place(self) -> _Place:
        """The open pull request or the branch to go on with, or the base of the one to be made."""
        if self.create_pr:
            revision = self._open_pull_request()
            return self._read_place(revision or DEFAULT_BRANCH, revision)
        try:
            return self._read_place(self.revision, self.revision)
        except RevisionNotFoundError:
            if self.revision.startswith("refs/"):
                raise
            return self._read_place(DEFAULT_BRANCH, None)

    def _read_place(self, base: str, revision: str | None) -> _Place:
        commit = str(patiently(lambda: self.api.model_info(self.repo, revision=base)).sha)
        return _Place(base, revision, commit, self._list_files(commit))

    def _list_files(self, commit: str) -> dict[str, RepoFile]:
        entries = patiently(lambda: list(self.api.list_repo_tree(self.repo, recursive=True, revision=commit)))
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _open_pull_request(self) -> str | None:
        """The newest open pull request that this account opened under this title: one that an earlier run left."""
        found = patiently(
            lambda: list(
                self.api.get_repo_discussions(
                    self.repo, author=self.user, discussion_type="pull_request", discussion_status="open"
                )
            )
        )
        open_ones = [pr for pr in found if pr.is_pull_request and pr.status == "open"]
        numbers = [pr.num for pr in open_ones if _title(pr.title) == _title(self.message)]
        return f"refs/pr/{max(numbers)}" if numbers else None

    def _compare(self, place: _Place, files: Sequence[_File], own_card: bool) -> _Changes:
        stale = self._stale_files(place, {file.name for file in files})
        changed = [file for file in files if not file.is_stored(place.files.get(file.name))]
        notes = []
        if own_card:
            notes.append(f"{CARD} of the checkpoint is your own: it was published as it is")
        elif any(file.name == CARD for file in changed) and not self._may_replace_card(place):
            changed = [file for file in changed if file.name != CARD]
            notes.append(
                f"{CARD} on the Hub is not mreader's, or was edited: it was kept (delete it there to get a new one)"
            )
        return _Changes(tuple(changed), stale, tuple(notes))

    def _may_replace_card(self, place: _Place) -> bool:
        if CARD not in place.files:
            return True
        return card.is_untouched(self._download(place, CARD).decode("utf-8", errors="replace"))

    def _stale_files(self, place: _Place, names: set[str]) -> tuple[str, ...]:
        """Files of an older conversion, named in its manifest, that a reader would take for part of the new one."""
        if MANIFEST in place.files:
            older = _named_files(self._download(place, MANIFEST))
            return tuple(sorted((older & place.files.keys()) - names - {CARD}))
        foreign = sorted(name for name in place.files if is_weights(name) and "/" not in name)
        if foreign:
            raise UsageError(
                f"{self.repo} holds another model ({foreign[0]}) at {place.base}, and no {MANIFEST}",
                "choose another repository, or delete those files there first",
            )
        return ()

    def _download(self, place: _Place, name: str) -> bytes:
        return download(self.api, self.repo, place.commit, name)

    def _commit(self, place: _Place, changes: _Changes) -> tuple[str, str]:
        """Commit the changes; returns the commit and the revision that holds it.

        An answer may be lost after the Hub has committed: before another try, look whether the files are there.
        """
        # The same operations at every try: what they hashed and uploaded is not hashed and uploaded again.
        operations: list[_Operation] = [file.operation() for file in changes.add]
        operations += [CommitOperationDelete(name) for name in changes.delete]
        for wait in http.WAITS:
            try:
                return self._commit_once(place, operations)
            except http.FAILURES as error:
                if not http.may_pass(error):
                    raise
            time.sleep(wait)
            now = self._find_place()
            added = all(file.is_stored(now.files.get(file.name)) for file in changes.add)
            if added and not now.files.keys() & changes.delete:
                return now.commit, now.revision or now.base
        return self._commit_once(place, operations)

    def _commit_once(self, place: _Place, operations: Sequence[_Operation]) -> tuple[str, str]:
        new_pr = self.create_pr and place.revision is None
        revision = place.revision or self.revision  # which is the default branch where a pull request is wanted
        done = self.api.create_commit(
            self.repo, operations, commit_message=self.message, revision=revision, create_pr=new_pr
        )
        return done.oid, done.pr_revision or revision

    def _check_stored(self, commit: str, files: Sequence[_File]) -> None:
        """A .gitignore in the repository, for one, makes the Hub leave out files without an error."""
        stored = self._list_files(commit)
        lost = [file.name for file in files if not file.is_stored(stored.get(file.name))]
        if lost:
            raise MreaderError(
                f"{self.repo} does not hold {lost[0]} as it was sent ({len(lost)} of {len(files)} files differ)",
                "look for a .gitignore in the repository, then push again",
            )

    def _page(self, revision: str) -> str:
        url = f"{self.api.endpoint}/{self.repo}"
        if revision.startswith("refs/pr/"):
            return f"{url}/discussions/{revision.removeprefix('refs/pr/')}"
        return url if revision == DEFAULT_BRANCH else f"{url}/tree/{revision}"


def _title(message: str) -> str:
    return message.strip().split("\n")[0].strip()


def _named_files(manifest: bytes) -> set[str]:
    """The files of a manifest that somebody else may have written: none where it makes no sense."""
    try:
        return set(json.loads(manifest)["files"])
    except (ValueError, KeyError, TypeError):
        return set()
