"""Programs that are driven by lines of JSON, and the process of a container among them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from select import select
from typing import Any

from tests.gpu.kit.results import NotRun

ANSWER_S = 90
"""Longest one call of a container may take. Guessed; filling 8 GiB takes well under a second."""


class Lines:
    """A process that answers each line of JSON with one line of JSON."""

    def __init__(self, words: list[str], env: dict[str, str], fds: tuple[int, ...] = ()) -> None:
        self.key = env.get("TANGRAM_GRANT", "/").split("/")[-2]
        """Of its container; empty outside all."""
        self.process = subprocess.Popen(
            words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, start_new_session=True,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        self._errors: list[bytes] = []
        self._drain = threading.Thread(target=self._read_errors, daemon=True)
        self._drain.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors.append(line)

    def send(self, *words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        """The next line that is a JSON object. TimeoutError, or RuntimeError when the process ended."""
        assert self.process.stdout is not None
        end = time.monotonic() + seconds
        while True:
            if not select([self.process.stdout], [], [], max(0, end - time.monotonic()))[0]:
                self.kill()
                raise TimeoutError(f"process {self.pid} gave no answer within {seconds} s: {self.errors()}")
            line = self.process.stdout.raw.readline()  # type: ignore[attr-defined]
            if not line:
                code = self.process.wait()
                raise RuntimeError(f"process {self.pid} ended with {code}: {self.errors()}")
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found

    def errors(self) -> str:
        self._drain.join(0.5)
        lines = [line for line in self._errors if not line.startswith(b"frame #")]  # PyTorch's, many and without names
        return b"".join(lines[-12:]).decode(errors="replace").strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ends it by closing its input; kills it when it does not end."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._drain.join(1)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Container(Lines):
    """container.py as a process."""

    def request(self, function: str, *arguments: Any) -> Any:
        """What the function returned. NotRun when the driver lacks what it needs, RuntimeError when a call was refused."""
        self.send(function, *arguments)
        return self.finish(function)

    def finish(self, function: str = "") -> Any:
        answer = self.receive()
        if "missing" in answer:
            raise NotRun(f"this driver has no {answer['missing']}")
        if "refused" in answer:
            raise RuntimeError(f"{function}: {answer['refused']}")
        return answer["ok"]
