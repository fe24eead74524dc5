"""A small Hugging Face Hub on this machine: repositories of files, byte ranges, and ways to fail."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves `repos` (owner/repo to file to bytes) at `url` while the block lasts.

    The next GETs of a file end after as many bytes as `break_after` lists. `announce` adds to the size that a file is
    said to have. Repositories in `gated` refuse. `ranges` collects the Range headers that came.
    """

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        self.repos = repos
        self.break_after: list[int] = []
        self.announce = 0
        self.gated: set[str] = set()
        self.ranges: list[str | None] = []
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, with_body=False)

            def do_GET(self) -> None:
                hub.answer(self, with_body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        """Answers one request."""
        self.requests.append(f"{request.command} {request.path}")
        parts = request.path.partition("?")[0].strip("/").split("/")
        listing = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if listing else parts[:2])
        if repo in self.gated:
            self._refuse(request, 403, "GatedRepo")
        elif repo not in self.repos:
            self._refuse(request, 401, "RepoNotFound")
        elif listing:
            files = [{"type": "file", "path": path, "size": len(data)} for path, data in self.repos[repo].items()]
            self._send(request, 200, json.dumps([file | {"oid": COMMIT} for file in files]).encode())
        elif (path := "/".join(parts[4:])) not in self.repos[repo]:
            self._refuse(request, 404, "EntryNotFound")
        else:
            self._send_file(request, self.repos[repo][path], with_body=with_body)

    def _send_file(self, request: BaseHTTPRequestHandler, data: bytes, *, with_body: bool) -> None:
        wanted = request.headers["Range"]
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        size = len(data) + self.announce
        request.send_response(206 if wanted else 200)
        request.send_header("Content-Length", str(size - start))
        if wanted:
            request.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        request.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.end_headers()
        if not with_body:
            return
        self.ranges.append(wanted)
        limit = self.break_after.pop(0) if self.break_after else None
        request.wfile.write(data[start:] if limit is None else data[start : start + limit])
        if limit is not None or self.announce:
            request.close_connection = True

    def _refuse(self, request: BaseHTTPRequestHandler, status: int, code: str) -> None:
        request.send_response(status)
        request.send_header("X-Error-Code", code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
