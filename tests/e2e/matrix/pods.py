"""The pods that live through the matrix: two that fill a GPU's rest each and are replaced again and again, and two that stay. Each has a
ReplicaSet, as pods of users have: a pod that fails is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hack.stack import FAKE_DRIVER_ROOT
from tests.e2e.gpus import UNITS
from tests.e2e.objects import container, pod

SUBJECT: Final = "subject"
"""Name of a ReplicaSet, and of its pods' label `app`."""
REPLICAS: Final = 2
FILLER: Final = "filler"
"""As the subject, of less priority: the subject preempts it."""
STEADY: Final = "steady"
BUSY: Final = "busy"
"""The ReplicaSets of one pod each, on the first and on the second GPU."""
RESIDENT_UNITS: Final = 8
SUBJECT_UNITS: Final = UNITS - RESIDENT_UNITS
"""So that nothing is left: capacity that is lost keeps a pod Pending."""
BUSY_CORE: Final = 30
SUBJECT_CORE: Final = 40
HELD_GIB: Final = 5

WORK: Final = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def check(code):
    if code: sys.exit(f"CUresult {code}")
check(cuda.cuInit(0))
context, module, function, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(int(sys.argv[1]) << 30)))
check(cuda.cuModuleLoadData(ctypes.byref(module), b"//fake spin us=param0\\n.entry spin() {}\\n"))
check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"))
value = ctypes.c_uint32(20000)
parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
print("works", flush=True)
while True:
    check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None))
    check(cuda.cuStreamSynchronize(None))
"""
"""Uses so many GiB and launches kernels of 20 ms. As process 1 of its container it does not end on SIGTERM."""

_FOLDER: Final = "/fake-kernel"


def working(units: int, core: int, *, end_s: int = 1) -> dict[str, Any]:
    """A pod that computes without end on the fake driver; `end_s`: how long it outlives its deletion."""
    inner = container(
        mem=units, core=core, run=["python3", "-c", WORK, str(HELD_GIB)],
        env={"LD_PRELOAD": f"{_FOLDER}/libfake-kernel.so"},
        volumeMounts=[{"name": "kernel", "mountPath": _FOLDER, "readOnly": True}],
    )  # fmt: skip
    kernel = {"name": "kernel", "hostPath": {"path": f"{FAKE_DRIVER_ROOT}/lib", "type": "Directory"}}
    return pod("", inner, terminationGracePeriodSeconds=end_s, volumes=[kernel])


def residents(gpus: Sequence[str]) -> list[dict[str, Any]]:
    """One on each of two GPUs: it uses memory, it computes."""
    inner = container(mem=RESIDENT_UNITS, run=["gpuview", "hold", f"{HELD_GIB}Gi"])
    steady, busy = pod("", inner), working(RESIDENT_UNITS, BUSY_CORE)
    return [
        replica_set(STEADY, steady, 1, {"tangram.sh/gpu-uuid": gpus[0]}),
        replica_set(BUSY, busy, 1, {"tangram.sh/gpu-uuid": gpus[1]}),
    ]


def subject() -> dict[str, Any]:
    """No pods yet."""
    return replica_set(SUBJECT, working(SUBJECT_UNITS, SUBJECT_CORE, end_s=4), 0, {"tangram.sh/placement": "spread"})


def filler() -> dict[str, Any]:
    """As many as the subject's."""
    template = working(SUBJECT_UNITS, SUBJECT_CORE)
    template["spec"]["priorityClassName"] = priority_class()["metadata"]["name"]
    return replica_set(FILLER, template, REPLICAS, {"tangram.sh/placement": "spread"})


def priority_class() -> dict[str, Any]:
    """Of the filler."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "e2e-matrix-filler"},
        "value": -10,
    }


def replica_set(name: str, template: dict[str, Any], replicas: int, annotations: dict[str, str]) -> dict[str, Any]:
    """Pods that are replaced when they fail."""
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {
                "metadata": {"labels": {"app": name, "suite": "e2e"}, "annotations": annotations},
                "spec": {**template["spec"], "restartPolicy": "Always"},
            },
        },
    }
