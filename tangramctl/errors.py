"""Why a command could not be run, and its exit code.

    TangramError
    └── CommandError    something that the user or the operator can correct
        ├── BadOption   2    an option's value is not one that this machine can serve
        ├── NoGpu       69   no driver, or no GPU that may be shared (EX_UNAVAILABLE)
        ├── NotReleased 69   no pod has the GPU, and Tangram cannot close a single GPU of its node (drain)
        ├── Broken      70   the arbiter cannot be started, the library is missing (EX_SOFTWARE)
        ├── MigFailed   70   the driver refused a step of a MIG layout (mig_changes)
        ├── NoCapacity  75   no GPU has so much free now (EX_TEMPFAIL: later there may be)
        ├── DrainTimedOut 75 pods have a GPU still, or a process has it open (drain)
        ├── Conflict    75   others write the node at the same time (cordon)
        ├── LayoutRefused 75 a MIG layout cannot be had now (mig)
        ├── CommandNotExecutable  126  the command is there and cannot be executed
        └── NotFound    127  the command is not there

The codes are those of sysexits.h and of the shell; a command that runs answers with its own.
"""

from __future__ import annotations

from typing import ClassVar

from vgpu.api.errors import TangramError


class CommandError(TangramError):
    """Ends tangramctl with `code` and the text."""

    code: ClassVar[int] = 1


class BadOption(CommandError):
    """An option's value cannot be served."""

    code = 2


class NoGpu(CommandError):
    """No driver, or no GPU that may be shared."""

    code = 69


class Broken(CommandError):
    """A part of Tangram itself is missing or does not start."""

    code = 70


class NoCapacity(CommandError):
    """No GPU has so much free now."""

    code = 75


class CommandNotExecutable(CommandError):
    """The command cannot be executed."""

    code = 126


class NotFound(CommandError):
    """There is no such command."""

    code = 127
