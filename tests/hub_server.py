"""A Hugging Face Hub in one process: the HTTP protocol that `huggingface_hub` 1.33 to 2.x speaks, held in memory.

    with HubServer() as hub:
        hub.add_user("alice", "hf_alice")
        use_hub(monkeypatch, hub.url, "hf_alice", tmp_path)  # clients of this process
        subprocess.run(..., env={**os.environ, **hub.environment("hf_alice", cache)})  # clients of another one

It keeps repositories with branches, pull requests and commits, stores LFS objects apart, and answers with the
Hub's own status codes and `X-Error-Code` headers. Faults are injected per request: `hub.fail(...)`, `hub.cut(...)`.
Only loopback, standard library only.
"""

import base64
import hashlib
import itertools
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK = 1 << 16
CREATED_AT = "2026-01-01T00:00:00.000Z"
REPO_ACTIONS = ("revision", "tree", "paths-info", "preupload", "commit", "branch", "refs", "discussions")


@dataclass(frozen=True)
class User:
    name: str
    write: bool = True
    orgs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Blob:
    """A file of a commit; `lfs` is the sha256 of the object, None for a file kept in git."""

    size: int
    oid: str
    data: bytes
    lfs: str | None = None


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    files: dict[str, Blob]


@dataclass
class PullRequest:
    num: int
    title: str
    author: str
    status: str = "open"


@dataclass
class Repo:
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pull_requests: list[PullRequest] = field(default_factory=list)

    def at(self, revision: str) -> Commit | None:
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD /path" matches `pattern`."""

    pattern: re.Pattern[str]
    times: int
    status: int = 0
    message: str = ""
    code: str = ""
    cut_after: int | None = None
    after_work: bool = False


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    status: int


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})


def failure(status: int, message: str, code: str = "") -> Answer:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    answer = as_json({"error": message}, status)
    return Answer(status, answer.body, answer.headers | headers)


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.answer = failure(status, message, code)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def git_blob(data: bytes) -> Blob:
    return Blob(len(data), git_oid(data), data)


def lfs_blob(data: bytes) -> Blob:
    sha = hashlib.sha256(data).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(data)}\n"
    return Blob(len(data), git_oid(pointer.encode()), data, sha)


def stored_as_lfs(path: str, size: int) -> bool:
    return size > 0 and (path.endswith((".safetensors", ".bin", ".pt", ".gguf", ".model")) or size > 10_000_000)


