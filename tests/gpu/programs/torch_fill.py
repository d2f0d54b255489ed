"""PyTorch's allocator, whichever PYTORCH_CUDA_ALLOC_CONF names, filled past the limit."""

from __future__ import annotations

import gc
from typing import Any

import report
from report import LIMIT_MIB, MIB

try:
    import torch
except ImportError as error:
    report.absent(str(error))

SIZES_MIB = (256, 32, 12)
"""12 is the smallest size that the caching allocator does not round up to a larger block."""
ROOM_MIB = 96
OUT_OF_MEMORY = "torch.OutOfMemoryError"


def fill() -> tuple[list[Any], list[str]]:
    held, errors = [], []
    for size in SIZES_MIB:
        try:
            while len(held) < 4000:
                held.append(torch.empty(size * MIB, dtype=torch.uint8, device="cuda").fill_(1))
        except torch.OutOfMemoryError as error:
            errors.append(report.kind(error))
    torch.cuda.synchronize()
    return held, errors


def train() -> bool:
    """A few steps of a small network: the loss falls."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 16)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x, y = torch.randn(128, 256, device="cuda"), torch.randint(16, (128,), device="cuda")
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] < losses[0]


def main() -> None:
    report.fact("version", f"torch {torch.__version__}, {torch.cuda.get_allocator_backend()}")
    free, total = (number / MIB for number in torch.cuda.mem_get_info())
    report.check("mem_get_info total, MiB", float(LIMIT_MIB), total)
    report.check("device properties total, MiB", LIMIT_MIB, torch.cuda.get_device_properties(0).total_memory // MIB)
    report.within("mem_get_info free at the start, MiB", LIMIT_MIB - 1536, LIMIT_MIB - 1, free)
    held, errors = fill()
    report.check("errors past the limit", [OUT_OF_MEMORY] * len(SIZES_MIB), errors)
    report.within("mem_get_info free at the brim, MiB", 0, ROOM_MIB, torch.cuda.mem_get_info()[0] / MIB)
    first = sum(one.numel() for one in held) / MIB
    report.fact("held in tensors at the brim, MiB", first)
    report.elastic([(one.data_ptr(), one.numel()) for one in held])
    report.at_brim(ROOM_MIB)
    del held
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_again = torch.cuda.mem_get_info()[0] / MIB
    report.within("mem_get_info free after the recovery, MiB", free - 256, free + 64, free_again)
    x = torch.ones(1024, 1024, device="cuda")
    report.check("a product after the error is right", 1024.0**3, float((x @ x).sum().item()))
    report.check("trains after the error", True, train())
    held, errors = fill()
    report.check("errors of the second fill", [OUT_OF_MEMORY] * len(SIZES_MIB), errors)
    second = sum(one.numel() for one in held) / MIB
    report.within("held by the second fill, beside libraries loaded since, MiB", first - 512, first + 64, second)
    report.at_brim(ROOM_MIB)


if __name__ == "__main__":
    main()
