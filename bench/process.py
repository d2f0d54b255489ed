"""What a process has used so far, read off /proc."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Processor time. Does not grow with the machine's load, as waiting does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """Resident memory, or another line of the kind: `VmHWM` is the highest so far. Raises LookupError without that line."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"/proc/{pid}/status names no {what}")
