"""What is seen while a fault lasts, and must be true at each moment: memory of the processes that run, GPU time, reported reasons."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from tests.e2e.matrix import node
from tests.e2e.matrix.invariants import i1_no_gpu_is_given_away_twice, i6_containers_stay_within_their_grants
from tests.e2e.matrix.seen import Seen
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import Inventory


class Watch:
    """Samples the node until the round is over. The API is not queried: in some rounds it does not answer."""

    EVERY_S: Final = 0.05
    LOOK_EVERY: Final = 5
    """Of so many samples of GPU time, one looks at the processes and at the arbiter's status, too."""

    def __init__(self, inventory: Inventory) -> None:
        self.longest_rest_s: dict[int, float] = {}
        """Host pid -> longest time in which its GPU work did not go on."""
        self.broken: set[str] = set()
        self.reasons: set[str] = set()
        """Why limits were not enforced, by the arbiter's status."""
        self._inventory = inventory
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        last: dict[int, tuple[int, float]] = {}
        samples = 0
        while not self._over.wait(self.EVERY_S):
            now_s = time.monotonic()
            for pid, us in node.ran_us().items():
                before_us, since_s = last.get(pid, (-1, now_s))
                self.longest_rest_s[pid] = max(self.longest_rest_s.get(pid, 0.0), now_s - since_s)
                if us != before_us:
                    last[pid] = us, now_s
            samples += 1
            if samples % self.LOOK_EVERY == 0:
                self._look()

    def _look(self) -> None:
        """What of I1 and I6 is true of the processes alone, whatever the API reports."""
        seen = Seen(inventory=self._inventory, allocatable={}, processes=node.gpu_processes())
        self.broken |= {f"I1: {why}" for why in i1_no_gpu_is_given_away_twice(seen)}
        self.broken |= {f"I6: {why}" for why in i6_containers_stay_within_their_grants(seen)}
        with contextlib.suppress(OSError, BadDocument):  # it may be stopped, or away
            self.reasons |= {one.reason for container in node.status(1).containers for one in container.unenforced}
