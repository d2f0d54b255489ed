"""What is lost beside allocations: context limits, modules, local memory, streams, graphs, further contexts."""

from __future__ import annotations

import ctypes as c
from functools import partial

from bench.granularity.arrays import Array3D, make_array
from bench.granularity.driver import (
    EMPTY,
    MIB,
    Gpu,
    Rows,
    alloc,
    cuda,
    free,
    function,
    launch,
    load,
    measure,
    ok,
    ptr,
    size,
    u64,
)  # fmt: skip


def others(rows: Rows) -> None:
    """Streams, events, contexts, host memory, managed memory, pools, VMM, graphs."""
    gpu = Gpu()
    alloc(1)
    launch(function(load(EMPTY)))
    for n in (1, 10, 100, 1000):
        measure(gpu, rows, "others", "streams", n, 0, partial(_streams, n), _end_streams)
    measure(gpu, rows, "others", "events", 1000, 0, partial(_events, 1000), _end_events)
    for bytes_ in (MIB, 1 << 30, 4 << 30):
        measure(gpu, rows, "others", f"cuMemHostAlloc {bytes_}", 1, bytes_, partial(_host, bytes_), _end_host)
    _managed(gpu, rows)
    _pools(gpu, rows)
    graph(gpu, rows)
    for n in (1, 2, 3):
        before = gpu.free()
        context = ptr()
        rc = cuda.cuCtxCreate_v2(c.byref(context), 0, gpu.device)
        rows.add("others", f"context number {n + 1}", 1, 0, before - gpu.free(), "", "", f"answered {rc}")


def _streams(count: int) -> list[object]:
    made: list[object] = []
    for _ in range(count):
        one = ptr()
        ok(cuda.cuStreamCreate(c.byref(one), 1), "cuStreamCreate")
        made.append(one)
    return made


def _end_streams(made: list[object]) -> None:
    for one in made:
        cuda.cuStreamDestroy_v2(one)


def _events(count: int) -> list[object]:
    made: list[object] = []
    for _ in range(count):
        one = ptr()
        ok(cuda.cuEventCreate(c.byref(one), 0), "cuEventCreate")
        ok(cuda.cuEventRecord(one, None), "record")
        made.append(one)
    return made


def _end_events(made: list[object]) -> None:
    for one in made:
        cuda.cuEventDestroy_v2(one)


def _host(bytes_: int) -> list[object]:
    one = ptr()
    ok(cuda.cuMemHostAlloc(c.byref(one), size(bytes_), 2), "cuMemHostAlloc")
    return [one]


def _end_host(made: list[object]) -> None:
    cuda.cuMemFreeHost(made[0])


def _managed(gpu: Gpu, rows: Rows) -> None:
    """What is lost at the call, and what once it was written."""
    for bytes_ in (1, MIB, 64 * MIB):
        before = gpu.free()
        at = u64()
        ok(cuda.cuMemAllocManaged(c.byref(at), size(bytes_), 1), "managed")
        made_lost = before - gpu.free()
        ok(cuda.cuMemsetD8_v2(at, 1, size(bytes_)), "memset")
        ok(cuda.cuCtxSynchronize(), "sync")
        touched = before - gpu.free()
        free(at.value)
        rows.add("others", f"managed {bytes_}", 1, bytes_, touched, before - gpu.free(), "", f"at the call {made_lost}")


def _pools(gpu: Gpu, rows: Rows) -> None:
    for bytes_ in (1, MIB, 2 * MIB + 1, 33 * MIB, 100 * MIB + 1):
        before = gpu.free()
        at = u64()
        ok(cuda.cuMemAllocAsync(c.byref(at), size(bytes_), None), "async")
        ok(cuda.cuStreamSynchronize(None), "sync")
        made_lost = before - gpu.free()
        ok(cuda.cuMemFreeAsync(at, None), "free")
        ok(cuda.cuStreamSynchronize(None), "sync")
        rows.add("others", f"cuMemAllocAsync {bytes_}", 1, bytes_, made_lost, before - gpu.free(), "", "")


