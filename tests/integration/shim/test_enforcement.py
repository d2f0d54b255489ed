"""A real arbiter, processes with the library beside processes that only speak its protocol: what is not enforced is visible within 5 s."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.integration.shim.conftest import GPUS, MIB, Stage, wait_for
from vgpu.api.enforcement import REPORTED, Reason
from vgpu.protocol import wire

VISIBLE_S = 5.0
"""Specified."""


@pytest.fixture
def stage(bare_stage: Stage) -> Stage:
    """A node of its own whose arbiter reads NVML, and a container limited to 1000 MiB."""
    bare_stage.grant((GPUS[0], 1000))
    bare_stage.start_measuring_arbiter()
    return bare_stage


@pytest.fixture
def peer(stage: Stage) -> Iterator[socket.socket]:
    """A process of the container, as the arbiter sees it: welcomed, and silent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5)
        path = stage.folder / "grants" / stage.key / "arbiter.sock"
        wait_for(path.exists)
        sock.connect(str(path))
        sock.send(wire.encode(0, wire.Hello(1, 0, "test")))
        assert isinstance(wire.decode(sock.recv(8192))[1], wire.Welcome)
        yield sock


def reasons(stage: Stage) -> set[str]:
    return {one.reason for one in stage.status().unenforced}


@pytest.mark.parametrize(("number", "reason"), REPORTED.items())
def test_a_report_is_in_the_status_and_ends_with_its_process(
    stage: Stage, peer: socket.socket, number: int, reason: Reason
) -> None:
    peer.send(wire.encode(1, wire.Report(number, True)))
    wait_for(lambda: reasons(stage) == {reason}, VISIBLE_S)
    status = stage.status()
    assert "unenforced" in (status.memory_state, status.gpu_time_state)
    peer.close()
    wait_for(lambda: reasons(stage) == set(), VISIBLE_S)
    assert (stage.status().memory_state, stage.status().gpu_time_state) == ("enforced", "enforced")


def test_a_library_beside_a_process_that_reports_allocates_up_to_the_limit(stage: Stage, peer: socket.socket) -> None:
    peer.send(wire.encode(1, wire.Report(1, True)))
    peer.send(wire.encode(2, wire.Lease(0, 400 * MIB, 400 * MIB)))
    assert wire.decode(peer.recv(8192))[1] == wire.Leased(0, False, 400 * MIB, 600 * MIB)
    worker = stage.worker()
    assert worker.request("alloc(600)")[0] == 0
    assert worker.request("alloc(1)")[0] == 2
    peer.setblocking(False)
    with pytest.raises(BlockingIOError):  # no RECALL, which it could not answer
        peer.recv(8192)
    assert Reason.NO_THREAD in reasons(stage)


def test_a_context_without_channels_is_in_the_status(stage: Stage, peer: socket.socket) -> None:
    peer.send(wire.encode(1, wire.Context(0, wire.Step.DONE, 0)))
    wait_for(lambda: reasons(stage) == {Reason.NO_CHANNELS}, VISIBLE_S)
    peer.send(wire.encode(2, wire.Context(0, wire.Step.GONE, 0)))
    wait_for(lambda: reasons(stage) == set(), VISIBLE_S)


def test_a_recall_that_is_not_answered_is_in_the_status(stage: Stage, peer: socket.socket) -> None:
    peer.send(wire.encode(1, wire.Lease(0, 900 * MIB, 900 * MIB)))
    assert isinstance(wire.decode(peer.recv(8192))[1], wire.Leased)
    assert stage.worker().request("alloc(200)")[0] == 2
    wait_for(lambda: Reason.SILENT_PROCESS in reasons(stage), VISIBLE_S)


def test_where_nvml_is_not_to_be_had_that_is_in_the_status(own_stage: Stage) -> None:
    own_stage.worker()
    wait_for(lambda: Reason.NVML in reasons(own_stage), VISIBLE_S)
    assert own_stage.status().memory_state == "unenforced"
