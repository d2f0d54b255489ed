"""The identity of a process that has two connections: one for memory and one for GPU time."""

from __future__ import annotations

Identity = tuple[int, int]
"""Its host pid; if that is 0 (another pid namespace), with its stated pid in its container."""


def named(pid: int, pid_in_container: int) -> Identity:
    """The identity of a connection's process."""
    return (pid, 0) if pid else (0, pid_in_container)
