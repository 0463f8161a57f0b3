"""A data set of the Hub: the real client against a local endpoint that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny_chat import chat

ROOT = Path(__file__).parents[2]
COMMIT = "c0ffee" + "0" * 34
FILES = {
    "README.md": b"# not data\n",
    "data/train.jsonl": "".join(json.dumps(chat(f"question {i}", "an answer")) + "\n" for i in range(5)).encode(),
}
READ = """
import sys
from torchspec_core.data.sources import Conversation, read_conversations
from torchspec_core.errors import UserError
try:
    rows = [c.messages[0].content for c in read_conversations("hub", sys.argv[1]) if isinstance(c, Conversation)]
except UserError as error:
    rows = [str(error)]
print(*rows, sep="\\n")
"""


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)  # type: ignore[attr-defined]
        prefix = f"/datasets/lab/chats/resolve/{COMMIT}/"
        headers = {"X-Repo-Commit": COMMIT}
        if path == "/api/datasets/lab/chats/revision/v2":
            content, status = json.dumps({"id": "lab/chats", "sha": COMMIT}).encode(), 200
        elif path == f"/api/datasets/lab/chats/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            content, status = json.dumps(entries).encode(), 200
        elif path.startswith(prefix) and path.removeprefix(prefix) in FILES:
            content, status = FILES[path.removeprefix(prefix)], 200
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        else:
            content, status = b'{"error": "not found"}', 404
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def read(hub: ThreadingHTTPServer, home: Path, name: str) -> list[str]:
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    environment = {key: value for key, value in os.environ.items() if key not in offline}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(home)}
    command = [sys.executable, "-c", READ, name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_data_set_is_fetched_at_its_revision_and_read(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    assert read(hub, tmp_path, "lab/chats@v2") == [f"question {i}" for i in range(5)]
    assert not any(path.endswith("README.md") for path in hub.asked), "only files of rows are fetched"  # type: ignore[attr-defined]


def test_an_unknown_data_set_is_one_sentence(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    (line,) = read(hub, tmp_path, "lab/none")
    assert line.startswith("the data set lab/none could not be fetched from the Hub")
    assert line.endswith("download it and use the source `file` with its folder as `path`")
