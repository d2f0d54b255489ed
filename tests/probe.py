"""A process of shim/tests/probe.c: a GPU program that makes one driver call a line and answers with numbers."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.signals import send_signal

MIB = 2**20


class Probe:
    """Speaks with a process that was started with pipes and as text."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._ended = False

    def request(self, *words: object) -> list[int]:
        """One call and its answer: the CUresult, then what came back."""
        self.start(*words)
        return self.finish()

    def start(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def finish(self) -> list[int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the program ended with {self.process.wait()}: {self.process.communicate()[1]}")
        return [int(word) for word in line.split()]

    def alloc(self, mib: float) -> int:
        """The CUresult."""
        return self.request("alloc", int(mib * MIB))[0]

    def info_mib(self) -> tuple[float, float]:
        """cuMemGetInfo: free, total."""
        code, free, total = self.request("info")
        assert code == 0
        return free / MIB, total / MIB

    def stop(self) -> None:
        send_signal(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> str:
        """Closes its input, which ends it; what it wrote to stderr."""
        self._ended = True
        return self.process.communicate()[1]

    def close(self) -> None:
        """Kills it, unless it ended; a sanitizer's complaint is a failure."""
        if self.process.poll() is None:
            self.process.kill()
        if not self._ended:
            errors = self.end()
            assert "Sanitizer" not in errors, errors
