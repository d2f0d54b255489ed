"""The driver's own count of who computes, held against what containers say of their work.

NVML tells for each process how much of the last second it kept a card's multiprocessors busy. This thread reads that once a
second and adds it up by container: its connected processes, and those in whose namespace its grant is mounted. What follows from it
is `vgpu.untold`'s and `Turns`' to say. Without NVML, or where it does not count by process (MIG), everybody's word counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from arbiter import host
from arbiter.turns import Turns
from nvml.errors import NvmlError
from nvml.session import opened
from nvml.utilisation import WHOLE, Busy, busy

PERIOD_S: Final = 1.0
"""Guessed: NVML's samples are up to a second long."""
RETRY_S: Final = 10.0
"""Between attempts to open NVML. Guessed."""
REMEMBERED_US: Final = 2_000_000
"""A look goes no further back, so that idleness before it does not thin out what is seen. Guessed: two periods."""
_log = structlog.get_logger()


class Witness:
    """See the module. `grants`: the grants folder; `named_in`: the same, for an arbiter of runs."""

    def __init__(self, turns: Turns, driver_root: Path, grants: Path, named_in: Path | None = None) -> None:
        self._turns, self._driver_root, self._grants, self._named_in = turns, driver_root, grants, named_in
        self._closing = threading.Event()
        self._seen_us: dict[str, int] = {}
        self._owners: dict[tuple[int, int], str | None] = {}
        """Process, by pid and start -> its container."""
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with opened(self._driver_root):
                    self._trouble = ""
                    while not self._closing.wait(PERIOD_S):
                        self._look()
            except NvmlError as error:
                if str(error) != self._trouble:
                    _log.warning("what containers say of their work is not checked", reason=str(error), retry_s=RETRY_S)
                self._trouble = str(error)
                self._closing.wait(RETRY_S)

    def _look(self) -> None:
        watched = self._turns.watched()
        cards: dict[str, Busy] = {}
        for uuid in {uuid for uuids, _ in watched.values() for uuid in uuids}:
            since_us = max(self._seen_us.get(uuid, 0), time.time_ns() // 1000 - REMEMBERED_US)
            cards[uuid] = busy(uuid, since_us)
            self._seen_us[uuid] = cards[uuid].seen_us
        pids = {pid for look in cards.values() for pid in look.percent}
        self._turns.witness(add_up(watched, cards, self._owners_of(pids)))

    def _owners_of(self, pids: set[int]) -> dict[int, str]:
        """Container of each process that has one's grant mounted. What is known of a process that lives is not asked again."""
        known = {(pid, host.started_at(pid)): pid for pid in pids}
        self._owners = {
            who: self._owners[who] if self._owners.get(who) else host.key_of(pid, self._grants, self._named_in)
            for who, pid in known.items()
        }
        return {pid: owner for who, pid in known.items() if (owner := self._owners[who])}


def add_up(
    watched: Mapping[str, tuple[frozenset[str], frozenset[int]]],
    cards: Mapping[str, Busy],
    owners: Mapping[int, str],
) -> dict[str, float]:
    """Part of the time, 0 to 1, that each container computed: on the card of its cards where it did most.

    `watched`: cards and connected processes of each. A process whose mount says that it is another container's is that one's.
    """
    parts = {}
    for name, (uuids, connected) in watched.items():
        on_each = [
            sum(
                percent
                for pid, percent in cards[uuid].percent.items()
                if (owners[pid] == name if pid in owners else pid in connected)
            )
            for uuid in uuids
            if uuid in cards
        ]
        parts[name] = min(1.0, max(on_each, default=0) / WHOLE)
    return parts
