"""A web server on this machine that misbehaves on request."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Site:
    """Files by path, tricks to play instead of serving them, and the requests received.

    ``tricks[path]`` is a list: each request uses up the first one. When none is left, files are
    served normally; if ``path`` is in ``stuck``, the last trick repeats for ever.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.tricks: dict[str, list[Callable[[Handler, bytes], None]]] = {}
        self.stuck: set[str] = set()
        self.heads: dict[str, dict[str, str]] = {}
        self.etags: dict[str, str | None] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.url = ""

    def ranges(self, path: str) -> list[str | None]:
        """Return the Range header of each request for a path."""
        return [span for requested, span in self.requests if requested == path]


class Handler(BaseHTTPRequestHandler):
    """Serves a `Site`, including byte ranges."""

    protocol_version = "HTTP/1.1"
    site: Site

    def do_GET(self) -> None:
        """Serve a file, or play a trick."""
        path = urlsplit(self.path).path  # a proxy receives the whole address
        site = self.site
        site.requests.append((path, self.headers["Range"]))
        site.headers.append(dict(self.headers))
        self.close_connection = True
        tricks = site.tricks.get(path, [])
        if tricks:
            trick = tricks[0] if path in site.stuck and len(tricks) == 1 else tricks.pop(0)
            trick(self, site.files.get(path, b""))
        elif path in site.files:
            self.serve(site.files[path])
        else:
            self.status(404)

    def do_HEAD(self) -> None:
        """Return a file's location for Hugging Face's library; nothing else sends HEAD."""
        headers = self.site.heads.get(urlsplit(self.path).path)
        self.close_connection = True
        self.status(405 if headers is None else 200, **(headers or {}))

    def status(self, code: int, **headers: str) -> None:
        """Answer with a status and headers, without a file."""
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def etag(self, body: bytes) -> str | None:
        """Return the file's ETag."""
        path = urlsplit(self.path).path
        return self.site.etags.get(path, f'"{hashlib.sha256(body).hexdigest()[:16]}"')

    def serve(self, body: bytes, *, cut: int | None = None, ranges: bool = True) -> None:
        """Send a file or the requested range, at most ``cut`` bytes of it."""
        span, only_if = self.headers["Range"], self.headers["If-Range"]
        tag = self.etag(body)
        start = 0
        if span and ranges and (only_if is None or only_if == tag):
            start = int(span.removeprefix("bytes=").rstrip("-"))
            if start >= len(body):
                self.status(416, Content_Range=f"bytes */{len(body)}")
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if tag is not None:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:][:cut])

    def end_headers(self) -> None:
        """Announce that this connection serves one request, or a client might send another one."""
        self.send_header("Connection", "close")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Ignores clients that hang up: tests refuse the rest of a file."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback for every error except a closed connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving() -> Iterator[Site]:
    """Serve a new site until the block ends."""
    site = Site()
    server = Server(("127.0.0.1", 0), type("Here", (Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
