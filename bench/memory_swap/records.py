"""What the records of a host pool cost the arbiter's loop: python -m bench.memory_swap.records [records]

As many blocks are away as `records` says, 8,000 without it. 64 of them at a time get another stage, as in a swap. Prints a line for the folder of the records on a
tmpfs, and one for a folder of the disk. No GPU is needed.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from arbiter.swap.records_file import RecordsFile
from vgpu.memory.swap_records import SwapRecord

BLOCK_BYTES: Final = 2 * 2**20
AT_ONCE: Final = 64
"""Blocks of one order. Specified: protocol.md."""
ROUNDS: Final = 40
GPU: Final = "GPU-0000000a-aaaa-bbbb-cccc-00000000000a"
NAME: Final = "4f6e1c2a-9a77-4a39-8a54-0a9d4f1f7d11.main.0123456789abcdef"
"""Of a container: as long as those of the device plugin."""


def measure(folder: Path, records: int) -> str:
    """One line: writes that append, and those that write the file whole. Milliseconds."""
    blocks = [SwapRecord(NAME, 1234567, 987654321, i, BLOCK_BYTES, i * BLOCK_BYTES) for i in range(records)]
    file, path, times = RecordsFile(folder, GPU, "boot"), folder / f"{GPU}.swap.json", {"append": [0.0], "whole": [0.0]}
    file.write([], blocks, "pool")
    for _ in range(ROUNDS):
        for at in range(0, records, AT_ONCE):
            put = [msgspec.structs.replace(one, stage="made") for one in blocks[at : at + AT_ONCE]]
            before = path.stat().st_ino
            began_s = time.perf_counter()
            assert file.write([], put, "pool")
            took_ms = 1000 * (time.perf_counter() - began_s)
            times["append" if path.stat().st_ino == before else "whole"].append(took_ms)
    parts = (
        f"{how}: {len(took) - 1} writes, median {statistics.median(took):.2f}, most {max(took):.2f} ms"
        for how, took in times.items()
    )
    return f"{records} records; " + "; ".join(parts)


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    for parent in ("/dev/shm", None):
        with tempfile.TemporaryDirectory(prefix="tangram-records-", dir=parent) as folder:
            print(f"{folder.rpartition('/')[0]}: {measure(Path(folder), records)}", flush=True)


if __name__ == "__main__":
    main()
