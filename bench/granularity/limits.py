"""What is lost beside allocations: context limits, modules, local memory, streams, graphs, further contexts."""

from __future__ import annotations

import ctypes as c

from bench.granularity.driver import (
    EMPTY,
    MIB,
    Gpu,
    Rows,
    alloc,
    cubin,
    cuda,
    free,
    function,
    launch,
    load,
    ok,
    ptr,
    size,
    u64,
)  # fmt: skip


def limits(rows: Rows) -> None:
    """cuCtxSetLimit: stack 0, printf 1, heap 2, device runtime depth 3, pending launches 4, L2 granularity 5, persisting L2 6."""
    gpu = Gpu()
    launch(function(load(EMPTY)))
    resident = gpu.attribute(16) * gpu.attribute(39)  # multiprocessors x threads of each
    rows.add(
        "limits",
        "multiprocessors x resident threads",
        1,
        resident,
        "",
        "",
        "",
        f"{gpu.attribute(16)} x {gpu.attribute(39)}",
    )
    for which in range(7):
        value = size()
        rc = cuda.cuCtxGetLimit(c.byref(value), which)
        rows.add("limits", f"default of limit {which}", 1, value.value, "", "", "", f"answered {rc}")
    kernel = function(load(EMPTY))
    for which, values in (
        (0, [0, 512, 1024, 1040, 2048, 4096, 8192, 16384, 65536, 16384, 1024]),
        (1, [MIB, 2 * MIB, 64 * MIB, 1 * MIB, 300 * MIB + 1]),
        (2, [MIB, 8 * MIB, 32 * MIB, 512 * MIB, 8 * MIB]),
        (4, [2048, 4096, 65536]),
    ):
        for value in values:
            before, nvml_before = gpu.free(), gpu.nvml_used()
            rc = cuda.cuCtxSetLimit(which, size(value))
            got = size()
            cuda.cuCtxGetLimit(c.byref(got), which)
            at_set = before - gpu.free()
            launch(kernel)
            rows.add(
                "limits",
                f"limit {which} to {value}",
                1,
                value,
                before - gpu.free(),
                "",
                gpu.nvml_used() - nvml_before,
                f"answered {rc}; now {got.value}; lost at the call {at_set}",
            )


def limits_used(rows: Rows) -> None:
    """Heap and printf buffer, with a kernel that uses them: taken at the call, at load, or at launch?"""
    source = r"""#include <cstdio>
extern "C" __global__ void heap(int n) { char *p = (char*)malloc(n); if (p) p[0] = 1; }
extern "C" __global__ void say() { printf("x\n"); }
extern "C" __global__ void f() {}
"""
    image = cubin(source)
    for which, name, value in ((2, b"heap", 1 << 30), (1, b"say", 512 * MIB)):
        gpu = Gpu()
        launch(function(load(EMPTY)))
        start = gpu.free()
        rc = cuda.cuCtxSetLimit(which, size(value))
        at_set = start - gpu.free()
        module = load(image)
        at_load = start - gpu.free()
        kernel = function(module, name)
        at_get = start - gpu.free()
        n = c.c_int(100)
        launch(kernel, parameters=(ptr * 1)(c.cast(c.byref(n), ptr)))
        rows.add(
            "limits used",
            name.decode(),
            1,
            value,
            start - gpu.free(),
            "",
            "",
            f"answered {rc}; at set {at_set}; at load {at_load}; at get {at_get}",
        )
        ok(cuda.cuDevicePrimaryCtxReset_v2(gpu.device), "reset")


def stacks(rows: Rows) -> None:
    gpu = Gpu()
    launch(function(load(EMPTY)))
    cuda.cuCtxSetLimit(0, size(0))
    zero = gpu.free()
    for value in (
        1,
        16,
        100,
        512,
        1024,
        1025,
        1040,
        1056,
        1100,
        1500,
        1504,
        1536,
        2000,
        3000,
        4096,
        5000,
        10000,
        30000,
        100000,
        262144,
        300000,
        524288,
    ):
        rc = cuda.cuCtxSetLimit(0, size(value))
        got = size()
        cuda.cuCtxGetLimit(c.byref(got), 0)
        rows.add("stacks", f"stack {value}", 1, value, zero - gpu.free(), "", "", f"answered {rc}; now {got.value}")


def local(rows: Rows) -> None:
    """A kernel with local memory: when does the context grow, and does it shrink?"""
    gpu = Gpu()
    launch(function(load(EMPTY)))
    for bytes_ in (256, 1024, 1500, 2048, 4096, 16384, 65536, 131072, 4096):
        image = cubin(
            f'extern "C" __global__ void f(int *x, int n) {{ volatile char a[{bytes_}]; for (int i = 0; i < {bytes_}; i += n) a[i] = i; int s = 0; for (int i = 0; i < {bytes_}; i += n) s += a[(i * 7) % {bytes_}]; *x = s; }}'
        )
        before, nvml_before = gpu.free(), gpu.nvml_used()
        module = load(image)
        at_load = before - gpu.free()
        kernel = function(module)
        value = c.c_int()
        at_get = before - gpu.free()
        cuda.cuFuncGetAttribute(c.byref(value), 3, kernel)
        at_attribute = before - gpu.free()
        x, n = u64(alloc(4)), c.c_int(64)
        base = gpu.free()
        launch(kernel, 1, 1, (ptr * 2)(c.cast(c.byref(x), ptr), c.cast(c.byref(n), ptr)))
        after = base - gpu.free()
        launch(kernel, 2000, 256, (ptr * 2)(c.cast(c.byref(x), ptr), c.cast(c.byref(n), ptr)))
        wide = base - gpu.free()
        stack = size()
        cuda.cuCtxGetLimit(c.byref(stack), 0)
        free(x.value)
        cuda.cuModuleUnload(module)
        rows.add("local", f"local {bytes_}", 1, bytes_, before - gpu.free(), "", gpu.nvml_used() - nvml_before,
                 f"LOCAL_SIZE_BYTES {value.value}; at load {at_load}; at get {at_get}; at attribute {at_attribute}; by launch of 1 thread {after}; of 2000x256 {wide}; stack limit {stack.value}")  # fmt: skip
