"""NCCL: one rank works inside the limit; two ranks on one GPU get NCCL's own error.

torch_nccl.py one | two
"""

from __future__ import annotations

import os
import sys
import tempfile

import report
from report import LIMIT_MIB, MIB

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    report.absent(str(error))


def join(rank: int, world: int, store: str) -> None:
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=torch.device("cuda", 0)
    )


def one(store: str) -> None:
    join(0, 1, store)
    x = torch.full((1024,), 3.0, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    report.check("all_reduce of one rank", 3.0, float(x[0].item()))
    held, seen = [], "none"
    try:
        while len(held) < 400:
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        seen = report.kind(error)
    report.check("error past the limit", "torch.OutOfMemoryError", seen)
    report.at_brim(320)
    del held
    torch.cuda.empty_cache()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    report.check("all_reduce after the error", 3.0, float(x[0].item()))
    report.check("mem_get_info total, MiB", LIMIT_MIB, torch.cuda.mem_get_info()[1] // MIB)
    dist.destroy_process_group()


def rank_of_two(rank: int, store: str, answers: torch.multiprocessing.SimpleQueue) -> None:
    try:
        join(rank, 2, store)
        x = torch.ones(16, device="cuda")
        dist.all_reduce(x)
        torch.cuda.synchronize()
        answers.put("none")
    except Exception as error:  # noqa: BLE001  what it is is the question
        answers.put(f"{report.kind(error)}: {str(error)[:300]}")
    os._exit(0)


def two(store: str) -> None:
    """What the same does without the library is asked by running this program without it; here the error's name counts."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=rank_of_two, args=(rank, store, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    seen = sorted(answers.get() for _ in ranks)
    for process in ranks:
        process.join(30)
    report.fact("what two ranks on one GPU saw", seen[0][:200])
    report.check("error of two ranks on one GPU", "torch.distributed.DistBackendError", seen[0].partition(":")[0])


if __name__ == "__main__":
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        {"one": one, "two": two}[sys.argv[1]](f"{folder}/store")
