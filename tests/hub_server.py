"""A Hub of one's own on 127.0.0.1: real HTTP, the addresses that a push and a download use, kept in memory.

Weights and sounds go the way of git LFS, as on the real Hub when Xet is off; the rest comes in the commit. A repository
is a row of revisions, as git has them: a commit adds one, and what a reader is given belongs to one of them.

The server can be told to fail: `hub.fail("/commit/", "reset")`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Repository:
    private: bool
    revisions: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        """Those of the newest revision."""
        return self.revisions[-1][1]

    def add(self, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(repr((len(self.revisions), sorted(files))).encode()).hexdigest()
        self.revisions.append((name, files))
        return name

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.revisions[-1]
        return next((found for found in self.revisions if found[0] == revision), None)


@dataclass
class Fault:
    """What happens to requests whose method and address contain `part`."""

    part: str
    kind: int | str
    """A status; "reset" (the connection breaks before the request is acted on); "lost" (it is acted on, and then the
    connection breaks); "stall" (no answer); "kill" (`Hub.victim` is called, and no answer comes)."""
    times: int = 1
    met: int = 0


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.repositories, self.stored = token, {}, {}
        self.refuse: dict[str, int] = {}  # part of an address -> the status to answer with, always
        self.faults: list[Fault] = []
        self.victim: Callable[[], None] = lambda: None
        self.requests: list[tuple[str, str]] = []
        self.authorised: list[tuple[str, bool]] = []  # (path, whether a token came with it)
        self.closing = threading.Event()
        self._lock = threading.Lock()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, part: str, kind: int | str, times: int = 1) -> Fault:
        self.faults.append(Fault(part, kind, times))
        return self.faults[-1]

    def next_fault(self, address: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.part in address and fault.met < fault.times:
                    fault.met += 1
                    return fault
        return None

    def handle_error(self, request, client_address):
        pass  # a client that was killed or gave up


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, value, status=200, headers=()):
        if self.mute:
            return
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def break_off(self):
        """Close the connection the hard way: the client sees a reset."""
        self.mute = self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def handle_request(self):
        hub, path = self.server, self.path.split("?")[0]
        self.mute = False
        fault = hub.next_fault(f"{self.command} {path}")
        if fault and fault.kind == "reset":
            self.rfile.read(min(1000, int(self.headers.get("Content-Length") or 0)))
            return self.break_off()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        hub.authorised.append((path, bool(self.headers.get("Authorization"))))
        refused = [status for part, status in hub.refuse.items() if part in path]
        if refused:
            return self.answer({"error": "refused"}, refused[0])
        if fault and fault.kind in ("stall", "kill"):
            if fault.kind == "kill":
                hub.victim()
            hub.closing.wait(30)
            return self.break_off()
        if fault and fault.kind == "lost":
            self.mute = True
        elif fault:
            return self.answer({"error": "out of order"}, fault.kind)
        self.act(hub, path, body)
        if self.mute:
            self.break_off()

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def act(self, hub, path, body):
        if path.startswith("/stored/"):
            name = path.removeprefix("/stored/")
            if hashlib.sha256(body).hexdigest() != name:
                return self.answer({"error": "the checksum does not match"}, 400)
            hub.stored[name] = body
            return self.answer({})
        if path == "/":
            return self.answer({})
        name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
        known = self.headers.get("Authorization") == f"Bearer {hub.token}"
        public = name in hub.repositories and not hub.repositories[name].private and self.command in ("GET", "HEAD")
        if not known and not public:
            return self.answer({"error": "Invalid username or password."}, 401, {"X-Error-Code": "RepoNotFound"})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if name not in hub.repositories:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self.repository(name, hub.repositories[name], path.split(name, 1)[1], body)

    def create(self, wanted):
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.endpoint}/{name}"}
        if name in self.server.repositories:
            return self.answer(url, 409)
        private = wanted.get("visibility") == "private" or wanted.get("private", False)
        self.server.repositories[name] = Repository(private)
        self.server.repositories[name].add({})
        return self.answer(url)

    def repository(self, name, repository, rest, body):
        revision = rest.split("/")[2] if rest.count("/") >= 2 else "main"
        if rest.startswith(("/revision/", "/tree/", "/resolve/")) and not repository.at(revision):
            return self.answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        if rest == "" or rest.startswith("/revision/"):
            return self.answer(self.describe(name, repository, revision))
        if rest.startswith("/tree/"):
            return self.answer([entry(file, data) for file, data in sorted(repository.at(revision)[1].items())])
        if rest.startswith("/preupload/"):
            return self.answer({"files": [self.mode(repository, file) for file in json.loads(body)["files"]]})
        if rest.endswith("/info/lfs/objects/batch"):
            objects = [self.upload(thing) for thing in json.loads(body)["objects"]]
            return self.answer({"transfer": "basic", "objects": objects})
        if rest.startswith("/commit/"):
            return self.commit(name, repository, body)
        if rest.startswith("/resolve/"):
            return self.download(repository.at(revision), rest.split("/", 3)[3])
        return self.answer({"error": rest}, 404)

    def describe(self, name, repository, revision):
        sha, files = repository.at(revision)
        info = {"id": name, "modelId": name, "private": repository.private, "sha": sha, "tags": []}
        return {**info, "siblings": [{"rfilename": file} for file in sorted(files)]}

    def mode(self, repository, file):
        data = repository.files.get(file["path"])
        kind = "lfs" if is_large(file["path"]) else "regular"
        there = {"oid": hashlib.sha256(data).hexdigest() if kind == "lfs" else git_name(data)} if data else {}
        return {**file, "uploadMode": kind, "shouldIgnore": False, **there}

    def upload(self, thing):
        if thing["oid"] in self.server.stored:
            return thing
        return {**thing, "actions": {"upload": {"href": f"{self.server.endpoint}/stored/{thing['oid']}"}}}

    def commit(self, name, repository, body):
        files, lines = dict(repository.files), [json.loads(line) for line in body.splitlines()]
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != repository.revisions[-1][0]:
            return self.answer({"error": "A commit has happened since"}, 412)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repository.add(files)
        url = f"{self.server.endpoint}/{name}/commit/{sha}"
        return self.answer({"success": True, "commitOid": sha, "commitUrl": url})

    def download(self, found, file):
        sha, files = found
        if file not in files:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
        return self.answer(files[file], headers={"ETag": etag, "X-Repo-Commit": sha})


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".wav", ".pt"))


def git_name(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path: str, data: bytes) -> dict:
    """One file in a listing."""
    told = {"type": "file", "path": path, "size": len(data), "oid": git_name(data)}
    if is_large(path):
        told["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return told


@contextmanager
def serve(token: str):
    """A running Hub that knows one token."""
    hub = Hub(token)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
