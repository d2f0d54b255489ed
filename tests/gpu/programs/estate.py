"""What the node's NVML child says of the first GPU, beside what the driver's own nvidia-smi says at the same moment. Prints one JSON object.

    python3 estate.py DRIVER_ROOT NVIDIA_SMI UUID
    python3 estate.py fault        # a program of its own: its kernel writes to an illegal address, so the driver raises an XID. Prints CUDA's error
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_uint, c_void_p
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kit"))
import cuda

from nvml import handles
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.inventory import probe
from nvml.library import load
from nvml.queries import Nvml
from nvml.supervisor import supervised
from vgpu.api.names import Names
from vgpu.api.node_labels import labels_of

QUERIES = (
    "name", "uuid", "index", "pci.bus_id", "memory.total", "driver_version", "mig.mode.current", "temperature.gpu", "power.draw.instant", "power.draw",
    "enforced.power.limit", "clocks.current.sm", "clocks.max.sm", "clocks_event_reasons.active", "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total", "remapped_rows.correctable", "remapped_rows.uncorrectable", "remapped_rows.pending", "remapped_rows.failure",
    "temperature.gpu.tlimit",
)  # fmt: skip
ILLEGAL = b"""//fake illegal us=1000 error=700
.version 6.0
.target sm_50
.address_size 64
.visible .entry illegal()
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    mov.u64 %rd1, 64;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
ROUNDS = 300
XID_S = 10.0


def output(*words: str) -> str:
    """What a program prints, its error instead if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    return done.stdout if done.returncode == 0 else f"error: {done.stdout}{done.stderr}"


def asked(smi: str, uuid: str) -> dict[str, str]:
    """Each field on its own: one that this nvidia-smi does not know costs only itself."""
    found = {}
    for field in QUERIES:
        text = output(smi, f"--query-gpu=gpu_uuid,{field}", "--format=csv,noheader,nounits")
        rows = [line.split(", ", 1) for line in text.splitlines() if line.startswith(uuid)]
        found[field] = rows[0][1].strip() if rows else f"error: {text.strip()[:80]}"
    return found


def took_ms(step: Callable[[], object]) -> list[float]:
    """Milliseconds of each of ROUNDS calls, in order of length."""
    took = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        step()
        took.append(1000 * (time.perf_counter() - begun_s))
    return sorted(took)


def profiles_with_mode_off(driver_root: Path, uuid: str) -> list[list[Any]] | str:
    """(number, name, compute slices, memory slices, starts) as far as the driver says so while MIG mode is off, or its answer. Reads only."""
    load(driver_root)
    nv.nvmlInit()
    gpu, answers, found = handles.of_uuid(uuid), set(), []
    for number in range(nv.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = nv.nvmlDeviceGetGpuInstanceProfileInfoV(gpu, number)
        except nv.NVMLError as error:
            answers.add(str(error))
            continue
        name = info.name.decode() if isinstance(info.name, bytes) else str(info.name)
        found.append([int(info.id), name, int(info.sliceCount), int(info.memorySizeMB)])
    return sorted(found) or "; ".join(sorted(answers))


def fault() -> int:
    """What CUDA says of a kernel that writes to an illegal address."""
    module, function, one = c_void_p(), c_void_p(), c_uint(1)
    cuda.must("cuInit", c_uint(0))
    cuda.made_v2()
    cuda.must("cuModuleLoadData", byref(module), ILLEGAL)
    cuda.must("cuModuleGetFunction", byref(function), module, b"illegal")
    cuda.must("cuLaunchKernel", function, one, one, one, one, one, one, c_uint(0), None, None, None)
    return cuda.call("cuCtxSynchronize")


def xid(nvml: Nvml, uuid: str) -> dict[str, Any]:
    """The XIDs of a program whose kernel writes to an illegal address, how long after its end the first was seen, and whether the GPU answers afterwards."""
    first = nvml.xids((uuid,))
    done = subprocess.run([sys.executable, __file__, "fault"], capture_output=True, text=True, check=False, timeout=60)
    ended_s, pause, seen = time.monotonic(), threading.Event(), []
    while not seen and time.monotonic() < ended_s + XID_S:
        seen += [one.xid for one in nvml.xids((uuid,)).xids]
        pause.wait(0.02)
    return {
        "program": done.stdout.strip() or done.stderr[-300:],
        "unwatched": first.unwatched,
        "xids": seen,
        "seen_after_s": round(time.monotonic() - ended_s, 3),
        "answers": nvml.answers(uuid),
    }


def main(driver_root: Path, smi: str, uuid: str) -> None:
    """See the module."""
    names = Names()
    with supervised(driver_root) as nvml:
        begun_s = time.perf_counter()
        inventory = probe(nvml, unit_mib=1, access="cdi")
        probe_ms = 1000 * (time.perf_counter() - begun_s)
        gpu = next(gpu for gpu in inventory.gpus if gpu.uuid == uuid)
        seen = nvml.health(uuid)
        by_smi = asked(smi, uuid)
        later = nvml.health(uuid)
        assert seen.reading is not None and later.reading is not None
        try:
            mig: Any = asdict_of(nvml.mig(uuid))
        except NvmlError as error:
            mig = f"error: {error}"
        took = took_ms(lambda: nvml.health(uuid))
        found = {
            "labels": {key.removeprefix(names.gpu_label("")): value for key, value in labels_of(inventory, names).items()},
            "gpus": len(inventory.gpus),
            "gpu": {"uuid": gpu.uuid, "index": gpu.index, "model": gpu.model, "pci": gpu.pci, "mib": gpu.mib, "numa": gpu.numa, "mig": gpu.mig,
                    "arch": gpu.arch, "nvlinks": sum(gpu.nvlinks.values())},
            "probe_ms": probe_ms,
            "readings": [asdict(seen.reading), asdict(later.reading)],
            "smi": by_smi,
            "smi_temperature": output(smi, "-q", "-d", "TEMPERATURE", "-i", uuid),
            "smi_nvlink": output(smi, "nvlink", "--status", "-i", uuid),
            "smi_cuda": output(smi),
            "mig": mig,
            "health_ms": [took[ROUNDS // 2], took[ROUNDS * 99 // 100], took[-1]],
            "xid": xid(nvml, uuid),
        }  # fmt: skip
    found["profiles"] = profiles_with_mode_off(driver_root, uuid)
    print(json.dumps(found))


def asdict_of(reply: Any) -> dict[str, Any]:
    return {"capable": reply.capable, "mig": reply.mig, "pending": reply.pending, "device_id": reply.device_id, "model": reply.model}


if __name__ == "__main__":
    if sys.argv[1:] == ["fault"]:
        print(fault())
    else:
        main(Path(sys.argv[1]), *sys.argv[2:4])
