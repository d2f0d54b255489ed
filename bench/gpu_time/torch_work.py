"""Work without end on the GPU, in a thread of its own, and how much of it was done: what the PyTorch containers share."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Work:
    """`steps` by name: each launches one, and so many are launched before the first of them is waited for. Answers to ["start", NAME], ["count"] and ["stop"] are as load.c's."""

    def __init__(self, steps: dict[str, tuple[Callable[[], Any], int]]) -> None:
        self._steps = steps
        self._done, self._ended_at_s = 0, 0.0
        self._lock = threading.Lock()
        self._busy = False
        self._thread = threading.Thread()

    def start(self, kind: str) -> dict[str, Any]:
        self._busy = True
        self._have_done(0)
        self._thread = threading.Thread(target=self._run, args=self._steps[kind])
        self._thread.start()
        return {"ok": 1}

    def count(self) -> dict[str, Any]:
        with self._lock:
            return {"done": self._done, "ended_at_s": self._ended_at_s, "at_s": time.monotonic()}

    def stop(self) -> dict[str, Any]:
        self._busy = False
        self._thread.join()
        return self.count()

    def _have_done(self, count: int) -> None:
        with self._lock:
            self._done, self._ended_at_s = self._done + count, time.monotonic()

    def _run(self, step: Callable[[], Any], most: int) -> None:
        queued: deque[torch.cuda.Event] = deque()
        while self._busy or queued:
            while self._busy and len(queued) < most:
                step()
                event = torch.cuda.Event(blocking=True)
                event.record()
                queued.append(event)
            queued.popleft().synchronize()
            self._have_done(1)


def obey(work: Work) -> None:
    """Each line of stdin is a method's name and its words, each line of stdout its answer."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        print(json.dumps(getattr(work, name)(*given)), flush=True)
