"""The driver by ctypes, and the rows of a measurement. Nothing of Tangram is loaded: the driver alone is measured."""

from __future__ import annotations

import csv
import ctypes as c
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
SUCCESS = 0

cuda = c.CDLL("libcuda.so.1")
nvml = c.CDLL("libnvidia-ml.so.1")
u64, size, ptr = c.c_uint64, c.c_size_t, c.c_void_p


def ok(rc: int, what: str) -> None:
    if rc != SUCCESS:
        raise RuntimeError(f"{what} answered {rc}")


class Gpu:
    """A context on GPU 0, and the two figures."""

    def __init__(self, flags: int = 0) -> None:
        ok(cuda.cuInit(0), "cuInit")
        self.device = c.c_int()
        ok(cuda.cuDeviceGet(c.byref(self.device), 0), "cuDeviceGet")
        self.context = ptr()
        if flags:
            ok(cuda.cuDevicePrimaryCtxSetFlags_v2(self.device, flags), "flags")
        ok(cuda.cuDevicePrimaryCtxRetain(c.byref(self.context), self.device), "retain")
        ok(cuda.cuCtxSetCurrent(self.context), "set current")
        nvml.nvmlInit_v2()
        self.handle = ptr()
        nvml.nvmlDeviceGetHandleByIndex_v2(0, c.byref(self.handle))

    def free(self) -> int:
        left, total = size(), size()
        ok(cuda.cuMemGetInfo_v2(c.byref(left), c.byref(total)), "cuMemGetInfo")
        return left.value

    def nvml_used(self) -> int:
        class Info(c.Structure):
            _fields_ = [("pid", c.c_uint), ("used", c.c_ulonglong), ("gi", c.c_uint), ("ci", c.c_uint)]

        infos, count = (Info * 64)(), c.c_uint(64)
        if nvml.nvmlDeviceGetComputeRunningProcesses_v3(self.handle, c.byref(count), infos) != SUCCESS:
            return -1
        mine = [one.used for one in infos[: count.value] if one.pid == os.getpid()]
        return mine[0] if mine else (infos[0].used if count.value == 1 else -1)

    def attribute(self, which: int) -> int:
        value = c.c_int()
        cuda.cuDeviceGetAttribute(c.byref(value), which, self.device)
        return value.value


class Rows:
    """A CSV that grows row by row, so that a part that is ended leaves what it saw."""

    def __init__(self, path: Path, header: list[str]) -> None:
        new = not path.exists()
        self.path, self.file = path, path.open("a", newline="")
        self.csv = csv.writer(self.file)
        if new:
            self.add(*header)

    def beside(self, name: str, header: list[str]) -> Rows:
        """Another CSV in the same folder."""
        return Rows(self.path.parent / name, header)

    def add(self, *values: object) -> None:
        self.csv.writerow(values)
        self.file.flush()


HEADER = ["part", "case", "count", "requested_bytes", "lost_bytes", "left_after_free_bytes", "nvml_lost_bytes", "note"]


def alloc(bytes_: int) -> int:
    at = u64()
    ok(cuda.cuMemAlloc_v2(c.byref(at), size(bytes_)), f"cuMemAlloc({bytes_})")
    return at.value


def free(at: int) -> None:
    ok(cuda.cuMemFree_v2(u64(at)), "cuMemFree")


def measure(gpu: Gpu, rows: Rows, part: str, case: str, count: int, requested: int, make: Callable[[], list[object]],
            undo: Callable[[list[object]], None], note: str = "") -> None:  # fmt: skip
    before, nvml_before = gpu.free(), gpu.nvml_used()
    try:
        made = make()
    except RuntimeError as error:
        rows.add(part, case, count, requested, "", "", "", str(error))
        return
    lost, nvml_lost = before - gpu.free(), gpu.nvml_used() - nvml_before
    undo(made)
    rows.add(part, case, count, requested, lost, before - gpu.free(), nvml_lost, note)


EMPTY = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry f() { ret; }\n\0"


def load(image: bytes) -> ptr:
    module = ptr()
    ok(cuda.cuModuleLoadData(c.byref(module), image), "cuModuleLoadData")
    return module


def function(module: ptr, name: bytes = b"f") -> ptr:
    found = ptr()
    ok(cuda.cuModuleGetFunction(c.byref(found), module, name), "cuModuleGetFunction")
    return found


def launch(what: ptr, blocks: int = 1, threads: int = 1, parameters: object = None) -> None:
    ok(cuda.cuLaunchKernel(what, blocks, 1, 1, threads, 1, 1, 0, None, parameters, None), "cuLaunchKernel")
    ok(cuda.cuCtxSynchronize(), "cuCtxSynchronize")


def cubin(source: str, *flags: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "k.cu"
        at.write_text(source)
        result = Path(folder) / "k.out"
        kind = "-fatbin" if "fatbin" in flags else "-cubin"
        more = [one for one in flags if one != "fatbin"]
        subprocess.run(
            ["nvcc", kind, "-arch=sm_90", *more, "-o", str(result), str(at)], check=True, capture_output=True
        )
        return result.read_bytes()
