"""The extender is requested its snapshot over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from extender.snapshot_writer import WAIT_S
from tangramctl.cluster import EXTENDER_TIMEOUT_S, snapshot_at
from tangramctl.errors import BadOption

COMPRESSED = gzip.compress(b"{}", mtime=0)


@contextmanager
def answering(status: int, body: bytes, encoding: str = "") -> Iterator[str]:
    """A server that answers so, and its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Accept-Encoding"] == "gzip"
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if encoding:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("body", "encoding", "read"),
    [(COMPRESSED, "gzip", b"{}"), (b"{}", "", b"{}"), (COMPRESSED[:-4], "gzip", None)],
    ids=["gzip", "plain", "cut"],
)
def test_a_snapshot_is_read_compressed_or_not(body: bytes, encoding: str, read: bytes | None) -> None:
    with answering(200, body, encoding) as url:
        assert snapshot_at(url) == read


def test_a_busy_extender_is_reported_and_any_other_failure_is_as_no_extender() -> None:
    with (
        answering(429, b"another client reads a snapshot\n") as url,
        pytest.raises(BadOption, match="another client reads a snapshot"),
    ):
        snapshot_at(url)
    with answering(503, b"") as url:
        assert snapshot_at(url) is None


def test_tangramctl_waits_longer_than_the_extender_queues_it() -> None:
    assert EXTENDER_TIMEOUT_S > WAIT_S + 5
