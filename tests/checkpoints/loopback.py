"""A Hub on this machine: the endpoints that huggingface_hub's client uses to push and pull, and faults on demand."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_loopback"
_ID = r"(?P<id>[\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    """One repository: what each commit holds, {path: (content, sha256 of an LFS file or None)}, and the branches."""

    private: bool
    commits: dict[str, dict[str, tuple[bytes, str | None]]]
    branches: dict[str, str]

    def at(self, revision: str) -> str | None:
        """Return the commit that `revision`, a branch or a commit, names."""
        return self.branches.get(revision, revision if revision in self.commits else None)


@dataclass(frozen=True)
class Answer:
    """What becomes of an answer.

    Attributes:
        how: "cut" (none comes), "half" (half of it comes, and looks whole), "torn" (half of it comes, then
            nothing), "page" (a page of HTML comes in its place), "stall" (none comes, and the connection stays), "drip"
            (a byte now and then), "creep" (so do its headers), "huge" (600 MB of it come), "bomb" (so they do once
            unpacked), "deep" (JSON in JSON in JSON), "whole" (it comes), or an HTTP status of failure.
        done: whether what was asked was done.
        headers: that come with it.
    """

    how: str | int
    done: bool = True
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Hub:
    """State of the loopback Hub.

    Attributes:
        lfs: store suffixes of what goes by LFS, where `use_lfs`.
        faults: by kind of request ("commit", "put", "preupload", "resolve", "head", ...): what goes wrong, once each:
            an HTTP status, alone or with the seconds of a Retry-After; "cut" (the connection ends in the middle of the
            request), "short" (half of a file comes); or an `Answer`, for what goes wrong with the answer.
        requests: every request, "KIND path".
        times: when each came, in seconds.
        released: ends the waiting of those that stall.
    """

    use_lfs: bool = True
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Any]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def forget(self) -> None:
        """Let faults that were not met, and what was asked so far, be forgotten."""
        self.faults.clear()
        self.requests.clear()
        self.times.clear()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the content of a repository."""
        repo = self.repos[repo_id]
        return {name: content for name, (content, _) in repo.commits[repo.branches[revision]].items()}

    def kinds(self) -> list[str]:
        """Return the kinds of all requests."""
        return [line.split()[0] for line in self.requests]


@contextmanager
def running(use_lfs: bool = True) -> Iterator[Hub]:
    """Run a Hub inside a `with` block; its `url` goes into HF_ENDPOINT."""
    hub = Hub(use_lfs)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


