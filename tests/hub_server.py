"""A Hub of one's own on 127.0.0.1: the few addresses that a push and a download use, kept in memory.

Weights and sounds go the way of git LFS, as on the real Hub when Xet is off; the rest comes in the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, token: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.repositories, self.stored = token, {}, {}
        self.refuse: dict[str, int] = {}  # part of an address -> the status to answer with
        self.requests: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args):
        pass

    def answer(self, value, status=200, headers=()):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self):
        hub, path = self.server, self.path.split("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        refused = [status for part, status in hub.refuse.items() if part in path]
        if refused:
            return self.answer({"error": "refused"}, refused[0])
        if path.startswith("/stored/"):
            hub.stored[path.removeprefix("/stored/")] = body
            return self.answer({})
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2]).removesuffix(".git")
        if name not in hub.repositories:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self.repository(name, hub.repositories[name], path.split(name, 1)[1], body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def create(self, wanted):
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.server.endpoint}/{name}"}
        if name in self.server.repositories:
            return self.answer(url, 409)
        private = wanted.get("visibility") == "private" or wanted.get("private", False)
        self.server.repositories[name] = Repository(private)
        return self.answer(url)

    def repository(self, name, repository, rest, body):
        info = {"id": name, "modelId": name, "private": repository.private, "sha": COMMIT, "tags": []}
        info["siblings"] = [{"rfilename": file} for file in sorted(repository.files)]
        if rest == "" or rest.startswith("/revision/"):
            return self.answer(info)
        if rest.startswith("/tree/"):
            sizes = [(file, len(data)) for file, data in repository.files.items()]
            return self.answer([{"type": "file", "path": f, "size": n, "oid": "0" * 40} for f, n in sizes])
        if rest.startswith("/preupload/"):
            modes = [
                {**file, "uploadMode": "lfs" if file["path"].endswith(("tensors", "wav")) else "regular"}
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if rest.endswith("/info/lfs/objects/batch"):
            uploads = [
                {**thing, "actions": {"upload": {"href": f"{self.server.endpoint}/stored/{thing['oid']}"}}}
                for thing in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": uploads})
        if rest.startswith("/commit/"):
            return self.commit(name, repository, body)
        if rest.startswith("/resolve/"):
            return self.download(repository, rest.split("/", 3)[3])
        return self.answer({"error": rest}, 404)

    def commit(self, name, repository, body):
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.stored[value["oid"]]
        url = f"{self.server.endpoint}/{name}/commit/{COMMIT}"
        return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def download(self, repository, file):
        if file not in repository.files:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        data = repository.files[file]
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        return self.answer(data, headers={"ETag": etag, "X-Repo-Commit": COMMIT})


@contextmanager
def serve(token: str):
    """A running Hub that knows one token."""
    hub = Hub(token)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
