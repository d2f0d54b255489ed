#!/usr/bin/env python3
"""A server in the place of one that needs a large image, so that the manifests of examples/ run where it cannot be had.

It has the names of the programs that the images start, ignores their arguments except a model's name and the port, and answers a GET of the paths
that a probe or a README reads.
"""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

PORTS = {"vllm": 8000, "start-notebook.py": 8888}


class Handler(BaseHTTPRequestHandler):
    """Answers with JSON."""

    answers: ClassVar[dict[str, object]] = {}

    def do_GET(self) -> None:  # the name is http.server's
        answer = self.answers.get(self.path)
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing for each request."""


def main(program: str, words: list[str]) -> None:
    """Serve until the container ends."""
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    names = [word for word in words if not word.startswith("-")]
    port = int(options.get("port", PORTS[program]))
    models = [{"id": name} for name in names[-1:]]
    Handler.answers = {"/api": {"version": "stand-in"}, "/health": {}, "/v1/models": {"data": models}}
    # as the first process of a container it would be sent SIGTERM in vain
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"stand-in for {program} {' '.join(words)}: http://127.0.0.1:{port}/lab?token=stand-in", flush=True)
    ThreadingHTTPServer(("", port), Handler).serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[0]).name, sys.argv[1:])
