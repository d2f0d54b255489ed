"""DataParallel on one GPU: trains, is refused a batch that does not fit, trains on."""

from __future__ import annotations

import report
from report import LIMIT_MIB, MIB

try:
    import torch
except ImportError as error:
    report.absent(str(error))


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> float:
    x = torch.ones(rows, 1024, device="cuda")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.item())


def main() -> None:
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
    net = torch.nn.DataParallel(inner, device_ids=[0])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    first = step(net, optimizer, 64)
    rows, seen = 2 * LIMIT_MIB * MIB // (4 * 4096), "none"
    try:
        step(net, optimizer, rows)
    except torch.OutOfMemoryError as error:
        seen = report.kind(error)
    report.check("error of a batch that does not fit", "torch.OutOfMemoryError", seen)
    torch.cuda.empty_cache()
    losses = [step(net, optimizer, 64) for _ in range(10)]
    report.check("trains on after it", True, losses[-1] < first)


if __name__ == "__main__":
    main()
