"""Requests to the Hub: what is tried again, and what went wrong in one line of cause and one of remedy."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import HfApi, constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from mreader.errors import MreaderError, NoSpaceError, SourceError, UnreachableError, UsageError

DEFAULT_BRANCH = "main"
WAITS = (1.0, 3.0)  # seconds before the second and the third try

# huggingface_hub 1.x raises httpx's errors and 2.x those of httpx2: both are the base of its own error.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
FAILURES = (_HTTP_ERROR, OSError, HFValidationError, RuntimeError, ValueError)
_PASSING = (408, 429, 500, 502, 503, 504)
_CHUNK = 1 << 20
_AGAIN = "run the same command again: it takes up where it stopped"

T = TypeVar("T")


def client(token: str | None) -> HfApi:
    """The Hub's client, which says to the Hub whose it is."""
    return HfApi(token=token, library_name="mreader")


def download(api: HfApi, repo: str, commit: str, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
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

    return patiently(read)


def patiently(step: Callable[[], T]) -> T:
    """The step's result, after a few more tries where the failure may pass."""
    for wait in WAITS:
        try:
            return step()
        except FAILURES as error:
            if not may_pass(error):
                raise
        time.sleep(wait)
    return step()


def may_pass(error: BaseException) -> bool:
    """Whether another try may succeed."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _PASSING
    return isinstance(error, _HTTP_ERROR)


def is_unreachable(error: BaseException) -> bool:
    """Whether the Hub gave no answer that is about the request."""
    return may_pass(error) or isinstance(error, OfflineModeIsEnabled)


@contextmanager
def explained(api: HfApi, repo: str, revision: str | None, failure: type[MreaderError]) -> Iterator[None]:
    """Turns whatever huggingface_hub raises inside into `failure`.

    UsageError, NoSpaceError and, for a SourceError, UnreachableError where it is one of these.
    """
    try:
        yield
    except MreaderError:
        raise
    except FAILURES as error:
        root = _root(error)
        raise _kind(root, failure)(*_cause_and_remedy(root, api, repo, revision)) from error


def _root(error: BaseException) -> BaseException:
    """The failure itself under the wrappers that huggingface_hub puts around it."""
    cause = error.__cause__
    wrapped = isinstance(error, (RuntimeError, LocalEntryNotFoundError)) and isinstance(cause, FAILURES)
    return _root(cause) if wrapped and cause is not None else error


def _kind(error: BaseException, failure: type[MreaderError]) -> type[MreaderError]:
    if isinstance(error, HFValidationError):
        return UsageError
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return NoSpaceError
    return UnreachableError if failure is SourceError and is_unreachable(error) else failure


def _cause_and_remedy(error: BaseException, api: HfApi, repo: str, revision: str | None) -> tuple[str, str]:
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no repository id: {_line(error)}", "ids look like name or owner/name"
    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated, and this account has no access to it",
            f"ask for access at {api.endpoint}/{repo}, then run `hf auth login` or pass --token",
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision or DEFAULT_BRANCH}", f"see {api.endpoint}/{repo}/tree/main"
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, error.response.status_code, api, repo)
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repo} cannot be reached: HF_HUB_OFFLINE is set", "unset it, or use a local folder"
    if isinstance(error, PermissionError):
        return f"{repo}: {_line(error)}", "check the permissions of that file, or of the token"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full: {_line(error)}", "make room, then run the same command again"
    if isinstance(error, (_HTTP_ERROR, LocalEntryNotFoundError)):
        return f"no connection to {api.endpoint}: {_line(error)}", f"check the network and HF_ENDPOINT, then {_AGAIN}"
    return f"{repo}: {_line(error)}", _AGAIN


def _refusal(error: HfHubHTTPError, status: int, api: HfApi, repo: str) -> tuple[str, str]:
    said = _line(error.server_message or error)
    if status == 401 and "authorization" in error.response.request.headers:
        return f"the Hub does not know this token (401: {said})", "run `hf auth login`, or pass another --token"
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return (
            f"no repository {repo}, or no access to it ({status}: {said})",
            "check the id; for a private repository run `hf auth login` or pass --token",
        )
    if status == 403:
        return (
            f"the Hub refuses access to {repo} (403: {said})",
            f"see what the token may do: {api.endpoint}/settings/tokens",
        )
    if status == 429:
        return f"the Hub limits requests (429: {said})", "wait some minutes, then run the same command again"
    if status >= 500:
        return f"the Hub failed at {error.response.request.url} ({status}: {said})", _AGAIN
    return f"the Hub refused a request for {repo} ({status}: {said})", "check the arguments"


def _line(value: object) -> str:
    text = " ".join(str(value).split()) or type(value).__name__
    return text if len(text) <= 300 else text[:299] + "…"
