"""Measures from outside: what the processes of each container use by the driver itself, sample after sample.

Runs without the library in a process of its own. A process belongs to the container whose grant its environment names. Bytes are
NVML's, by process; beside it stands cuMemGetInfo's figure for the whole GPU, less its figure at `zero`.

    ["now", KEY...] ["peak", KEY] ["device"] ["zero"]    one JSON list a line in, one JSON object a line out
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

import pynvml

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
import cuda

PAUSE_S = 0.001
"""Between samples. NVML itself takes about as long on the real driver (guessed)."""
STILL_S, STILL_TRIES = 0.02, 100
"""Two readings alike at that distance are a GPU that stands still. Guessed."""


class Watch:
    """Peaks since they were last requested."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        cuda.must("cuInit", 0)
        cuda.primary()
        self._containers: dict[int, str] = {}
        self.bytes: dict[str, int] = {}
        self.processes: dict[int, int] = {}
        self._peak: dict[str, int] = {}
        self.samples = self.errors = self.unknown = 0
        self._base = self._device_peak = -1
        self._wait = threading.Event()
        self.zero()

    def zero(self) -> None:
        """From here on; once the GPU stands still, since memory of processes that ended comes back when it comes back."""
        base = -1
        for _ in range(STILL_TRIES):
            self._base, base = cuda.info()[0], self._base
            if self._base == base:
                break
            self._wait.wait(STILL_S)
        self._device_peak, self._peak = 0, {}

    def sample(self) -> None:
        try:
            listed = pynvml.nvmlDeviceGetComputeRunningProcesses(self._gpu)
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
            key = seen[one.pid] = self._containers.get(one.pid) or _container(one.pid)
            self.bytes[key] = self.bytes.get(key, 0) + (one.usedGpuMemory or 0)
        self._containers = seen
        for key, used in self.bytes.items():
            self._peak[key] = max(self._peak.get(key, 0), used)

    def answer(self, words: list[Any]) -> dict[str, Any]:
        self.sample()
        match words:
            case ["now", *keys]:
                return {"bytes": sum(self.bytes.get(key, 0) for key in keys), "processes": self.processes}
            case ["peak", key]:
                samples, self.samples = self.samples, 0
                return {
                    "bytes": self._peak.pop(key, 0),
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


def _container(pid: int) -> str:
    """Key of the grant; a process that is just ending has no environment any more."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    grants = [word for word in words if word.startswith(b"TANGRAM_GRANT=")]
    return grants[0].decode().split("/")[-2] if grants else ""


def main() -> None:
    watch = Watch(sys.argv[1])
    commands = open(0, "rb", buffering=0)  # noqa: SIM115  unbuffered, or select would not see what was read ahead
    print(json.dumps({"ready": True}), flush=True)
    while True:
        if select.select([commands], [], [], PAUSE_S)[0]:
            line = commands.readline()
            if not line:
                return
            print(json.dumps(watch.answer(json.loads(line))), flush=True)
        watch.sample()


if __name__ == "__main__":
    main()
