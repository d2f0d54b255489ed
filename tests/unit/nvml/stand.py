"""A supervisor whose child does what a test sets."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvml import replacing, supervisor
from nvml.driver import DriverIdentity
from nvml.supervisor import NvmlSupervisor, TimeLimits
from tests.built import REPOSITORY

DOUBLE = Path(__file__).with_name("double.py")
OTHER = "GPU-00000000-0000-0000-0000-000000000002"
LIMITS = TimeLimits(start_s=10.0, call_s=0.3, end_s=2.0)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Polls what has no event to wait for."""
    pause = threading.Event()
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it did not come about in time"
        pause.wait(0.005)


class Stand:
    """A supervisor whose child does what a test sets."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script"
        self.released = folder / "released"
        self.driver = DriverIdentity((1,), "580", 1)
        self.reported: list[str] = []
        self.does()

    def does(self, **what: str) -> None:
        """At which request what, from now on."""
        self.script.write_text("".join(f"{kind} {act}\n" for kind, act in what.items()))

    def start(self, limits: TimeLimits = LIMITS) -> NvmlSupervisor:
        self.supervisor = NvmlSupervisor(
            Path("/nonexistent"), limits, released=self.released, report=lambda _, text: self.reported.append(text),
            command=[sys.executable, str(DOUBLE), str(self.script)], driver=lambda *_: self.driver,
        )  # fmt: skip
        self.supervisor.start()
        return self.supervisor

    def opened(self, limits: TimeLimits = LIMITS) -> NvmlSupervisor:
        started = self.start(limits)
        started.await_open(20)
        return started

    def back(self) -> None:
        """Return when a child answers again."""
        wait_for(lambda: not self.supervisor.failing)
        assert self.supervisor.nvml.count().count == 1

    @property
    def children(self) -> list[int]:
        """Every pid that ever was asked something, in order."""
        log = self.script.with_suffix(".log")
        return list(dict.fromkeys(int(line.split()[0]) for line in log.read_text().splitlines()))


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(supervisor, "TICK_S", 0.05)
    monkeypatch.setattr(replacing, "PAUSES_S", (0.05, 0.1))
    monkeypatch.setattr(replacing, "QUARANTINE_S", (0.5, 1.0))
    made = Stand(tmp_path)
    yield made
    made.supervisor.close()
    for pid in made.children if made.script.with_suffix(".log").exists() else []:
        assert not Path(f"/proc/{pid}").exists(), "no child is left, not as a zombie either"
