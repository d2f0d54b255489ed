"""What a copier reports on its standard error, line by line, and what that says of its pool. Handles text only.

The socket answers one connection at a time, which is the arbiter's: so the host pool's program reads these lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

PREFIX: Final = "tangram-copier: "
ALIVE: Final = "alive"
"""What a copier that is ready states every 2 s, as long as neither its connection nor a copy hangs (`shim/copier/server.c`)."""
MIB: Final = 2**20
LINE_BYTES: Final = 2048
"""No line of a copier is longer (`shim/copier/fail.c`: 1,024 characters)."""
_PARTS: Final = re.compile(r"(\d+) of \d+ MiB of the pool are (allocated|registered)\Z")
_KIND: Final = re.compile(r"the pool has (.+), the context (\d+) MiB\Z")


@dataclass(slots=True)
class CopierProgress:
    """Of one copier process."""

    allocated_bytes: int = 0
    registered_bytes: int = 0
    ready: bool = False
    pages: str = ""
    """What the pool consists of, such as `huge pages of a hugetlbfs`."""
    context_mib: int = 0
    """The copier's own memory on the GPU; 0 = not known."""
    last: str = ""
    """The last line: if the process ends by itself, it says why."""
    states_alive: bool = False
    """It has said that it is alive. One of an earlier release never does."""

    def read(self, line: bytes) -> str:
        """Take one line in. Returns its text; empty for one that is of no interest to a reader of the log."""
        text = line[:LINE_BYTES].decode(errors="replace").strip().removeprefix(PREFIX)
        if text == ALIVE:
            self.states_alive = True
            return ""
        if found := _PARTS.match(text):
            size_bytes = int(found[1]) * MIB
            if found[2] == "allocated":
                self.allocated_bytes = size_bytes
            else:
                self.registered_bytes = size_bytes
        elif found := _KIND.match(text):
            self.pages, self.context_mib = found[1], int(found[2])
        elif text == "ready":
            self.ready = True
        if text:
            self.last = text
        return text
