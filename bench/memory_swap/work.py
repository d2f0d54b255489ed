"""What a container's program does in the measurements of swapping: it adds one to every cell of its memory, over and over, and checks each cell.

Memory comes from a `Store`: one of the driver API (job.py), one of PyTorch (torch_job.py). One JSON list a line in, one JSON object a line out:

    ["make", FORM, BYTES]         {"bytes": n, "elastic": n, "pieces": n}      all cells are written
    ["steps", N, SECONDS]         {"first_s", "last_s", "steps"}      adds one to all memory, N times or for so long; 0 = no bound
    ["phases", STEPS, PAUSE_S, N] the same                            N times: so many steps, then the processor's part of the work
    ["request", DUE_S]            {"latency_s", "began_s"}            one step; late from the time that it was due
    ["check"]                     {"wrong_bytes": n, "cells": n}      every cell against what it has to be
    ["count"]                     {"steps": n}
    ["end"]

Times are CLOCK_MONOTONIC. Each piece of a step, a sixteenth of the memory at most, has a stamp (stamps.py).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from bench.memory_swap.stamps import Stamps

PIECES = 16
ELASTIC = 1 << 62
"""In the number of an elastic allocation's buffer: docs/development/elastic-memory.md."""


class Store(Protocol):
    """The memory. Cells have 32 bits and overflow."""

    def make(self, form: str, total_bytes: int) -> None:
        """Allocate and write."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each block."""

    def elastic_bytes(self) -> int: ...

    def add(self, block: int) -> None:
        """Queue an addition of one to each cell of a block."""

    def wait(self) -> None:
        """Until all queued work has ended."""

    def wrong_cells(self, added: int) -> int:
        """Cells that are not as written and `added` to since."""


class Program:
    """See the module."""

    def __init__(self, store: Store, stamps: Stamps) -> None:
        self._store, self._stamps = store, stamps
        self._added = 0
        self._pieces: list[list[int]] = []

    def make(self, form: str, total_bytes: int) -> dict[str, Any]:
        self._store.make(form, total_bytes)
        self._store.wait()
        whole, piece, size = sum(self._store.sizes), list[int](), 0
        for block, bytes_ in enumerate(self._store.sizes):
            piece.append(block)
            size += bytes_
            if size >= whole / PIECES:
                self._pieces.append(piece)
                piece, size = [], 0
        if piece:
            self._pieces.append(piece)
        return {"bytes": whole, "elastic": self._store.elastic_bytes(), "pieces": len(self._pieces)}

    def steps(self, count: int, seconds: float = 0.0) -> dict[str, Any]:
        began_ns = time.monotonic_ns()
        first_ns = last_ns = done = 0
        while (not count or done < count) and (not seconds or time.monotonic_ns() - began_ns < seconds * 1e9):
            one_ns, last_ns = self._step()
            first_ns = first_ns or one_ns
            done += 1
        return {"began_s": began_ns / 1e9, "first_s": first_ns / 1e9, "last_s": last_ns / 1e9, "steps": done}

    def _step(self) -> tuple[int, int]:
        """When its first and its last piece ended."""
        ended: list[int] = []
        for piece in self._pieces:
            began_ns = time.monotonic_ns()
            for block in piece:
                self._store.add(block)
            self._store.wait()
            ended.append(self._stamps.add(began_ns))
        self._added += 1
        return ended[0], ended[-1]

    def phases(self, steps: int, pause_s: float, count: int) -> dict[str, Any]:
        began_s = time.monotonic()
        seen: list[dict[str, Any]] = []
        for _ in range(count):
            seen.append(self.steps(steps))
            _compute(pause_s)
        last_s = time.monotonic()
        return {"began_s": began_s, "first_s": seen[0]["first_s"], "last_s": last_s, "steps": steps * count}

    def request(self, due_s: float) -> dict[str, Any]:
        if (left_s := due_s - time.monotonic()) > 0:
            time.sleep(left_s)
        began_s = time.monotonic()
        _, last_ns = self._step()
        return {"latency_s": last_ns / 1e9 - due_s, "began_s": began_s}

    def check(self) -> dict[str, Any]:
        wrong = self._store.wrong_cells(self._added)
        return {"wrong_bytes": 4 * wrong, "cells": sum(self._store.sizes) // 4}

    def count(self) -> dict[str, Any]:
        return {"steps": self._added}


def _compute(seconds: float) -> None:
    """The processor's part: it computes for that long."""
    end, number = time.monotonic() + seconds, 1
    while time.monotonic() < end:
        for _ in range(1000):
            number = number * 1103515245 + 12345 & 0x7FFFFFFF


def obey(store: Store) -> None:
    """argv[1]: the file for the stamps."""
    program = Program(store, Stamps(Path(sys.argv[1])))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        name, *given = json.loads(line)
        if name == "end":
            return
        print(json.dumps(getattr(program, name)(*given)), flush=True)
