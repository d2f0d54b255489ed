"""What is lost beside allocations: modules."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import time

from bench.granularity.driver import (
    EMPTY,
    MIB,
    SUCCESS,
    Gpu,
    Rows,
    alloc,
    cubin,
    cuda,
    function,
    launch,
    load,
    measure,
    ptr,
    size,
    u64,
)  # fmt: skip


def modules(rows: Rows) -> None:
    """`.global` arrays in PTX and cubin: when does the GPU lose them? For both loading modes the part runs twice, by the environment."""
    mode = os.environ.get("CUDA_MODULE_LOADING", "default")
    gpu = Gpu()
    launch(function(load(EMPTY)))
    for kind in ("ptx", "cubin", "fatbin"):
        for bytes_ in (4, 65536, MIB, 2 * MIB + 1, 100 * MIB, 3 << 30):
            case = f"{kind} global {bytes_} loading={mode}"
            try:
                image = _image(kind, bytes_)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                rows.add("modules", case, 1, bytes_, "", "", "", str(error)[:100])
                continue
            _one_module(gpu, rows, case, bytes_, image)
    for kind, count in (("ptx", 100), ("ptx", 500)):
        measure(gpu, rows, "modules", f"{kind} empty loading={mode}", count, 0,
                lambda n=count: [load(EMPTY) for _ in range(n)], lambda made: [cuda.cuModuleUnload(one) for one in made] and None)  # fmt: skip


def _image(kind: str, bytes_: int) -> bytes:
    """A module with a variable of so many bytes, `big`, and a kernel, `f`. Raises what nvcc raises."""
    if kind == "ptx":
        variable = f".visible .global .align 4 .b8 big[{bytes_}];"
        return f".version 6.0\n.target sm_50\n.address_size 64\n{variable}\n.visible .entry f() {{ ret; }}\n\0".encode()
    source = f'__device__ char big[{bytes_}]; extern "C" __global__ void f(int i) {{ big[i] = 1; }}'
    return cubin(source, *(["fatbin"] if kind == "fatbin" else []))


def _one_module(gpu: Gpu, rows: Rows, case: str, bytes_: int, image: bytes) -> None:
    """What is lost by each step from the load of the module to a launch."""
    before, nvml_before = gpu.free(), gpu.nvml_used()
    module = ptr()
    rc = cuda.cuModuleLoadData(c.byref(module), image)
    at_load = before - gpu.free()
    if rc != SUCCESS:
        rows.add("modules", case, 1, bytes_, at_load, "", "", f"cuModuleLoadData answered {rc}")
        return
    kernel = function(module)
    at_get = before - gpu.free()
    local = c.c_int()
    cuda.cuFuncGetAttribute(c.byref(local), 3, kernel)
    at_attribute = before - gpu.free()
    where, length = u64(), size()
    cuda.cuModuleGetGlobal_v2(c.byref(where), c.byref(length), module, b"big")
    at_global = before - gpu.free()
    n = c.c_int(0)
    launch(kernel, parameters=(ptr * 1)(c.cast(c.byref(n), ptr)))
    lost, nvml_lost = before - gpu.free(), gpu.nvml_used() - nvml_before
    cuda.cuModuleUnload(module)
    rows.add("modules", case, 1, bytes_, lost, before - gpu.free(), nvml_lost,
             f"at load {at_load}; at get {at_get}; at attribute {at_attribute}; at getglobal {at_global}; address {where.value:#x}")  # fmt: skip


def many_kernels(rows: Rows) -> None:
    """A module of 500 kernels: what its code costs, when, and how long each step takes."""
    mode = os.environ.get("CUDA_MODULE_LOADING", "default")
    gpu = Gpu()
    launch(function(load(EMPTY)))
    entry = ".visible .entry k{n}(.param .u64 p) {{ .reg .u64 %a; .reg .f32 %f; ld.param.u64 %a, [p]; ld.global.f32 %f, [%a]; {body} st.global.f32 [%a], %f; ret; }}"
    body = " ".join("fma.rn.f32 %f, %f, %f, 0f3F800000;" for _ in range(200))
    text = ".version 6.0\n.target sm_50\n.address_size 64\n" + "\n".join(
        entry.format(n=n, body=body) for n in range(500)
    )
    before, started = gpu.free(), time.perf_counter()
    module = load(text.encode() + b"\0")
    took = time.perf_counter() - started
    at_load = before - gpu.free()
    started = time.perf_counter()
    kernels = [function(module, f"k{n}".encode()) for n in range(500)]
    get = time.perf_counter() - started
    at_get = before - gpu.free()
    x = u64(alloc(4096))
    base = gpu.free()
    started = time.perf_counter()
    for kernel in kernels:
        launch(kernel, parameters=(ptr * 1)(c.cast(c.byref(x), ptr)))
    rows.add("many kernels", f"500 kernels of 200 instructions loading={mode}", 500, len(text), before - gpu.free(), "", "",
             f"at load {at_load} in {took * 1e3:.1f} ms; at get {at_get} in {get * 1e3:.1f} ms; by launches {base - gpu.free()} in {(time.perf_counter() - started) * 1e3:.1f} ms")  # fmt: skip
    cuda.cuModuleUnload(module)
    rows.add("many kernels", f"unloaded loading={mode}", 500, "", before - gpu.free(), "", "", "")
