"""The NVML child on a real driver: how long it takes to open, to answer and to come back. Run as a program; prints one JSON object.

python tests/gpu/nvml_child.py [DRIVER_ROOT]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))

from nvml.client import NvmlClient
from nvml.errors import NvmlError
from nvml.inventory import probe
from nvml.server import NvmlServer
from nvml.supervisor import NvmlSupervisor

CALLS = 300


def took_ms(step: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    step()
    return 1000 * (time.perf_counter() - begun_s)


def spread(step: Callable[[], object]) -> dict[str, float]:
    took = sorted(took_ms(step) for _ in range(CALLS))
    return {
        "p50_ms": round(took[CALLS // 2], 3),
        "p99_ms": round(took[CALLS * 99 // 100], 3),
        "max_ms": round(took[-1], 3),
    }


def until_answered(supervisor: NvmlSupervisor) -> None:
    pause = threading.Event()
    while True:
        try:
            supervisor.nvml.count()
        except NvmlError:
            pause.wait(0.002)
            continue
        return


def main(driver_root: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="nvml-"))
    supervisor = NvmlSupervisor(driver_root, report=lambda _, text: print(text, file=sys.stderr))
    supervisor.start()
    found: dict[str, object] = {"open_ms": round(took_ms(lambda: supervisor.await_open(120)))}
    nvml = supervisor.nvml
    gpus = probe(nvml, unit_mib=1, access="cdi").gpus
    found["gpus"] = [gpu.model for gpu in gpus]
    found["probe_ms"] = round(took_ms(lambda: probe(nvml, unit_mib=1, access="cdi")), 1)
    uuid = gpus[0].uuid
    server = NvmlServer(folder / "nvml.sock", supervisor)
    through = NvmlClient(folder / "nvml.sock", 3).nvml
    found["socket: processes"] = spread(lambda: (through.processes(uuid), time.sleep(0.006)))
    found["socket: utilisation"] = spread(
        lambda: (through.busy(uuid, 0, time.time_ns() // 1000 + 1_000_000), time.sleep(0.006))
    )
    found["health"] = spread(lambda: nvml.answers(uuid))
    found["xids"] = spread(lambda: nvml.xids((uuid,)))
    pid = supervisor.pid
    assert pid is not None
    status = Path(f"/proc/{pid}/status").read_text()
    found["rss_mib"] = int(status.split("VmRSS:")[1].split()[0]) // 1024
    os.kill(pid, signal.SIGKILL)
    found["back_after_kill_ms"] = round(took_ms(lambda: (time.sleep(0.02), until_answered(supervisor))))
    found["ends"] = dict(supervisor.ends)
    server.close()
    supervisor.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/"))
