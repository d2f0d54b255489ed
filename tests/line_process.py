"""A child process that reads a request a line and writes its answer as a line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class LineProcess:
    """A Python program: `words` are its own and its arguments."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds,
        )  # fmt: skip

    def send(self, line: str) -> None:
        """Send a request, and wait for nothing."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, what: str = "") -> Any:
        """The next answer. `what` was requested, for the message if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process ended {what}".rstrip()
        return json.loads(line)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