class HubServer:
    """The store and its HTTP server on a free port of 127.0.0.1.

    part_size: LFS objects above it are taken in parts of this size (0: always in one piece)
    page_size: entries on one page of a tree or of the discussions
    ignored:   paths that a .gitignore of the repositories leaves out of commits
    """

    def __init__(self, *, part_size: int = 0, page_size: int = 50) -> None:
        self.part_size = part_size
        self.page_size = page_size
        self.users: dict[str, User] = {}
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.ignored: set[str] = set()
        self.uploaded = 0
        self.downloaded = 0
        self.lock = threading.RLock()
        self._counter = itertools.count(1)
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """Where LFS objects lie: another host in the eyes of a client, as on the real Hub."""
        return f"http://localhost:{self._http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    # What a test prepares and asks.

    def add_user(self, name: str, token: str, *, write: bool = True, orgs: Iterable[str] = ()) -> None:
        self.users[token] = User(name, write, tuple(orgs))

    def add_repo(
        self, name: str, files: dict[str, bytes] | None = None, *, private: bool = False, gated: bool = False
    ) -> Repo:
        repo = self.repos[name] = Repo(name, private, gated)
        blobs = {path: self._blob(path, data) for path, data in (files or {}).items()}
        self.commit(repo, "main", "initial commit", {".gitattributes": git_blob(b"*.safetensors lfs\n"), **blobs})
        return repo

    def add_folder(self, name: str, folder: Path, *, private: bool = False, gated: bool = False) -> Repo:
        """A repository with every file of `folder`, as a conversion from a Hub id wants it."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.add_repo(name, files, private=private, gated=gated)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repos[name].at(revision)
        assert commit is not None, revision
        return {path: blob.data for path, blob in commit.files.items() if path != ".gitattributes"}

    def fail(self, pattern: str, status: int, message: str = "", *, code: str = "", times: int = 1) -> None:
        """Answer the next `times` matching requests with `status` instead."""
        self.faults.append(Fault(re.compile(pattern), times, status, message, code))

    def cut(self, pattern: str, after: int = 0, *, times: int = 1) -> None:
        """Drop the connection of matching requests when `after` bytes of the body have passed."""
        self.faults.append(Fault(re.compile(pattern), times, cut_after=after))

    def lose_answer(self, pattern: str, *, times: int = 1) -> None:
        """Do what matching requests ask, then drop the connection without an answer."""
        self.faults.append(Fault(re.compile(pattern), times, after_work=True))

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, f"{seen.method} {seen.path}")) for seen in self.seen)

    def environment(self, token: str | None, cache: Path) -> dict[str, str]:
        """Environment variables under which a fresh process uses this server and nothing else."""
        return environment(self.url, token, cache)

    # The store.

    def commit(self, repo: Repo, ref: str, title: str, files: dict[str, Blob]) -> Commit:
        seed = f"{repo.name} {next(self._counter)} {title}"
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), title, files)
        repo.commits[commit.sha] = commit
        repo.refs[ref] = commit.sha
        return commit

    def _blob(self, path: str, data: bytes) -> Blob:
        if not stored_as_lfs(path, len(data)):
            return git_blob(data)
        blob = lfs_blob(data)
        self.objects[blob.lfs or ""] = data
        return blob

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fault.pattern.search(line):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _serve(self) -> None:
        split = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(split.query).items()}
        self.segments = [unquote(segment) for segment in split.path.strip("/").split("/")]
        fault = self.hub.take_fault(f"{self.command} {self.path}")
        if fault and fault.cut_after is not None and self.command in ("PUT", "POST"):
            self._receive(fault.cut_after)
            self._drop()
            return
        self.body = self._receive(int(self.headers.get("Content-Length") or 0))
        if fault and fault.status:
            answer = failure(fault.status, fault.message or "injected", fault.code)
        else:
            answer = self._answer()
        if fault and fault.after_work:
            self._drop()
            return
        if self.path != "/api/agent-harnesses":  # some clients ask first which agent runs them: no part of the protocol
            self.hub.seen.append(Seen(self.command, self.path, answer.status))
        self._send(answer, fault.cut_after if fault else None)

    def _receive(self, size: int) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return b"".join(self._chunks())
        parts = []
        while size > 0 and (part := self.rfile.read(min(CHUNK, size))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _drop(self) -> None:
        """Reset the connection, as a dying network does: no polite end of stream."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, answer: Answer, cut_after: int | None) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:cut_after])
        self.wfile.flush()
        if cut_after is not None:
            self.close_connection = True

    def _answer(self) -> Answer:
        with self.hub.lock:
            try:
                self.user = self._authenticate()
                return self._route()()
            except Refused as refused:
                return refused.answer

    def _authenticate(self) -> User | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def _route(self) -> Callable[[], Answer]:
        match self.segments:
            case ["api", "whoami-v2"]:
                return self._whoami
            case ["api", "repos", "create"]:
                return self._create
            case ["api", "validate-yaml"]:
                return lambda: as_json({"errors": [], "warnings": []})
            case ["api", "models", *rest]:
                return self._model_route(rest)
            case [*name, "info", "lfs", "objects", "batch"] if name:
                return lambda: self._lfs_batch("/".join(name).removesuffix(".git"))
            case ["lfs", action, oid, *rest]:
                return lambda: self._lfs(action, oid, rest)
            case [_, "resolve", _, _, *_] | [_, _, "resolve", _, _, *_]:
                return self._resolve
        raise Refused(404, f"no such route: {self.path}")

    def _model_route(self, rest: list[str]) -> Callable[[], Answer]:
        split = next((i for i in (1, 2) if i < len(rest) and rest[i] in REPO_ACTIONS), len(rest))
        name, action = "/".join(rest[:split]), rest[split:]
        match [self.command, *action]:
            case ["GET"]:
                return lambda: self._info(name, "main")
            case ["GET", "revision", revision]:
                return lambda: self._info(name, revision)
            case ["GET", "tree", revision, *folder]:
                return lambda: self._tree(name, revision, "/".join(folder))
            case ["POST", "paths-info", revision]:
                return lambda: self._paths_info(name, revision)
            case ["POST", "preupload", revision]:
                return lambda: self._preupload(name, revision)
            case ["POST", "commit", revision]:
                return lambda: self._commit(name, revision)
            case ["POST", "branch", branch]:
                return lambda: self._branch(name, branch)
            case ["GET", "refs"]:
                return lambda: self._refs(name)
            case ["GET", "discussions"]:
                return lambda: self._discussions(name)
        raise Refused(404, f"no such route: {self.path}")

    # Who may do what.

    def _repo(self, name: str) -> Repo:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self._owns(name)):
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repo

    def _owns(self, name: str) -> bool:
        return self.user is not None and name.split("/")[0] in (self.user.name, *self.user.orgs)

    def _writable(self, name: str) -> None:
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        if not self.user.write:
            raise Refused(403, "Forbidden: you must use a write token to upload to a repository.")
        if not self._owns(name):
            raise Refused(403, f"You don't have the rights to write to {name.split('/')[0]}")

    def _may_commit(self, repo: Repo, revision: str) -> None:
        if self.query.get("create_pr") and self.user is not None:
            return
        authors = {f"refs/pr/{pr.num}": pr.author for pr in repo.pull_requests}
        if self.user is None or authors.get(revision) != self.user.name:
            self._writable(repo.name)

    def _at(self, repo: Repo, revision: str) -> Commit:
        commit = repo.at(revision)
        if commit is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # The API.

    def _whoami(self) -> Answer:
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        token = {"role": "write" if self.user.write else "read", "displayName": "test"}
        orgs = [{"name": org, "type": "org"} for org in self.user.orgs]
        return as_json({"type": "user", "name": self.user.name, "orgs": orgs, "auth": {"accessToken": token}})

    def _create(self) -> Answer:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or (self.user.name if self.user else "")
        name = f"{owner}/{wanted['name']}"
        self._writable(name)
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            return as_json({"error": "You already created this model repo", "url": url}, 409)
        self.hub.add_repo(name, private=bool(wanted.get("private") or wanted.get("visibility") == "private"))
        return as_json({"url": url, "name": name, "id": name})

    def _info(self, name: str, revision: str) -> Answer:
        repo = self._repo(name)
        commit = self._at(repo, revision)
        blobs = self.query.get("blobs", "").lower() == "true"
        siblings = [self._sibling(path, blob, blobs) for path, blob in sorted(commit.files.items())]
        known = {"id": repo.name, "modelId": repo.name, "author": repo.name.split("/")[0], "sha": commit.sha}
        return as_json(
            {**known, "private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
            | {"lastModified": CREATED_AT, "createdAt": CREATED_AT, "tags": [], "siblings": siblings}
        )

    def _sibling(self, path: str, blob: Blob, blobs: bool) -> dict[str, object]:
        if not blobs:
            return {"rfilename": path}
        lfs = {"lfs": {"sha256": blob.lfs, "size": blob.size, "pointerSize": 130}} if blob.lfs else {}
        return {"rfilename": path, "size": blob.size, "blobId": blob.oid, **lfs}

    def _entry(self, path: str, blob: Blob) -> dict[str, object]:
        lfs = {"lfs": {"oid": blob.lfs, "size": blob.size, "pointerSize": 130}} if blob.lfs else {}
        return {"type": "file", "path": path, "size": blob.size, "oid": blob.oid, **lfs}

    def _tree(self, name: str, revision: str, folder: str) -> Answer:
        files = self._at(self._repo(name), revision).files
        prefix = f"{folder}/" if folder else ""
        inside = {path: blob for path, blob in sorted(files.items()) if path.startswith(prefix)}
        if folder and not inside:
            raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        deep = self.query.get("recursive", "").lower() == "true"
        entries: dict[str, dict[str, object]] = {}
        for path, blob in inside.items():
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if deep else min(2, len(parts))):
                parent = prefix + "/".join(parts[:depth])
                entries[parent] = {"type": "directory", "path": parent, "size": 0, "oid": git_oid(parent.encode())}
            if deep or len(parts) == 1:
                entries[path] = self._entry(path, blob)
        return self._page(list(entries.values()))

    def _page(self, entries: list[dict[str, object]]) -> Answer:
        start = int(self.query.get("cursor", "0"))
        stop = start + self.hub.page_size
        if stop >= len(entries):
            return as_json(entries[start:])
        kept = "&".join(f"{key}={quote(value)}" for key, value in self.query.items() if key != "cursor")
        link = f'<{self.hub.url}{urlsplit(self.path).path}?{kept}&cursor={stop}>; rel="next"'
        return as_json(entries[start:stop], Link=link)

    def _paths_info(self, name: str, revision: str) -> Answer:
        files = self._at(self._repo(name), revision).files
        if "json" in (self.headers.get("Content-Type") or ""):
            paths = json.loads(self.body)["paths"]
        else:
            paths = parse_qs(self.body.decode()).get("paths", [])
        return as_json([self._entry(path, files[path]) for path in paths if path in files])

    def _preupload(self, name: str, revision: str) -> Answer:
        repo = self._repo(name)
        commit = self._at(repo, revision)
        self._may_commit(repo, revision)
        asked = json.loads(self.body)
        return as_json({"files": [self._upload_mode(commit, file) for file in asked["files"]]})

    def _upload_mode(self, commit: Commit, file: dict[str, Any]) -> dict[str, object]:
        path, known = file["path"], commit.files.get(file["path"])
        mode = "lfs" if stored_as_lfs(path, file["size"]) else "regular"
        oid = {"oid": known.lfs or known.oid} if known else {}
        return {"path": path, "uploadMode": mode, "shouldIgnore": path in self.hub.ignored, **oid}

    def _commit(self, name: str, revision: str) -> Answer:
        repo = self._repo(name)
        files = dict(self._at(repo, revision).files)
        self._may_commit(repo, revision)
        lines = [json.loads(line) for line in self.body.splitlines() if line.strip()]
        title = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        for line in lines:
            self._apply(files, line["key"], line["value"])
        ref, opened = revision, {}
        if self.query.get("create_pr"):
            request = PullRequest(len(repo.pull_requests) + 1, title, self.user.name if self.user else "")
            repo.pull_requests.append(request)
            ref = f"refs/pr/{request.num}"
            opened = {"pullRequestUrl": f"{self.hub.url}/{name}/discussions/{request.num}"}
        elif revision not in repo.refs:
            raise Refused(412, "A commit can only be made on a branch")
        commit = self.hub.commit(repo, ref, title, files)
        url = f"{self.hub.url}/{name}/commit/{commit.sha}"
        return as_json({"success": True, "commitOid": commit.sha, "commitUrl": url, **opened})

    def _apply(self, files: dict[str, Blob], key: str, value: dict[str, Any]) -> None:
        match key:
            case "file":
                files[value["path"]] = git_blob(base64.b64decode(value["content"]))
            case "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = lfs_blob(self.hub.objects[value["oid"]])
            case "deletedFile":
                if value["path"] not in files:
                    raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
                del files[value["path"]]
            case "deletedFolder":
                for path in [path for path in files if path.startswith(value["path"])]:
                    del files[path]

    def _branch(self, name: str, branch: str) -> Answer:
        repo = self._repo(name)
        self._writable(name)
        if branch in repo.refs:
            raise Refused(409, f"Reference already exists: {branch}")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        repo.refs[branch] = self._at(repo, start).sha
        return as_json({"success": True})

    def _refs(self, name: str) -> Answer:
        refs = self._repo(name).refs
        branches = [
            {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": sha}
            for ref, sha in refs.items()
            if not ref.startswith("refs/")
        ]
        return as_json({"branches": branches, "converts": [], "tags": []})

    def _discussions(self, name: str) -> Answer:
        repo = self._repo(name)
        author, status = self.query.get("author"), self.query.get("status")
        found = [
            {"num": pr.num, "title": pr.title, "status": pr.status, "isPullRequest": True, "createdAt": CREATED_AT}
            | {"author": {"name": pr.author}, "repo": {"name": name, "type": "model"}}
            for pr in reversed(repo.pull_requests)
            if author in (None, pr.author) and status in (None, "all", pr.status)
        ]
        start = int(self.query.get("p", "0")) * self.hub.page_size
        page = found[start : start + self.hub.page_size]
        return as_json({"discussions": page, "count": len(found), "start": start})

    # Large files.

    def _lfs_batch(self, name: str) -> Answer:
        repo = self._repo(name)
        asked = json.loads(self.body)
        if "ref" in asked:
            self._may_commit(repo, asked["ref"]["name"])
        multipart = "multipart" in asked["transfers"] and self.hub.part_size > 0
        objects = [self._lfs_actions(item["oid"], item["size"], multipart) for item in asked["objects"]]
        answer = as_json({"transfer": "multipart" if multipart else "basic", "objects": objects})
        return Answer(200, answer.body, {"Content-Type": "application/vnd.git-lfs+json"})

    def _lfs_actions(self, oid: str, size: int, multipart: bool) -> dict[str, object]:
        known = {"oid": oid, "size": size}
        if oid in self.hub.objects:
            return known
        url = f"{self.hub.url}/lfs"
        upload: dict[str, object] = {"href": f"{url}/object/{oid}"}
        if multipart and size > self.hub.part_size:
            count = -(-size // self.hub.part_size)
            parts = {str(i): f"{url}/part/{oid}/{i}" for i in range(1, count + 1)}
            upload = {"href": f"{url}/complete/{oid}", "header": {"chunk_size": str(self.hub.part_size), **parts}}
        return {**known, "actions": {"upload": upload, "verify": {"href": f"{url}/verify/{oid}"}}}

    def _lfs(self, action: str, oid: str, rest: list[str]) -> Answer:
        match self.command, action:
            case "PUT", "object":
                self.hub.uploaded += len(self.body)
                return self._store(oid, self.body)
            case "PUT", "part":
                self.hub.uploaded += len(self.body)
                self.hub.parts[oid, int(rest[0])] = self.body
                return Answer(headers={"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})
            case "POST", "complete":
                numbers = [part["partNumber"] for part in json.loads(self.body)["parts"]]
                return self._store(oid, b"".join(self.hub.parts[oid, number] for number in numbers))
            case "POST", "verify":
                stored = self.hub.objects.get(oid)
                if stored is None or len(stored) != json.loads(self.body)["size"]:
                    raise Refused(404, "the object was not uploaded")
                return as_json({"success": True})
            case _, "download":
                if self.headers.get("Authorization"):  # signed addresses: storage takes no second way to prove who asks
                    raise Refused(400, "only one authentication mechanism is allowed")
                return self._ranged(self.hub.objects[oid], f'"{oid}"')
        raise Refused(404, f"no such route: {self.path}")

    def _store(self, oid: str, data: bytes) -> Answer:
        if hashlib.sha256(data).hexdigest() != oid:
            raise Refused(400, "the content does not match its sha256")
        self.hub.objects[oid] = data
        return as_json({"success": True})

    def _resolve(self) -> Answer:
        split = self.segments.index("resolve")
        name, revision, path = "/".join(self.segments[:split]), self.segments[split + 1], self.segments[split + 2 :]
        repo = self._repo(name)
        if repo.gated and not self._owns(name):
            message = f"Access to model {name} is restricted and you are not in the authorized list."
            raise Refused(403 if self.user else 401, message, "GatedRepo")
        commit = self._at(repo, revision)
        blob = commit.files.get("/".join(path))
        if blob is None:
            answer = failure(404, "Entry not found", "EntryNotFound")
            return Answer(404, answer.body, answer.headers | {"X-Repo-Commit": commit.sha})
        known = {"X-Repo-Commit": commit.sha}
        if blob.lfs is None:
            answer = self._ranged(blob.data, f'"{blob.oid}"')
            return Answer(answer.status, answer.body, answer.headers | known)
        linked = {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.lfs}"'}
        self.hub.objects[blob.lfs] = blob.data
        return Answer(302, b"", {"Location": f"{self.hub.storage_url}/lfs/download/{blob.lfs}", **known, **linked})

    def _ranged(self, data: bytes, etag: str) -> Answer:
        headers = {"ETag": etag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if found is None:
            part, status = data, 200
        else:
            start, stop = int(found[1]), min(int(found[2] or len(data) - 1) + 1, len(data))
            if start >= len(data):
                return Answer(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
            part, status = data[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.downloaded += len(part)
        return Answer(status, part, headers | {"Content-Length": str(len(part))})


def environment(url: str, token: str | None, cache: Path) -> dict[str, str]:
    """What a process needs to use the Hub at `url` as the owner of `token`, with its cache under `cache`."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "HF_TOKEN": token or "",
    }


def use_hub(monkeypatch: Any, url: str, token: str | None, cache: Path) -> None:
    """The same for this process through pytest's `monkeypatch`, and no waits between retries.

    huggingface_hub reads the environment once, when it is imported, so its constants are replaced too.
    """
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    for name, value in environment(url, token, cache).items():
        monkeypatch.setenv(name, value)
    for name, setting in {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_STORED_TOKENS_PATH": str(cache / "stored_tokens"),
    }.items():
        monkeypatch.setattr(constants, name, setting)
    for module in (_http, file_download):
        monkeypatch.setattr(module, "time", _Hurried())
    _http.close_session()


class _Hurried:
    """The module `time`, but nobody sleeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def sleep(seconds: float) -> None:
        pass
