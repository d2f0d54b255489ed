"""What can keep a command from being run, and the exit code that says so.

    TangramError
    └── Trouble         something that a person can do something about
        ├── BadOption   2    an option's value is not one that this machine can serve
        ├── NoGpu       69   no driver, or no GPU that may be shared (EX_UNAVAILABLE)
        ├── Broken      70   the arbiter cannot be started, the library is missing (EX_SOFTWARE)
        ├── NoRoom      75   no GPU has so much free now (EX_TEMPFAIL: later there may be)
        ├── CannotRun   126  the command is there and cannot be executed
        └── NotFound    127  the command is not there

The codes are those of sysexits.h and of the shell; a command that runs answers with its own.
"""

from __future__ import annotations

from typing import ClassVar

from vgpu.api.errors import TangramError


class Trouble(TangramError):
    """Ends tangramctl with `code` and the text."""

    code: ClassVar[int] = 1


class BadOption(Trouble):
    """An option's value cannot be served."""

    code = 2


class NoGpu(Trouble):
    """No driver, or no GPU that may be shared."""

    code = 69


class Broken(Trouble):
    """A part of Tangram itself is missing or does not start."""

    code = 70


class NoRoom(Trouble):
    """No GPU has so much free now."""

    code = 75


class CannotRun(Trouble):
    """The command cannot be executed."""

    code = 126


class NotFound(Trouble):
    """There is no such command."""

    code = 127
