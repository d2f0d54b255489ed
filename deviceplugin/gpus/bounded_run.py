"""Run a program of the host for a bounded time and take a bounded output: it may hang in the driver, or never end to write."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
END_WAIT_S: Final = 1.0
"""For a program that was killed. One that is stuck in the driver is left behind."""


class RunFailed(Exception):
    """It could not be started, did not end in time, wrote too much, or failed. The text says which, as a clause."""


def output_of(command: Sequence[str], limit_s: float, most_bytes: int, more_path: str = "") -> bytes:
    """What a program writes to its standard output. It and what it started are killed when it exceeds a limit. Raises RunFailed.

    It has no variable of ours. `more_path`: a folder that is searched for programs before the usual ones.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 (its path is of a fixed list)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env={"PATH": f"{more_path}:{PATH}" if more_path else PATH},
        )  # fmt: skip
    except OSError as error:
        raise RunFailed(f"cannot be started: {error}") from None
    try:
        return _read(process, time.monotonic() + limit_s, limit_s, most_bytes)
    finally:
        _end(process)


def _read(process: subprocess.Popen[bytes], until_s: float, limit_s: float, most_bytes: int) -> bytes:
    if process.stdout is None:
        raise RunFailed("has no output")
    output = bytearray()
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            raise RunFailed(f"did not end within {limit_s:g} s")
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            break
        output += part
        if len(output) > most_bytes:
            raise RunFailed(f"writes more than {most_bytes} bytes")
    try:
        status = process.wait(max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise RunFailed(f"did not end within {limit_s:g} s") from None
    if status != 0:
        raise RunFailed(f"ended with status {status}")
    return bytes(output)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also what it started: the group lasts as long as a process of it
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_WAIT_S)
