"""A data set of the Hub is read as a stream: what is not needed is not downloaded."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import soundfile
from preparing import TEXT, voice

pytest.importorskip("datasets")
ROOT = Path(__file__).parents[1]
COMMIT = "d" * 40


class Handler(BaseHTTPRequestHandler):
    """As much of the Hub as reading a data set takes, with a count of the bytes of its files."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body: bytes, status: int = 200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        files, path = self.server.files, self.path.split("?")[0]
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        entries = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
        if resolved := re.match(r"/datasets/me/voice/resolve/[^/]+/(.+)", path):
            return self.file(files.get(resolved[1]))
        if "/paths-info/" in path:
            return self.answer(json.dumps([e for e in entries if e["path"].split("/")[-1] in asked]).encode())
        if "/tree/" in path:
            inside = path.split("/tree/")[1].partition("/")[2]
            entries.append({"type": "directory", "path": "data", "size": 0, "oid": "0" * 40})
            deep = "recursive=true" in self.path.lower()
            found = [e for e in entries if e["path"].startswith(inside) and e["path"] != inside]
            found = [e for e in found if deep or "/" not in e["path"].removeprefix(inside).strip("/")]
            return self.answer(json.dumps(found).encode()) if found else self.answer(b"{}", 404)
        if path.startswith("/api/datasets/me/voice"):
            about = {"_id": "1", "id": "me/voice", "sha": COMMIT, "private": False, "gated": False, "disabled": False,
                     "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": n} for n in files]}  # fmt: skip
            return self.answer(json.dumps(about).encode(), Content_Type="application/json")
        return self.answer(b'{"error": "not here"}', 404)

    do_HEAD = do_POST = do_GET

    def file(self, data: bytes | None):
        if data is None:
            return self.answer(b"", 404, X_Error_Code="EntryNotFound")
        first, last, status, headers = 0, len(data) - 1, 200, {}
        if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last, status = int(wanted[1]), min(last, int(wanted[2] or last)), 206
            headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        part = data[first : last + 1]
        if self.command != "HEAD":
            self.server.sent += len(part)
        return self.answer(part, status, ETag='"abc"', Accept_Ranges="bytes", **headers)


@pytest.fixture(scope="module")
def hub():
    """240 recordings of 0.4 MB in six files of Parquet, 40 in each, ten in a row group."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = {"README.md": b"---\nlicense: cc0-1.0\n---\n"}
    for part in range(6):
        rows = []
        for n in range(part * 40, part * 40 + 40):
            sound = io.BytesIO()
            soundfile.write(sound, voice(2.0, 96_000, seed=n), 96_000, format="WAV")
            row = {"audio": {"bytes": sound.getvalue(), "path": f"{n}.wav"}, "sentence": f"{TEXT} And {n}."}
            rows.append({**row, "speaker_id": n % 2})
        table, data = pyarrow.Table.from_pylist(rows), io.BytesIO()
        kinds = {"audio": {"_type": "Audio"}, "sentence": {"dtype": "string", "_type": "Value"}}
        kinds["speaker_id"] = {"dtype": "int64", "_type": "Value"}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": kinds}})})
        parquet.write_table(table, data, row_group_size=10, compression="none")
        files[f"data/train-{part:05d}-of-00006.parquet"] = data.getvalue()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.sent = files, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


READ = """
import itertools, sys
from pathlib import Path
from f5kit.ingest import open_source
_, recordings = open_source("hf://me/voice?split=train", Path(sys.argv[1]))
for r in itertools.islice(recordings, int(sys.argv[2])):
    print(r.id, len(r.sound), r.speaker, r.text, sep="|")
"""


def test_the_first_rows_cost_the_first_rows(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT),
                   "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    whole = sum(len(data) for data in hub.files.values())
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path), "12"], env={**os.environ, **environment},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == 12 and lines[3] == f"3|{2 * 96_000 * 2 + 44}|1|{TEXT} And 3."
    assert hub.sent < whole / 3, f"{hub.sent:,} bytes of {whole:,} were sent"
    kept = sum(path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file())
    assert kept < 1_000_000, "the files were kept"
