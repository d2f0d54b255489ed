"""How a command ends: an error becomes a sentence and an exit code, and a full disk or a closed pipe is no traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from tangramctl.errors import Broken, CommandError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def answering(written: str = "standard output") -> Iterator[None]:
    """An error inside becomes a sentence and an exit code. An interrupt, or a reader that closed the pipe, ends this process as it ends any other.

    `written` is what is full when the error of a write names no file.
    """
    try:
        try:
            yield
        finally:
            _flush()
    except CommandError as trouble:
        _fail(trouble)
    except KeyboardInterrupt:
        _die_of(signal.SIGINT)
    except BrokenPipeError:
        _die_of(signal.SIGPIPE)
    except OSError as error:
        full = written if error.errno in _FULL else ""
        what = str(error.filename)[:200] if error.filename else full
        _fail(Broken(f"{what}: {error.strerror}" if what else str(error)))


def _flush() -> None:
    """Here, where a failure can be reported, and not at the very end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is lost
        raise Broken(f"standard output: {error.strerror}") from None


def _fail(trouble: CommandError) -> NoReturn:
    print(f"tangramctl: {trouble}", file=sys.stderr)
    sys.exit(trouble.code)


def _die_of(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def open_standard() -> None:
    """A file that is opened must not get the number of a stream that the caller closed. A command finds it closed, as its caller did."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
