"""What a process is called that has two connections: one for memory and one for GPU time."""

from __future__ import annotations

Identity = tuple[int, int]
"""Its host pid; where that is 0 (another pid namespace), with the pid that it says it has in its container."""


def named(pid: int, pid_in_container: int) -> Identity:
    """Of a connection."""
    return (pid, 0) if pid else (0, pid_in_container)
