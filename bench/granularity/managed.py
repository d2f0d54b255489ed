"""What the GPU loses to managed memory that its kernels touch: do small allocations share pages?"""

from __future__ import annotations

import ctypes as c
import itertools

from bench.granularity.driver import MIB, Gpu, Rows, cuda, free, ok, size, u64

SIZES = (1, 4096, 65536, 65537, 300_000, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1, 3 * MIB)
COUNTS = (1, 10, 100, 1000)
MANY = {4096: (20_000,), 65536: (20_000,), 2 * MIB: (2000,)}


def make(bytes_: int) -> int:
    at = u64()
    ok(cuda.cuMemAllocManaged(c.byref(at), size(bytes_), 1), f"cuMemAllocManaged({bytes_})")
    return at.value


def touch(at: int, bytes_: int) -> None:
    """Written by the GPU, so that its pages are there."""
    ok(cuda.cuMemsetD8_v2(u64(at), 1, size(bytes_)), "cuMemsetD8")


def managed(rows: Rows) -> None:
    """So many of one size, made, then touched, then freed. What the first touch of a process takes is taken before, by one that stays."""
    gpu = Gpu()
    begun = gpu.free()
    touch(make(1), 1)
    ok(cuda.cuCtxSynchronize(), "sync")
    rows.add("managed", "the first touch of the process", 1, 1, begun - gpu.free(), "", "", "")
    for bytes_ in SIZES:
        for count in (*COUNTS, *MANY.get(bytes_, ())):
            before, nvml_before = gpu.free(), gpu.nvml_used()
            made = [make(bytes_) for _ in range(count)]
            at_call = before - gpu.free()
            for at in made:
                touch(at, bytes_)
            ok(cuda.cuCtxSynchronize(), "sync")
            lost, nvml_lost = before - gpu.free(), gpu.nvml_used() - nvml_before
            apart = sorted({second - first for first, second in itertools.pairwise(made)})
            for at in made:
                free(at)
            note = f"at the call {at_call}; addresses apart {apart[:3]}"
            case = f"{bytes_} B" if count <= 1000 else f"{bytes_} B, many"
            rows.add("managed", case, count, bytes_, lost, before - gpu.free(), nvml_lost, note)