def graph(gpu: Gpu, rows: Rows) -> None:
    class Node(c.Structure):
        _fields_ = [
            ("func", ptr),
            ("g", c.c_uint * 3),
            ("b", c.c_uint * 3),
            ("shared", c.c_uint),
            ("params", ptr),
            ("extra", ptr),
            ("kern", ptr),
            ("ctx", ptr),
        ]

    kernel = function(load(EMPTY))
    for nodes in (1, 100, 1000, 20000):
        made, last = ptr(), None
        ok(cuda.cuGraphCreate(c.byref(made), 0), "graph")
        how = Node(kernel, (c.c_uint * 3)(1, 1, 1), (c.c_uint * 3)(1, 1, 1), 0, None, None, None, None)
        for _ in range(nodes):
            node = ptr()
            ok(
                cuda.cuGraphAddKernelNode_v2(
                    c.byref(node), made, (ptr * 1)(last) if last else None, size(1 if last else 0), c.byref(how)
                ),
                "node",
            )
            last = node
        before = gpu.free()
        run = ptr()
        ok(cuda.cuGraphInstantiateWithFlags(c.byref(run), made, c.c_ulonglong(0)), "instantiate")
        at_make = before - gpu.free()
        ok(cuda.cuGraphUpload(run, None), "upload")
        ok(cuda.cuStreamSynchronize(None), "sync")
        at_upload = before - gpu.free()
        ok(cuda.cuGraphLaunch(run, None), "launch")
        ok(cuda.cuStreamSynchronize(None), "sync")
        at_launch = before - gpu.free()
        cuda.cuGraphExecDestroy(run)
        rows.add(
            "others",
            f"graph of {nodes} kernel nodes",
            nodes,
            0,
            at_launch,
            before - gpu.free(),
            "",
            f"at instantiate {at_make}; at upload {at_upload}",
        )


def streams(rows: Rows) -> None:
    """The loss of each stream, one after the other; then destroyed, and made again; then with work in each."""
    gpu = Gpu()
    kernel = function(load(EMPTY))
    launch(kernel)
    for name, flags, priority in (("non-blocking", 1, 0), ("blocking", 0, 0), ("high priority", 1, -5)):
        start, made, steps = gpu.free(), [], []
        for number in range(200):
            one = ptr()
            ok(cuda.cuStreamCreateWithPriority(c.byref(one), flags, priority), "stream")
            made.append(one)
            if (lost := start - gpu.free()) != (steps[-1][1] if steps else 0):
                steps.append((number + 1, lost))
        created = start - gpu.free()
        for one in made:
            ok(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, one, None, None), "launch")
        ok(cuda.cuCtxSynchronize(), "sync")
        used = start - gpu.free()
        for one in made:
            cuda.cuStreamDestroy_v2(one)
        rows.add(
            "streams",
            name,
            200,
            "",
            created,
            start - gpu.free(),
            "",
            f"after a launch in each {used}; grew at {steps[:8]} ... {steps[-3:]}",
        )


def sharing(rows: Rows) -> None:
    """Do arrays, module variables, other contexts and linear memory share blocks? Each step is one small thing more."""
    gpu = Gpu()
    last = gpu.free()

    def step(what: str) -> None:
        nonlocal last
        now = gpu.free()
        rows.add("sharing", what, 1, "", last - now, "", "", "")
        last = now

    first = alloc(1)
    step("linear 1 B")
    array = make_array(Array3D(64, 64, 0, 0x01, 1, 0))
    step("an array of 4 KiB beside it")
    more = alloc(1)
    step("linear 1 B beside both")
    mipmap = make_array(Array3D(64, 64, 0, 0x01, 1, 0), 3)
    step("a mipmapped array")
    text = b".version 6.0\n.target sm_50\n.address_size 64\n.visible .global .align 4 .b8 big[4];\n.visible .entry f() { ret; }\n\0"
    module = load(text)
    step("a module with a variable of 4 B")
    second = load(text)
    step("a second such module")
    pitched, row = u64(), size()
    ok(cuda.cuMemAllocPitch_v2(c.byref(pitched), c.byref(row), size(100), size(10), c.c_uint(4)), "pitch")
    step("pitched memory of 5 KiB")
    managed = u64()
    ok(cuda.cuMemAllocManaged(c.byref(managed), size(4096), 1), "managed")
    step("managed memory of 4 KiB, not touched")
    free(first)
    free(more)
    free(pitched.value)
    step("all linear freed")
    alloc(1)
    step("linear 1 B again")
    alloc(700000)
    step("linear 700,000 B")
    cuda.cuArrayDestroy(array)
    cuda.cuMipmappedArrayDestroy(mipmap)
    step("arrays destroyed")
    cuda.cuModuleUnload(module)
    step("first module unloaded")
    cuda.cuModuleUnload(second)
    step("second module unloaded")
    context = ptr()
    ok(cuda.cuCtxCreate_v2(c.byref(context), 0, gpu.device), "second context")
    step("a second context")
    alloc(1)
    step("linear 1 B in it")
    alloc(1)
    step("linear 1 B more in it")
    ok(cuda.cuCtxDestroy_v2(context), "destroy")
    ok(cuda.cuCtxSetCurrent(gpu.context), "set")
    step("the second context destroyed")
    alloc(1)
    step("linear 1 B in the first")
