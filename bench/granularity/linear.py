"""Linear memory: which sizes share a block, how addresses are chosen, what comes back."""

from __future__ import annotations

import ctypes as c
import random

from bench.granularity.driver import MIB, SUCCESS, Gpu, Rows, alloc, cuda, free, measure, size, u64

SIZES = [1, 256, 512, 513, 1024, 4096, 32768, 65536, 65537, 100000, 131072, 262144, 300000, 524288, 524289, 700000, 1000000, MIB - 1, MIB, MIB + 1,
         1300000, 3 * MIB // 2, 2 * MIB - 512, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 3 * MIB + 1, 4 * MIB, 4 * MIB + 1, 5 * MIB, 7 * MIB + 1,
         20 * MIB + 1, 32 * MIB + 1, 100 * MIB + 1]  # fmt: skip


def sizes(rows: Rows) -> None:
    gpu = Gpu()
    alloc(1)  # the first allocation may take what every process takes once
    for bytes_ in SIZES:
        for count in (1, 10, 100, 1000):
            if bytes_ * count > 30 << 30:
                continue
            measure(gpu, rows, "sizes", f"cuMemAlloc {bytes_}", count, bytes_ * count,
                    lambda b=bytes_, n=count: [alloc(b) for _ in range(n)], lambda made: [free(at) for at in made] and None)  # fmt: skip


EQUAL = (
    1, 512, 513, 4096, 65536, 65537, 131072, 262144, 524288, 524289, 700000, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB + 1,
)  # fmt: skip
MIXED = (
    1, 65536, 1, 524288, 1, MIB, 1, 2 * MIB, 1, 2 * MIB + 1, 1, 3 * MIB, 512, 700000, 512, 131072, 4096, 262144, MIB - 1, MIB + 1, 2 * MIB - 1,
) * 4  # fmt: skip


def addresses(rows: Rows) -> None:
    """Consecutive addresses of equal requests, and of mixed ones."""
    gpu = Gpu()
    trace = rows.beside("addresses.csv", ["case", "step", "bytes", "address", "free_bytes"])
    for bytes_ in EQUAL:
        made = []
        for step in range(40):
            made.append(alloc(bytes_))
            trace.add(f"equal {bytes_}", step, bytes_, hex(made[-1]), gpu.free())
        for at in made:
            free(at)
        trace.add(f"equal {bytes_} freed", 0, 0, "", gpu.free())
    made = []
    for step, bytes_ in enumerate(MIXED):
        made.append(alloc(bytes_))
        trace.add("mixed", step, bytes_, hex(made[-1]), gpu.free())
    for step, at in enumerate(made[::2]):
        free(at)
        trace.add("mixed, every other freed", step, 0, hex(at), gpu.free())
    for step, bytes_ in enumerate(MIXED[::3]):
        trace.add("mixed, again", step, bytes_, hex(alloc(bytes_)), gpu.free())


def traces(rows: Rows) -> None:
    """Random allocations and frees. A negative size is a free of that address."""
    gpu = Gpu()
    trace = rows.beside("traces.csv", ["trace", "step", "bytes", "address", "lost_bytes"])
    kinds = {
        "small": lambda r: r.randint(1, 4096),
        "log": lambda r: int(2 ** r.uniform(0, 22)),
        "middle": lambda r: r.randint(65536, 3 * MIB),
        "around": lambda r: r.choice(
            [MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 3 * MIB + 1, 512 * 1024, 300000]
        ),
    }
    for name, draw in kinds.items():
        r = random.Random(7)
        live: list[int] = []
        zero = gpu.free()
        for step in range(3000):
            growing = (step // 500) % 2 == 0
            if live and r.random() < (0.35 if growing else 0.65):
                at = live.pop(r.randrange(len(live)))
                free(at)
                trace.add(name, step, -1, hex(at), zero - gpu.free())
            else:
                bytes_ = draw(r)
                at = alloc(bytes_)
                live.append(at)
                trace.add(name, step, bytes_, hex(at), zero - gpu.free())
        for at in live:
            free(at)
        rows.add("traces", name, 3000, "", "", zero - gpu.free(), "", "all freed")


def pitch(rows: Rows) -> None:
    gpu = Gpu()
    for element in (4, 8, 16):
        for width in (1, 4, 100, 511, 512, 513, 1000, 4095, 4097, 65537, MIB + 1):
            for height in (1, 3, 64, 1000):
                at, row = u64(), size()
                before = gpu.free()
                rc = cuda.cuMemAllocPitch_v2(c.byref(at), c.byref(row), size(width), size(height), c.c_uint(element))
                if rc != SUCCESS:
                    rows.add(
                        "pitch",
                        f"width={width} height={height} element={element}",
                        1,
                        width * height,
                        "",
                        "",
                        "",
                        f"answered {rc}",
                    )
                    continue
                lost = before - gpu.free()
                free(at.value)
                rows.add(
                    "pitch",
                    f"width={width} height={height} element={element}",
                    1,
                    width * height,
                    lost,
                    before - gpu.free(),
                    "",
                    f"pitch={row.value}",
                )