_ROUTES = [
    (kind, method, re.compile(pattern + r"$"))
    for kind, method, pattern in (
        ("create", "POST", r"/api/repos/create"),
        ("yaml", "POST", r"/api/validate-yaml"),
        ("branch", "POST", rf"/api/models/{_ID}/branch/(?P<rev>.+)"),
        ("preupload", "POST", rf"/api/models/{_ID}/preupload/(?P<rev>.+)"),
        ("batch", "POST", rf"/{_ID}\.git/info/lfs/objects/batch"),
        ("put", "PUT", r"/lfs/(?P<oid>\w+)"),
        ("verify", "POST", r"/lfs/verify"),
        ("commit", "POST", rf"/api/models/{_ID}/commit/(?P<rev>.+)"),
        ("tree", "GET", rf"/api/models/{_ID}/tree/(?P<rev>.+?)"),
        ("info", "GET", rf"/api/(?:models|datasets)/{_ID}(/revision/(?P<rev>.+))?"),
        ("resolve", "GET", rf"/{_ID}/resolve/(?P<rev>[^/]+)/(?P<file>.+)"),
        ("resolve", "HEAD", rf"/{_ID}/resolve/(?P<rev>[^/]+)/(?P<file>.+)"),
    )
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    how: str | int | None = None
    more: dict[str, str] = {}

    def log_message(self, *_: Any) -> None:
        pass

    def do_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for kind, method, pattern in _ROUTES:
            found = pattern.match(path)
            if found and method == self.command:
                self.hub.requests.append(f"{kind} {path}")
                self.hub.times.append(time.monotonic())
                self._serve(kind, {name: value for name, value in found.groupdict().items() if value is not None})
                return
        self.hub.requests.append(f"unknown {self.command} {path}")
        self.reply(404, {"error": f"the loopback hub has no {self.command} {path}"})

    do_GET = do_POST = do_PUT = do_HEAD = do_any

    def _serve(self, kind: str, names: dict[str, str]) -> None:
        waiting = self.hub.faults.get("head" if self.command == "HEAD" else kind, [])
        fault = waiting.pop(0) if waiting else None
        if fault == "cut" and kind != "resolve":  # read a little of what comes, then hang up
            self.rfile.read(100)
            self.close_connection = True
            self.connection.close()
            return
        body = self.body()
        self.how = fault.how if isinstance(fault, Answer) else None
        self.more = dict(fault.headers) if isinstance(fault, Answer) else {}
        if isinstance(fault, int | tuple):
            status, wait = fault if isinstance(fault, tuple) else (fault, None)
            self.reply(status, {"error": "a fault of the test"}, {} if wait is None else {"Retry-After": str(wait)})
        elif isinstance(fault, Answer) and not fault.done:
            self.reply(200, {"never": "done"})
        elif kind != "put" and self.headers.get("Authorization") != f"Bearer {TOKEN}":  # a PUT's address is its leave
            self.reply(401, {"error": "Invalid credentials in Authorization header"})
        elif kind in ("create", "yaml", "batch", "put", "verify"):
            getattr(self, f"on_{kind}")(body, **names)
        elif names["id"] not in self.hub.repos:
            self.reply(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        else:
            names.pop("rev", None) if kind == "info" and "rev" not in names else None
            extra = {"fault": fault} if kind == "resolve" else {}
            getattr(self, f"on_{kind}")(body, repo=self.hub.repos[names["id"]], **names, **extra)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().strip(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, status: int, value: Any = None, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        how, self.how = self.how, None
        if how in ("cut", "stall"):
            if how == "stall":
                self.hub.released.wait(60)
            self.close_connection = True
            self.connection.close()
            return
        if how in ("drip", "creep"):
            self._drip(content, creeps=how == "creep")
            return
        if how in ("huge", "bomb"):
            self._flood(packed=how == "bomb")
            return
        if how == "deep":
            content = b"[" * 200_000 + b"]" * 200_000
        whole = len(content)
        if how in ("half", "torn"):
            content = content[: whole // 2]
        elif how == "page":
            content = b"<html>The proxy says hello</html>"
        elif isinstance(how, int):
            status, content = how, b'{"error": "a fault of the test"}'
        length = whole if how == "torn" else len(content)
        self.send(status, content, length, {"Content-Type": "application/json", **(headers or {})})

    def _drip(self, content: bytes, *, creeps: bool = False) -> None:
        content = content.ljust(64)  # blanks after JSON mean nothing, and the shortest answer lasts, too
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        if not creeps:
            self.wfile.write(head)
        sent = head + content if creeps else content
        with suppress(OSError):  # the client may have gone
            for number in range(len(sent)):
                if self.hub.released.wait(0.3):
                    break
                self.wfile.write(sent[number : number + 1])
                self.wfile.flush()
        self.close_connection = True

    def _flood(self, *, packed: bool) -> None:
        packer, blanks = zlib.compressobj(wbits=31), b" " * (1 << 20)
        pieces = [packer.compress(blanks) for _ in range(600)] + [packer.flush()] if packed else [blanks] * 600
        self.send_response(200)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(sum(map(len, pieces))))
        self.end_headers()
        with suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece)
        self.close_connection = True

    def send(self, status: int, content: bytes, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)} | self.more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        if len(content) < length and self.command != "HEAD":
            self.close_connection = True

    def on_create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repos:
            self.reply(409, answer | {"error": "You already created this model repo"})
            return
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(private, {"0" * 40: {}}, {"main": "0" * 40})
        self.reply(200, answer)

    def on_yaml(self, body: bytes) -> None:
        self.reply(200, {"errors": [], "warnings": []})

    def on_branch(self, body: bytes, repo: Repo, id: str, rev: str) -> None:
        if rev in repo.branches:
            self.reply(409, {"error": "Reference already exists"})
            return
        repo.branches[rev] = repo.branches["main"]
        self.reply(200, {})

    def on_preupload(self, body: bytes, repo: Repo, id: str, rev: str) -> None:
        def mode(name: str) -> str:
            return "lfs" if self.hub.use_lfs and name.endswith((".safetensors", ".png")) else "regular"

        asked = [file["path"] for file in json.loads(body)["files"]]
        self.reply(200, {"files": [{"path": n, "uploadMode": mode(n), "shouldIgnore": False} for n in asked]})

    def on_batch(self, body: bytes, id: str) -> None:
        def actions(oid: str) -> dict[str, Any]:
            if oid in self.hub.blobs:
                return {}
            return {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}}

        objects = json.loads(body)["objects"]
        answer = [{"oid": o["oid"], "size": o["size"], "authenticated": True, **actions(o["oid"])} for o in objects]
        self.reply(200, {"transfer": "basic", "objects": answer})

    def on_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self.reply(400, {"error": "the content is not what its sha256 says"})
            return
        self.hub.blobs[oid] = body
        self.reply(200, {})

    def on_verify(self, body: bytes) -> None:
        self.reply(200, {})

    def on_commit(self, body: bytes, repo: Repo, id: str, rev: str) -> None:
        start = repo.at(rev)
        if start is None:
            self.reply(404, {"error": "no such revision"}, {"X-Error-Code": "RevisionNotFound"})
            return
        header = json.loads(body.splitlines()[0])["value"]
        if header.get("parentCommit") not in (None, start):
            self.reply(412, {"error": "A commit has happened since. Please refresh and try again."})
            return
        files = dict(repo.commits[start])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = (base64.b64decode(value["content"]), None)
            elif line["key"] == "lfsFile":
                files[value["path"]] = (self.hub.blobs[value["oid"]], value["oid"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = hashlib.sha1(f"{start}{len(repo.commits)}".encode()).hexdigest()
        repo.commits[oid], repo.branches[rev] = files, oid
        url = f"{self.hub.url}/{id}/commit/{oid}"
        self.reply(200, {"success": True, "commitUrl": url, "commitOid": oid, "pullRequestUrl": None})

    def on_info(self, body: bytes, repo: Repo, id: str, rev: str = "main") -> None:
        commit = repo.at(rev)
        if commit is None:
            self.reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        siblings = [{"rfilename": name} for name in repo.commits[commit]]
        info = {"_id": "0", "id": id, "modelId": id, "sha": commit, "private": repo.private, "siblings": siblings}
        self.reply(200, info | {"tags": [], "downloads": 0, "likes": 0})

    def on_tree(self, body: bytes, repo: Repo, id: str, rev: str) -> None:
        commit = repo.at(rev)
        if commit is None:
            self.reply(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            return
        self.reply(200, [_entry(name, *held) for name, held in repo.commits[commit].items()])

    def on_resolve(self, body: bytes, repo: Repo, id: str, rev: str, file: str, fault: Any) -> None:
        commit = repo.at(rev)
        if commit is None or file not in repo.commits[commit]:
            missing = "RevisionNotFound" if commit is None else "EntryNotFound"
            self.reply(404, {"error": missing}, {"X-Error-Code": missing})
            return
        content, oid = repo.commits[commit][file]
        etag = oid or hashlib.sha1(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "X-Linked-Size": str(len(content))}
        headers |= {"X-Linked-Etag": f'"{oid}"'} if oid else {}
        if isinstance(fault, Answer) and fault.how != "whole":
            self.reply(200, content)
            return
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        sent = content[int(start[1]) :] if start else content
        held = sent[: len(sent) // 2] if fault in ("short", "cut") else sent
        self.send(206 if start else 200, held, len(sent), headers)


def _entry(name: str, content: bytes, oid: str | None) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": git}
    return entry | ({"lfs": {"oid": oid, "size": len(content), "pointerSize": 134}} if oid else {})
