"""Processes that NVML lists in a container and that are not connected: they could not reconnect to a restarted arbiter, or bypass the library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arbiter import host
from arbiter.enforcement import enforcements
from arbiter.server import ArbiterServer
from tests.unit.arbiter.conftest import MIB, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.contract import CONTAINER_DIR
from vgpu.api.enforcement import Enforcement, Finding, LimitState, Reason

LOST = 999_999
"""A pid that no process has."""


@pytest.fixture
def server(node: ArbiterNode, meter: HandMeter) -> ArbiterServer:
    server = node.start()
    node.allocate("k", a_grant())
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    return server


def read(server: ArbiterServer, meter: HandMeter, **held: int) -> None:
    """One reading, taken in."""
    meter.lists("k", **held)
    wait_for(lambda: not meter._readings)
    with server.lock:
        pass


def found(server: ArbiterServer) -> Enforcement:
    with server.lock:
        return enforcements(server)["k"]


def test_the_memory_of_a_process_that_does_not_reconnect_is_leased_to_no_other(
    node: ArbiterNode, meter: HandMeter, server: ArbiterServer
) -> None:
    read(server, meter, **{f"p{LOST}": 900})
    process = node.process()
    assert process.lease(101 * MIB).refused
    assert process.lease(100 * MIB).granted_bytes == 100 * MIB
    assert process.page is not None
    assert process.page[0] == 0


def test_it_is_free_again_when_the_process_is_gone(node: ArbiterNode, meter: HandMeter, server: ArbiterServer) -> None:
    read(server, meter, **{f"p{LOST}": 900})
    process = node.process()
    assert process.lease(900 * MIB).refused
    read(server, meter)
    assert process.lease(900 * MIB).granted_bytes == 900 * MIB


def test_it_is_reported_until_the_process_is_gone(meter: HandMeter, server: ArbiterServer) -> None:
    read(server, meter, **{f"p{LOST}": 900})
    read(server, meter, **{f"p{LOST}": 900})
    state = found(server)
    assert state.findings == (Finding(Reason.UNCONNECTED, (LOST,)),)
    assert (state.memory, state.gpu_time) == (LimitState.UNENFORCED, LimitState.UNENFORCED)
    read(server, meter)
    assert found(server) == Enforcement(LimitState.ENFORCED, LimitState.ENFORCED)


def test_a_process_that_reconnects_is_charged_what_it_states_at_once(
    node: ArbiterNode, meter: HandMeter, server: ArbiterServer
) -> None:
    read(server, meter, me=900)
    assert found(server).findings == (Finding(Reason.UNCONNECTED, (os.getpid(),)),)
    assert node.process().lease(1000 * MIB).granted_bytes == 1000 * MIB
    assert found(server).findings == ()


def test_readings_of_a_process_that_is_just_ending_take_nothing_from_its_siblings(
    node: ArbiterNode, meter: HandMeter, server: ArbiterServer
) -> None:
    """It has disconnected, and NVML still counts it. Readings come one after another while a process waits for them."""
    read(server, meter)
    for _ in range(3):
        read(server, meter, **{f"p{LOST}": 900})
    assert node.process().lease(1000 * MIB).granted_bytes == 1000 * MIB
    assert found(server).findings == ()


def test_a_process_that_hung_up_before_the_first_reading_counts_as_ending(
    node: ArbiterNode, meter: HandMeter, server: ArbiterServer
) -> None:
    node.process().close()
    wait_for(lambda: len(server.containers["k"].connections) == 0)
    read(server, meter, me=900)
    assert found(server).findings == ()
    meter.ahead_s = 0.8
    read(server, meter, me=900)
    assert found(server).findings == (Finding(Reason.UNCONNECTED, (os.getpid(),)),)


def test_a_process_that_does_not_end_within_a_second_counts(
    node: ArbiterNode, meter: HandMeter, server: ArbiterServer
) -> None:
    read(server, meter)
    read(server, meter, **{f"p{LOST}": 900})
    meter.ahead_s = 0.8
    read(server, meter, **{f"p{LOST}": 900})
    assert found(server).findings == (Finding(Reason.UNCONNECTED, (LOST,)),)
    assert node.process().lease(101 * MIB).refused


def test_one_that_comes_and_goes_is_new_each_time(meter: HandMeter, server: ArbiterServer) -> None:
    read(server, meter)
    read(server, meter, **{f"p{LOST}": 900})
    read(server, meter)
    meter.ahead_s = 0.8
    read(server, meter, **{f"p{LOST}": 900})
    assert found(server).findings == ()


ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
MOUNTED = f"{ROOT}40 22 8:1 /grants/k {CONTAINER_DIR} ro,relatime shared:1 - ext4 /dev/sda1 rw\n"


def test_a_process_that_changed_its_root_is_known_by_the_librarys_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """That keeps the root which it started with."""
    texts = {f"{os.getpid()}": "", f"{os.getpid()}/task/7": ROOT, f"{os.getpid()}/task/8": MOUNTED}
    monkeypatch.setattr(host, "_read", lambda of, name: texts.get(str(of), "").encode() if name == "mountinfo" else b"")
    monkeypatch.setattr(host, "_threads", lambda pid, _name: [f"{pid}/task/7", f"{pid}/task/8"])
    assert host.rejection_reason(os.getpid(), "grants", "k", mount_needed=True) is None
    assert "another container's" in str(host.rejection_reason(os.getpid(), "grants", "other", mount_needed=True))


def test_the_threads_of_a_name_are_found() -> None:
    name = Path("/proc/self/comm").read_text().rstrip("\n")
    assert f"{os.getpid()}/task/{os.getpid()}" in host._threads(os.getpid(), name)
    assert host._threads(os.getpid(), "an unused name") == []
    assert host._threads(LOST, name) == []
