"""A container's PyTorch program that keeps the GPU busy; obeys run.py as load.c does.

["start", "matmul"], ["start", "waited"], ["start", "graph"] or ["start", "small"], ["count"], ["stop"]: each answered by one line of JSON.
`waited` are matrix products of which each is waited for before the next is launched, as in a loop with a synchronise; of the others some
are queued. A step of `small` is many element-wise operations of some 15 us each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.gpu_time.torch_work import Work, obey

SIDE, GRAPH_SIDE, GRAPH_NODES, QUEUED = 8192, 4096, 20, 4
SMALL, SMALL_OPERATIONS = 2**23, 50


class Load(Work):
    def __init__(self) -> None:
        matmul = self._matmul()
        super().__init__(
            {
                "matmul": (matmul, QUEUED),
                "waited": (matmul, 1),
                "graph": (self._graph(), QUEUED),
                "small": (self._small(), QUEUED),
            }
        )

    @staticmethod
    def _matrices(side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        one, other = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return one, other, torch.empty_like(one)

    def _matmul(self) -> Callable[[], Any]:
        one, other, out = self._matrices(SIDE)
        torch.matmul(one, other, out=out)
        return lambda: torch.matmul(one, other, out=out)

    def _graph(self) -> Callable[[], Any]:
        one, other, out = self._matrices(GRAPH_SIDE)
        torch.matmul(one, other, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_NODES):
                torch.matmul(one, other, out=out)
        return lambda: graph.replay()

    def _small(self) -> Callable[[], Any]:
        values = torch.zeros(SMALL, device="cuda")

        def step() -> None:
            for _ in range(SMALL_OPERATIONS):
                values.add_(1.0)

        return step


def main() -> None:
    load = Load()
    torch.cuda.synchronize()
    obey(load)


if __name__ == "__main__":
    main()
