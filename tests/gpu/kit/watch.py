"""Stands outside and looks: what the driver itself says each group of processes uses, sample after sample.

Runs without the library in a process of its own. A group is a session (setsid): the tenants of one container are started in
one. Bytes are NVML's, by process; beside it stands what cuMemGetInfo says for the whole card, less what it said at `zero`.

    ["now", SID] ["peak", SID] ["device"] ["zero"]    one JSON list a line in, one JSON object a line out
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pynvml

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
import cuda

PAUSE_S = 0.001
"""Between samples. NVML itself takes about as long on the real driver (guessed)."""


class Watch:
    """Peaks since they were last asked for."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._card = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        cuda.must("cuInit", cuda.c_uint(0))
        cuda.primary()
        self._sessions: dict[int, int] = {}
        self.bytes: dict[int, int] = {}
        self.processes: dict[int, int] = {}
        self._peak: dict[int, int] = {}
        self.samples = self.errors = self.unknown = 0
        self._base = self._device_peak = 0
        self.zero()

    def zero(self) -> None:
        self._base, self._device_peak = cuda.info()[0], 0

    def sample(self) -> None:
        try:
            listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._card)
        except pynvml.NVMLError:
            self.errors += 1
            return
        self.samples += 1
        free = cuda.info()[0]
        self._device_peak = max(self._device_peak, self._base - free)
        self.bytes, seen = {}, {}
        self.processes = {one.pid: one.usedGpuMemory or 0 for one in listed}
        for one in listed:
            self.unknown += one.usedGpuMemory is None
            sid = seen[one.pid] = self._sessions.get(one.pid) or _session(one.pid)
            self.bytes[sid] = self.bytes.get(sid, 0) + (one.usedGpuMemory or 0)
        self._sessions = seen
        for sid, used in self.bytes.items():
            self._peak[sid] = max(self._peak.get(sid, 0), used)

    def answer(self, words: list[Any]) -> dict[str, Any]:
        self.sample()
        match words:
            case ["now", sid]:
                return {"bytes": self.bytes.get(sid, 0), "processes": self.processes}
            case ["peak", sid]:
                samples, self.samples = self.samples, 0
                return {
                    "bytes": self._peak.pop(sid, 0),
                    "samples": samples,
                    "unknown": self.unknown,
                    "errors": self.errors,
                }
            case ["device"]:
                return {"bytes": self._device_peak}
            case ["zero"]:
                self.zero()
                return {}
        raise ValueError(f"watch: {words} is none of now, peak, device, zero")


def _session(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return 0


def main() -> None:
    watch = Watch(sys.argv[1])
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
            if not line:
                return
            print(json.dumps(watch.answer(json.loads(line))), flush=True)
        watch.sample()


if __name__ == "__main__":
    main()
