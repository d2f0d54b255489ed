"""The arbiter on real sockets: which processes get memory, and what happens when one ends."""

from __future__ import annotations

import shutil
import socket
import threading

import pytest

from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, a_grant, wait_for
from vgpu.protocol import wire

LIMIT = 1000 * MIB


@pytest.fixture
def started(node: ArbiterNode) -> ArbiterNode:
    node.start()
    node.allocate("k", a_grant())
    return node


def test_a_new_directory_has_a_socket_for_all_users_at_once(node: ArbiterNode) -> None:
    node.start()
    folder = node.allocate("fresh")
    wait_for((folder / "arbiter.sock").exists, seconds=0.5)
    assert (folder / "arbiter.sock").stat().st_mode & 0o777 == 0o666


def test_a_process_is_reported_its_gpus_and_limits(node: ArbiterNode) -> None:
    node.start()
    node.allocate("k", a_grant(mib=512, uuids=(GPU, OTHER_GPU)))
    gpus = node.process().gpus
    assert [(gpu.uuid[-1], gpu.limit_bytes, gpu.core_percent, gpu.service_class) for gpu in gpus] == [
        (1, 512 * MIB, 0, 1),
        (2, 512 * MIB, 0, 1),
    ]


def test_a_process_that_comes_before_the_grant_is_welcomed_when_it_is_written(node: ArbiterNode) -> None:
    node.start()
    node.allocate("k")
    early = node.connect()
    early.send(wire.Hello(1, 0, "test"))
    node.write("k", a_grant())
    assert early.welcomed().gpus[0].limit_bytes == LIMIT


def test_a_process_is_turned_away_when_no_grant_comes(node: ArbiterNode) -> None:
    node.start()
    node.allocate("k")
    early = node.connect()
    early.send(wire.Hello(1, 0, "test"))
    assert early.receive() == wire.Error(2, "the grant of this container has not been written")
    assert early.hung_up()


def test_two_processes_share_one_limit(started: ArbiterNode) -> None:
    one, two = started.process(), started.process()
    assert one.lease(600 * MIB).granted_bytes == 600 * MIB
    assert two.lease(400 * MIB).granted_bytes == 400 * MIB
    assert two.page is not None
    assert two.page[0] == 0


def test_a_lease_is_recalled_from_a_sibling_that_does_not_use_it(started: ArbiterNode) -> None:
    one, two = started.process(), started.process()
    one.lease(600 * MIB)
    two.send(wire.Lease(0, 500 * MIB, 500 * MIB), seq=9)
    recall, message = one.receive_numbered()
    assert message == wire.Recall(0, 100 * MIB)
    one.send(wire.Return(0, 100 * MIB), seq=recall)
    assert two.receive_numbered() == (9, wire.Leased(0, False, 500 * MIB, 0))


def test_a_sibling_that_is_stopped_costs_a_bounded_wait(started: ArbiterNode) -> None:
    one, two = started.process(), started.process()
    one.lease(600 * MIB)
    assert two.lease(500 * MIB) == wire.Leased(0, True, 0, 400 * MIB)


def test_a_process_that_is_gone_gives_its_lease_back(started: ArbiterNode) -> None:
    one, two = started.process(), started.process()
    one.lease(LIMIT)
    one.close()
    assert two.lease(LIMIT).granted_bytes == LIMIT


def test_the_page_shows_what_no_process_has_leased_and_cannot_be_written(started: ArbiterNode) -> None:
    one, two = started.process(), started.process()
    one.lease(300 * MIB)
    assert two.page is not None
    assert two.page[0] == 700 * MIB
    assert two.page.readonly


def test_the_pages_descriptor_cannot_be_opened_again_for_writing_by_a_container(started: ArbiterNode) -> None:
    import mmap
    import os

    server = started.server
    assert server is not None
    started.process()
    fd = os.open(f"/proc/self/fd/{server.containers['k']._page.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, wire.PAGE_BYTES, mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
    finally:
        os.close(fd)


def test_containers_do_not_share_limits(started: ArbiterNode) -> None:
    started.allocate("other", a_grant(pod="b"))
    assert started.process("k").lease(LIMIT).granted_bytes == LIMIT
    assert started.process("other").lease(LIMIT).granted_bytes == LIMIT


def test_after_a_restart_what_processes_state_is_not_lent_again(node: ArbiterNode) -> None:
    node.allocate("k", a_grant())
    node.start()
    late = node.process()
    asker = node.process()
    late.send(wire.Usage(0, 600 * MIB, 600 * MIB))
    asker.send(wire.Lease(0, 600 * MIB, 600 * MIB), seq=3)
    recall, message = late.receive_numbered()
    assert message == wire.Recall(0, 200 * MIB)
    late.send(wire.Return(0, 0), seq=recall)
    assert asker.receive() == wire.Leased(0, True, 0, 400 * MIB)


def test_a_stale_socket_of_an_earlier_arbiter_is_replaced(node: ArbiterNode) -> None:
    folder = node.allocate("k", a_grant())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(folder / "arbiter.sock"))
    node.start()
    assert node.process().gpus[0].limit_bytes == LIMIT


def test_a_directory_that_is_removed_ends_its_connections(started: ArbiterNode) -> None:
    one = started.process()
    for name in ("grant", "arbiter.sock"):  # in this order: a socket that is missing beside a grant is put back
        (started.folder / "k" / name).unlink()
    (started.folder / "k").rmdir()
    assert one.hung_up()
    assert started.server is not None
    wait_for(lambda: "k" not in started.server.containers)  # type: ignore[union-attr]


def test_a_grant_that_names_another_pod_ends_the_connections(started: ArbiterNode) -> None:
    one = started.process()
    one.lease(LIMIT)
    started.write("k", a_grant(pod="b"))
    assert one.hung_up()
    assert started.process().lease(LIMIT).granted_bytes == LIMIT


def test_a_larger_limit_for_the_same_container_keeps_what_is_leased(started: ArbiterNode) -> None:
    one = started.process()
    one.lease(LIMIT)
    started.write("k", a_grant(mib=1500))
    wait_for(lambda: one.page is not None and one.page[0] == 500 * MIB)
    assert one.lease(500 * MIB).granted_bytes == 500 * MIB


def test_sixteen_processes_at_once_get_exactly_the_limit(started: ArbiterNode) -> None:
    granted: list[int] = []

    def take() -> None:
        process = started.process()
        process.sock.settimeout(30)  # a rejected process answers no recall, and each request waits for it
        while not (answer := process.lease(10 * MIB)).refused:
            granted.append(answer.granted_bytes)

    threads = [threading.Thread(target=take) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(granted) == LIMIT


def test_a_directory_that_goes_while_a_process_connects_takes_that_process_alone(node: ArbiterNode) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    node.allocate("other", a_grant(pod="b"))
    other = node.process("other")
    wait_for((node.folder / "k/arbiter.sock").exists)
    with server.lock:  # it connects first, and both are there when the loop comes round
        late = node.connect()
        late.send(wire.Hello(1, 0, "x"))
        shutil.rmtree(node.folder / "k")
    assert late.hung_up()
    assert other.lease(1).granted_bytes >= 1
