"""A program whose channels the library reports is enforced; a process of another container that reports none is not."""

from __future__ import annotations

import socket

from tests.integration.gputime.conftest import Node, Program, until
from vgpu.protocol import wire
from vgpu.protocol.status import ContainerStatus, decode_status


def status(node: Node, key: str) -> ContainerStatus:
    """Once the arbiter knows the container: it may publish its status before it reads the container's grant."""
    found: list[ContainerStatus] = []

    def known() -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(node.folder / "status.sock"))
            document = b"".join(iter(lambda: sock.recv(65536), b""))
        found.extend(one for one in decode_status(document).containers if one.key == key)
        return bool(found)

    until(known, 5.0)
    return found[0]


def test_channels_that_are_reported_are_the_difference(node: Node) -> None:
    node.run("honest", core=50)
    path = node.grant("mute", core=50).with_name("arbiter.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.connect(str(path))
        mute.send(wire.encode(0, wire.Hello(1, 0, "test")))
        mute.send(wire.encode(1, wire.Context(0, wire.Step.DONE, 0)))
        until(lambda: "no-channels" in {one.reason for one in status(node, "mute").unenforced}, 5.0)
        assert status(node, "mute").gpu_time_state == "unenforced"
        honest = status(node, "honest")  # its context is older
        assert honest.gpu_time_state == "enforced", honest.unenforced


def test_a_client_of_mps_is_reported_and_has_its_launches_delayed(node: Node) -> None:
    node.driver.ctl("process", "0", "4711", "30", "nvidia-cuda-mps-server")
    program = node.run("client", core=30)
    until(lambda: {one.reason for one in status(node, "client").unenforced} == {"mps", "gated"}, 5.0)
    gpu_time = node.gpu_time("client")
    assert gpu_time is not None
    assert gpu_time.mode == "gate"
    took_ms = program.do("requests(60, 5000, 0)")
    assert sum(took_ms) > 2 * 60 * 5, "30 % of the GPU is less than it wants"
    node.driver.ctl("gone", "4711")
    until(lambda: status(node, "client").gpu_time_state == "enforced", 5.0)
    assert node.misuses() == ""


def test_a_process_whose_channels_cannot_be_read_has_its_launches_delayed(node: Node) -> None:
    grant = node.grant("unread", core=30)
    node.driver.ctl("fault", "alloc-form")
    try:
        env = node.driver.env(LD_PRELOAD=f"{node.library}:{node.kernel}", TANGRAM_GRANT=str(grant))
        node.programs.append(program := Program(env, "unread"))
    finally:
        node.driver.ctl("fault", "none")
    until(lambda: {one.reason for one in status(node, "unread").unenforced} == {"no-channels", "gated"}, 5.0)
    gpu_time = node.gpu_time("unread")
    assert gpu_time is not None
    assert gpu_time.mode == "gate"
    took_ms = program.do("requests(60, 5000, 0)")
    assert sum(took_ms) > 2 * 60 * 5, "30 % of the GPU is less than it wants"
    assert node.misuses() == ""
