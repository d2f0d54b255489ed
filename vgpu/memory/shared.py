"""Memory of one GPU that processes of a container share, and which of them is charged for it.

A key identifies it, which its maker and all processes that opened it know. A maker has paid for it in its lease. While there is one, a process that
opened it pays nothing; after the last maker is gone, the container is charged once, for the most that a process opened of it, until
the last process has closed it. The end of a process closes all that it had open. Pure; bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ENTRIES_LIMIT: Final = 16_384
"""On one GPU: bounds the arbiter's memory for a container. Guessed."""


@dataclass(slots=True)
class _Memory:
    makers: dict[int, int] = field(default_factory=dict)
    """Bytes by process."""
    openers: dict[int, int] = field(default_factory=dict)

    @property
    def charged_bytes(self) -> int:
        return 0 if self.makers else max(self.openers.values(), default=0)

    @property
    def entries(self) -> int:
        return len(self.makers) + len(self.openers)


class Shared:
    """See the module. A process is any number."""

    def __init__(self) -> None:
        self.charged_bytes = 0
        """Bytes charged beside all leases."""
        self._entries = 0
        self._memory: dict[bytes, _Memory] = {}
        self._keys: dict[int, set[bytes]] = {}
        self._made_bytes: dict[int, int] = {}

    @property
    def entries_limit(self) -> int:
        """Maximum number of recorded makers and openers."""
        return ENTRIES_LIMIT

    def full(self) -> bool:
        """Whether no more makers and openers are recorded."""
        return self._entries >= ENTRIES_LIMIT

    def made_bytes(self, process: int, without: bytes = b"") -> int:
        """The part of its lease that others may have open."""
        memory = self._memory.get(without)
        return self._made_bytes.get(process, 0) - (memory.makers.get(process, 0) if memory is not None else 0)

    def missing_bytes(self, key: bytes, opened_bytes: int) -> int:
        """The additional charge if a process opened `opened_bytes` of it."""
        memory = self._memory.get(key)
        if memory is None:
            return opened_bytes
        return 0 if memory.makers else max(0, opened_bytes - memory.charged_bytes)

    def maker(self, key: bytes) -> int | None:
        """The process that made it first, of those that have it; None if there is none."""
        memory = self._memory.get(key)
        return next(iter(memory.makers), None) if memory is not None else None

    def openers(self) -> list[int]:
        """The processes that may have shared memory open."""
        return list(self._keys)

    def opened_bytes(self, process: int) -> tuple[int, int]:
        """Bytes that it has open, and the part of them that has no maker any more."""
        opened_bytes = orphaned_bytes = 0
        for key in self._keys.get(process, ()):
            memory = self._memory[key]
            opened_bytes += memory.openers.get(process, 0)
            orphaned_bytes += 0 if memory.makers else memory.openers.get(process, 0)
        return opened_bytes, orphaned_bytes

    def make(self, key: bytes, process: int, made_bytes: int) -> None:
        """The process paid `made_bytes` for the memory."""
        self._made_bytes[process] = self.made_bytes(process, without=key) + made_bytes
        self._note(key, process).makers[process] = made_bytes
        self._noted(key)

    def open(self, key: bytes, process: int, opened_bytes: int) -> None:
        """The process opened `opened_bytes` of the memory."""
        openers = self._note(key, process).openers
        openers[process] = max(opened_bytes, openers.get(process, 0))
        self._noted(key)

    def let_go(self, key: bytes, process: int, *, made: bool, opened: bool) -> None:
        """The process freed the memory that it made, or closed the memory that it opened. No effect for a key that it has not made or opened."""
        if key not in self._keys.get(process, ()):
            return
        memory = self._note(key, process)
        if made:
            self._made_bytes[process] = self._made_bytes.get(process, 0) - memory.makers.pop(process, 0)
        if opened:
            memory.openers.pop(process, None)
        if process not in memory.makers and process not in memory.openers:
            self._keys[process].discard(key)
            if not self._keys[process]:
                del self._keys[process]
        self._noted(key)

    def leave(self, process: int) -> None:
        """The process is gone."""
        for key in list(self._keys.get(process, ())):
            self.let_go(key, process, made=True, opened=True)
        self._keys.pop(process, None)
        self._made_bytes.pop(process, None)

    def _note(self, key: bytes, process: int) -> _Memory:
        """Remove the memory from the sums until `_noted`, and return it."""
        memory = self._memory.setdefault(key, _Memory())
        self._keys.setdefault(process, set()).add(key)
        self.charged_bytes -= memory.charged_bytes
        self._entries -= memory.entries
        return memory

    def _noted(self, key: bytes) -> None:
        memory = self._memory[key]
        self.charged_bytes += memory.charged_bytes
        self._entries += memory.entries
        if memory.entries == 0:
            del self._memory[key]
