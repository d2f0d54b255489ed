"""A container's program on several GPUs: in each step every GPU computes, and then all of them reduce by NCCL. Obeys gangs.py.

["steps", N] is answered by {"steps": N, "seconds": what they took, "wrong": results that are not the sum}. `GANG_GPUS`: the GPUs of this process, of the container's; `GANG_SIZE`:
those of all its processes; `GANG_STORE`: a file through which the processes find each other. On the fake driver, kernels that wait for each other stand for NCCL's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

SIDE, PRODUCTS = 4096, 8
"""A step computes for some 2 ms on an H200. Guessed from the matrix products of torch_load.py."""
REDUCED = 1 << 22
"""Numbers that are reduced: 16 MiB."""
QUEUED = 4
"""Steps that are launched before the first is waited for."""
FAKE_STEP_US = 2000

Steps = Callable[[int], int]
"""Makes so many steps, and returns how many results are wrong."""


def torch_steps(mine: tuple[int, ...], size: int, store: str) -> Steps:
    """By PyTorch: one process reduces over its GPUs, several have a rank each."""
    import torch
    import torch.distributed as dist

    one_process = len(mine) == size
    devices = [torch.device("cuda", gpu) for gpu in mine]
    if not one_process:
        torch.cuda.set_device(devices[0])
        dist.init_process_group(
            "nccl", init_method=f"file://{store}", rank=mine[0], world_size=size, device_id=devices[0]
        )
    matrices = [
        tuple(torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(3)) for device in devices
    ]
    parts = [torch.full((REDUCED,), gpu + 1.0, device=device) for gpu, device in zip(mine, devices, strict=True)]
    sums = [torch.empty_like(part) for part in parts]

    def step() -> None:
        for device, (one, other, out) in zip(devices, matrices, strict=True):
            with torch.cuda.device(device):
                for _ in range(PRODUCTS):
                    torch.matmul(one, other, out=out)
        if one_process:
            torch.cuda.nccl.all_reduce(parts, outputs=sums)
        else:
            sums[0].copy_(parts[0])
            dist.all_reduce(sums[0])

    def steps(count: int) -> int:
        for number in range(1, count + 1):
            step()
            if number % QUEUED == 0 or number == count:
                for device in devices:
                    torch.cuda.synchronize(device)
        return sum(bool((one != size * (size + 1) / 2).any().item()) for one in sums)

    steps(QUEUED)  # NCCL makes its channels at the first call
    return steps


def fake_steps() -> Steps:
    """By kernels of the fake driver."""
    from tests.integration.gputime import gang_program

    def steps(count: int) -> int:
        before = gang_program.done
        return int(gang_program.steps(count, FAKE_STEP_US) != before + count)

    return steps


def main() -> None:
    """See the module."""
    mine = tuple(map(int, os.environ["GANG_GPUS"].split(",")))
    size, store = int(os.environ["GANG_SIZE"]), os.environ["GANG_STORE"]
    steps = fake_steps() if "TANGRAM_FAKE_DRIVER" in os.environ else torch_steps(mine, size, store)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        _, count = json.loads(line)
        began_s = time.monotonic()
        wrong = steps(count)
        print(json.dumps({"steps": count, "seconds": time.monotonic() - began_s, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main()
