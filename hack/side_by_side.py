"""Run commands at the same time, and print the output of one after that of the other: `python -m hack.side_by_side 'COMMAND' 'COMMAND'...`.

Each is a line for the shell. What the first prints is seen at once; the others' is kept until those before have ended. So a log reads as
if they had run one after the other. The status is that of the first one that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Final

END_S: Final = 30.0
"""For the others, where the run is interrupted, and for output that a program prints which a command left running. Guessed."""


class Command:
    """A command that runs, and its output so far."""

    def __init__(self, line: str, out: IO[bytes]) -> None:
        self._out = out
        self._kept: list[bytes] | None = []
        """None when it is its turn."""
        self._lock = threading.Lock()
        printed, end = os.pipe()
        try:
            self.process = subprocess.Popen(
                line, shell=True, stdin=subprocess.DEVNULL, stdout=end, stderr=subprocess.STDOUT
            )
        finally:
            os.close(end)
        self._reader = threading.Thread(target=self._read, args=(printed,), daemon=True)
        self._reader.start()

    def _read(self, printed: int) -> None:
        while chunk := os.read(printed, 65_536):
            with self._lock:
                if self._kept is None:
                    self._print(chunk)
                else:
                    self._kept.append(chunk)
        os.close(printed)

    def _print(self, chunk: bytes) -> None:
        self._out.write(chunk)
        self._out.flush()

    def finish(self) -> int:
        """Print what it printed, and from now on what it prints, until it ends. Its status; of one that a signal ended as a shell has it."""
        with self._lock:
            self._print(b"".join(self._kept or ()))
            self._kept = None
        status = self.process.wait()
        self._reader.join(END_S)
        return status if status >= 0 else 128 - status


def run(lines: Sequence[str], out: IO[bytes]) -> int:
    """Status of the first that failed, else 0. None of them runs any more, whatever happens here."""
    commands: list[Command] = []
    try:
        commands.extend(Command(line, out) for line in lines)
        return next(filter(None, [command.finish() for command in commands]), 0)
    finally:
        for command in commands:
            command.process.terminate()
        for command in commands:
            try:
                command.process.wait(END_S)
            except subprocess.TimeoutExpired:
                command.process.kill()
                command.process.wait()


def _terminated(number: int, _: object) -> None:
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return run(sys.argv[1:], sys.stdout.buffer)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
