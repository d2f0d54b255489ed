"""What cuMemAlloc and cuMemFree of one block take: the driver alone, the library, and the library where memory is elastic.

    python3 bench/memory_swap/allocations.py OUT.csv [--repeat 3] [--fake]

One process a row, alternately. Nothing else of the process is allocated, and no work runs. Each figure is the median of five rounds of 200 pairs through ctypes, which costs
about a microsecond a pair. A container with an RDMA device gets no elastic memory (docs/development/elastic-memory.md): the row says `plain` then.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu.kit import burst
from tests.gpu.kit.machine import Machine, machine

MIB = 2**20
SIZES = (512, 2 * MIB, 20 * MIB, 512 * MIB)
GUARANTEE_MIB = 8192
POOL_MIB = 256
ELASTIC = 1 << 62
"""In the number of an elastic allocation's buffer."""
PROGRAM = """
import ctypes, statistics, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
at, number, device, context = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(), ctypes.c_void_p()
for rc in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context)):
    assert rc == 0, rc
for size in map(int, sys.argv[1:]):
    rounds = []
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(200):
            assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
            assert cuda.cuMemFree_v2(at) == 0
        rounds.append((time.perf_counter() - began_s) / 200 * 1e6)
    assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size)) == 0
    cuda.cuPointerGetAttribute(ctypes.byref(number), 7, at)
    cuda.cuMemFree_v2(at)
    print(size, statistics.median(rounds), min(rounds), max(rounds), number.value)
"""


def container(here: Machine, *, bursts: bool) -> str:
    """A new one. With a file `burst` beside its grant its memory is elastic."""
    if not bursts:
        return here.grant(GUARANTEE_MIB)
    above_mib = burst.ABOVE_MIB if burst.served() else 0
    return here.grant(GUARANTEE_MIB, burst_mib=GUARANTEE_MIB + above_mib)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--fake", action="store_true", default=None)
    arguments = parser.parse_args()
    with machine(arguments.fake, POOL_MIB) as here, arguments.out.open("w", newline="") as file:
        about = here.describe()
        tail = [
            about.get("gpu", ""),
            about.get("driver", ""),
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            os.environ.get("TANGRAM_COMMIT", ""),
        ]
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            [
                "repeat",
                "which",
                "bytes",
                "pair_us",
                "lowest_us",
                "highest_us",
                "memory",
                "gpu",
                "driver",
                "date",
                "commit",
            ]
        )
        here.start_arbiter()
        keys = {"driver": "", "library": container(here, bursts=False), "elastic": container(here, bursts=True)}
        for repeat in range(arguments.repeat):
            for which, key in keys.items():
                command = [sys.executable, "-c", PROGRAM, *map(str, SIZES)]
                done = subprocess.run(command, env=here.env(key), capture_output=True, text=True, check=True)
                for line in done.stdout.splitlines():
                    size, *times, number = line.split()
                    memory = "elastic" if int(number) & ELASTIC else "plain"
                    row = [repeat, which, size, *(f"{float(one):.2f}" for one in times), memory, *tail]
                    rows.writerow(row)
                    print(*row[:7], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
