"""A tenant's PyTorch program that keeps the GPU busy; obeys run.py as load.c does.

["start", "matmul"], ["start", "waited"] or ["start", "graph"], ["count"], ["stop"]: each answered by one line of JSON. `waited` are
matrix products of which each is waited for before the next is launched, as in a loop with a synchronise; of the others some are queued.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

SIDE, GRAPH_SIDE, GRAPH_NODES, QUEUED = 8192, 4096, 20, 4


class Load:
    def __init__(self) -> None:
        self.done = self._done_at(0)
        self._busy = False
        self._thread = threading.Thread()
        matmul = self._matmul()
        self._steps: dict[str, Callable[[], Any]] = {"matmul": matmul, "waited": matmul, "graph": self._graph()}

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

    def _run(self, step: Callable[[], Any], most: int) -> None:
        queued: deque[torch.cuda.Event] = deque()
        while self._busy or queued:
            while self._busy and len(queued) < most:
                step()
                event = torch.cuda.Event(blocking=True)
                event.record()
                queued.append(event)
            queued.popleft().synchronize()
            self.done = self._done_at(int(self.done["done"]) + 1)

    def start(self, kind: str) -> dict[str, Any]:
        self._busy = True
        self.done = self._done_at(int(self.done["done"]))
        self._thread = threading.Thread(target=self._run, args=(self._steps[kind], 1 if kind == "waited" else QUEUED))
        self._thread.start()
        return {"ok": 1}

    @staticmethod
    def _done_at(count: int) -> dict[str, float]:
        """So many, and when the last of them ended."""
        return {"done": count, "ended_at_s": time.monotonic()}

    def count(self) -> dict[str, Any]:
        return {**self.done, "at_s": time.monotonic()}

    def stop(self) -> dict[str, Any]:
        self._busy = False
        self._thread.join()
        return self.count()


def main() -> None:
    load = Load()
    torch.cuda.synchronize()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(load, name)(*given)), flush=True)


if __name__ == "__main__":
    main()
