"""One run of pairs.py: the node, the figures, and what time is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from bench.memory_swap.figures import Figure, Figures
from bench.memory_swap.shapes import FAKE_PART
from bench.memory_swap.swap_node import Node, NoSwapping

T = TypeVar("T")


class Session:
    """See the module."""

    def __init__(self, node: Node, figures: Figures, repeat: int, end_s: float) -> None:
        self.node, self.figures, self.repeat, self._end_s = node, figures, repeat, end_s
        self.failed = 0
        self._at: tuple[str, str, int] = ("", "", 0)

    @property
    def fake(self) -> bool:
        return self.node.machine.fake

    def scaled(self, total_bytes: int) -> int:
        """Bytes here: the 64th part on the fake driver."""
        return total_bytes // FAKE_PART if self.fake else total_bytes

    @property
    def left_s(self) -> float:
        """Until nothing begins any more."""
        return self._end_s - time.monotonic()

    def repeats(self, cases: Sequence[T]) -> Iterator[tuple[int, T]]:
        """All cases once, then once more: what drifts meanwhile is in all of them."""
        return ((repeat, case) for repeat in range(self.repeat) for case in cases)

    @contextmanager
    def measuring(self, part: str, case: str, repeat: int, needs_s: float) -> Iterator[bool]:
        """Is it still to be done, and are so many seconds left for it? What it raises becomes a row `not run`, and its processes end.

        On the fake driver nothing takes that long: there any time will do."""
        if self.figures.done(part, case, repeat) or self.left_s < (0 if self.fake else needs_s):
            yield False
            return
        self._at = (part, case, repeat)
        try:
            yield self.left_s > 0
        except NoSwapping as why:
            self.figures.not_run(part, case, why)
        except (OSError, RuntimeError, KeyError) as error:  # TimeoutError is an OSError
            self.failed += 1
            self.figures.not_run(part, case, f"{type(error).__name__}: {error}")
        self.node.machine.end_containers()

    def add(self, figures: Mapping[str, Figure], *, complete: bool = True) -> None:
        """Of what is measured now."""
        self.figures.add(*self._at, figures, complete=complete)
