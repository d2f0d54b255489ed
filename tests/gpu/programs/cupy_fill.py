"""CuPy's pools: cupy_fill.py default | managed | async"""

from __future__ import annotations

import sys

import report
from report import LIMIT_MIB, MIB

try:
    import cupy
except ImportError as error:
    report.absent(str(error))

SIZES_MIB = (256, 32, 2)
ROOM_MIB = 96


def fill() -> tuple[list[cupy.ndarray], list[str]]:
    """At most 1 GiB past the limit: managed memory must not outgrow the GPU."""
    held, errors, taken = [], [], 0
    for size in SIZES_MIB:
        try:
            while taken + size <= LIMIT_MIB + 1024:
                held.append(cupy.zeros(size * MIB, dtype=cupy.uint8))
                taken += size
        except cupy.cuda.memory.OutOfMemoryError as error:
            errors.append(report.kind(error))
    cupy.cuda.runtime.deviceSynchronize()
    return held, errors


def main() -> None:
    which = sys.argv[1]
    pool = {
        "default": lambda: cupy.get_default_memory_pool(),
        "managed": lambda: cupy.cuda.MemoryPool(cupy.cuda.malloc_managed),
        "async": lambda: cupy.cuda.MemoryAsyncPool(),
    }[which]()
    cupy.cuda.set_allocator(pool.malloc)
    report.fact("version", f"cupy {cupy.__version__}")
    free, total = cupy.cuda.runtime.memGetInfo()
    report.check("memGetInfo total, MiB", LIMIT_MIB, total // MIB)
    held, errors = fill()
    report.check("errors past the limit", ["cupy.cuda.memory.OutOfMemoryError"] * len(SIZES_MIB), errors)
    report.fact("held at the error, MiB", sum(one.nbytes for one in held) // MIB)
    report.elastic([(one.data.ptr, one.nbytes) for one in held])
    if which != "managed":  # which the driver names no process for
        report.at_brim(ROOM_MIB)
    del held
    cupy.cuda.runtime.deviceSynchronize()
    pool.free_all_blocks()
    report.within(
        "memGetInfo free after the recovery, MiB",
        free / MIB - 256,
        free / MIB + 64,
        cupy.cuda.runtime.memGetInfo()[0] / MIB,
    )
    x = cupy.ones((1024, 1024), dtype=cupy.float32)
    report.check("a sum after the error is right", 1024.0**2, float(x.sum()))


if __name__ == "__main__":
    main()
