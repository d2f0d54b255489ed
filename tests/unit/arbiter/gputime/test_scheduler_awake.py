"""A GPU's thread sleeps for naps only while requests come, so that the next one finds it awake."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from arbiter.gputime.timer import Nap
from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import Driver, GpuTimeNode


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> list[bool]:
    """Did they end early? Of all that were taken."""
    taken, plain = list[bool](), Nap.ends_early

    def counted(nap: Nap) -> bool:
        taken.append(plain(nap))
        return taken[-1]

    monkeypatch.setattr(Nap, "ends_early", counted)
    return taken


@pytest.fixture
def bell() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def test_a_nap_ends_by_itself_or_when_there_is_something_to_read(bell: int) -> None:
    nap = Nap(bell, 1000)
    assert [nap.ends_early() for _ in range(3)] == [False] * 3
    os.eventfd_write(bell, 1)
    assert nap.ends_early()
    forever = Nap(bell, 900_000)
    assert forever.ends_early()
    os.eventfd_read(bell)
    threading.Timer(0.01, os.eventfd_write, (bell, 1)).start()
    assert forever.ends_early()


def test_after_the_word_of_a_latency_critical_container_its_gpus_thread_naps_for_a_while(naps: list[bool]) -> None:
    node = GpuTimeNode(awake_s=0.2)
    try:
        urgent = node.container("lc", "latency-critical")
        urgent.idles()
        wait_for(lambda: naps.count(False) > 5)
        quiet = threading.Event()
        wait_for(lambda: (before := len(naps)) and not quiet.wait(0.25) and len(naps) == before)
    finally:
        node.close()


@pytest.mark.parametrize(
    ("service_class", "awake_s"), [("best-effort", 0.2), ("standard", 0.2), ("latency-critical", 0.0)]
)
def test_no_other_container_keeps_it_awake(naps: list[bool], service_class: str, awake_s: float) -> None:
    node = GpuTimeNode(awake_s=awake_s)
    try:
        container = node.container("a", service_class)
        container.works()
        wait_for(lambda: node.status("a").working)
        assert node.is_quiet()
        assert naps == []
    finally:
        node.close()
