"""GPU time on the local cluster: programs that use it, and the GPU time of each by the arbiter and the fake driver."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from hack.stack import FAKE_DRIVER_ROOT
from hack.waiting import eventually
from tests.e2e.matrix import node
from tests.e2e.objects import share
from vgpu.protocol.status import ContainerStatus, GpuTimeStatus

KERNELS: Final = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code: sys.exit(f"CUresult {code}")
check(cuda.cuInit(0))
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
check(cuda.cuModuleLoadData(ctypes.byref(module), b"//fake spin us=param0\\n.entry spin() {}\\n"))
check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"))
long_us, period_s = int(sys.argv[1]), float(sys.argv[2])
value = ctypes.c_uint32(long_us)
parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
print("starts", flush=True)
while True:
    check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None))
    check(cuda.cuStreamSynchronize(None))
    time.sleep(period_s)
"""
"""Kernels of so many microseconds one after the other, with so many seconds of rest between; on the fake driver."""

_FOLDER: Final = "/fake-kernel"


def computing(
    name: str,
    *,
    kernel_us: int = 20_000,
    rest_s: float = 0.0,
    core: int | None = None,
    service_class: str | None = None,
) -> dict[str, Any]:
    """A pod of the fake driver that launches kernels, and whose channels can be stopped."""
    pod = share(
        name,
        4,
        core,
        run=["python3", "-c", KERNELS, str(kernel_us), str(rest_s)],
        env={"LD_PRELOAD": f"{_FOLDER}/libfake-kernel.so"},
        annotations={"tangram.sh/class": service_class} if service_class else {},
        volumes=[{"name": "kernel", "hostPath": {"path": f"{FAKE_DRIVER_ROOT}/lib", "type": "Directory"}}],
    )
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "kernel", "mountPath": _FOLDER, "readOnly": True}]
    return pod


def containers_of(namespace: str) -> dict[str, ContainerStatus]:
    """The pods of a namespace in the arbiter's status, at one moment; unknown ones are left out."""
    found = ((one.pod.split("/", 1), one) for one in node.status().containers)
    return {name: one for (where, name), one in found if where == namespace}


def container_of(namespace: str, name: str) -> ContainerStatus | None:
    """A pod's container in the arbiter's status; None while it is not there."""
    return containers_of(namespace).get(name)


def gpu_time_of(namespace: str, name: str) -> GpuTimeStatus | None:
    """Its GPU time; None while none of its processes has reported its channels."""
    found = container_of(namespace, name)
    return found.gpu_time if found is not None else None


def under_way(namespace: str, *names: str) -> None:
    """Wait until each of these pods has computed."""
    for name in names:

        def has_run(name: str = name) -> bool:
            gpu_time = gpu_time_of(namespace, name)
            return gpu_time is not None and gpu_time.on_s > 0

        eventually(has_run, f"pod {name} computes")


@dataclass(frozen=True, slots=True)
class Ran:
    """What the fake driver counted up to a moment."""

    at_s: float
    us: dict[int, int]
    """Host pid -> GPU time."""
    misuses: int


def ran() -> Ran:
    """GPU time of every process, as the fake driver counts it."""
    at_s = time.monotonic()
    misuses, us = node.kernel()
    return Ran(at_s, us, misuses)
