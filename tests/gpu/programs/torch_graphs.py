"""CUDA graphs with private pools: right results, the framework's own error when a capture does not fit, and life after it."""

from __future__ import annotations

from collections.abc import Iterator

import report
from report import LIMIT_MIB, MIB

try:
    import torch
except ImportError as error:
    report.absent(str(error))


def captured(mib: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
    """A graph whose private pool has `mib` of intermediate results."""
    x = torch.full((1024, 1024), 2.0, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            x @ x
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        kept.extend(torch.full((128 * MIB // 4,), 1.0, device="cuda") for _ in range(mib // 128))
        y = x @ x
    return graph, x, y


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those during which it came: ending the capture may fail too."""
    while error is not None:
        yield error
        error = error.__context__


def main() -> None:
    report.fact("version", f"torch {torch.__version__}, {torch.cuda.get_allocator_backend()}")
    graph, x, y = captured(1024)
    x.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    report.check("a replay is right", 1024.0, float(y[0, 0].item()))
    seen = "none"
    try:
        captured(LIMIT_MIB)
    except Exception as error:  # noqa: BLE001  what it is is the question
        seen = " while handling ".join(report.kind(one) for one in chain(error))
    report.fact("what a capture that does not fit raises", seen)
    report.check("PyTorch's own error is in it", True, "torch.OutOfMemoryError" in seen)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    report.check("the first graph replays after it", 9.0 * 1024, float(y[0, 0].item()))
    again, x2, y2 = captured(1024)
    again.replay()
    torch.cuda.synchronize()
    report.check("a new capture after it is right", 4.0 * 1024, float(y2[0, 0].item()))
    del again, x2, y2, graph, x, y
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    report.within(
        "mem_get_info free when the graphs are gone, MiB",
        LIMIT_MIB - 2048,
        LIMIT_MIB,
        torch.cuda.mem_get_info()[0] / MIB,
    )


if __name__ == "__main__":
    main()
