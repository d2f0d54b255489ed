"""The connection for bursts: limits, leases of both kinds, and what a process does without it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.integration.shim.burst_kit import ANCHOR_MIB, arbiter, burst, is_elastic, worker
from tests.integration.shim.burst_kit import peer_stage as stage
from tests.integration.shim.conftest import MIB, OUT_OF_MEMORY, Stage, wait_for
from tests.integration.shim.swapping_arbiter import ELASTIC, FEATURES, RESIDENT, SwappingArbiter
from vgpu.protocol import wire

__all__ = ["stage"]

NO_ARBITER = 8
"""Number of the reason in SWAPPABLE; specified: protocol.md."""
SOCKETS = 7
"""Of a program when the library has all of its own: three connections, three spare ones, and one of the fake driver's."""


def needed(made: SwappingArbiter, kind: wire.LeaseKind) -> list[int]:
    return [need // MIB for its, need, _ in made.leases if its is kind and need]


def test_what_the_program_allocates_is_leased_as_elastic_and_the_rest_as_resident(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        assert is_elastic(gpu, gpu.must("alloc(100)"))
        gpu.must("managed(20)")
        assert needed(made, ELASTIC) == [100]
        assert made.leased[ELASTIC] >= 100 * MIB
        assert made.leased[RESIDENT] >= (20 + ANCHOR_MIB) * MIB


def test_total_is_the_limit_of_burst_and_free_is_what_is_not_used_of_it(stage: Stage) -> None:
    """The GPU has 16384 MiB: more than that may be free, as other containers make room."""
    with arbiter(stage, limits=(1000, 20000)) as made:
        gpu = worker(stage)
        gpu.must("alloc(100)")
        code, free, total = gpu.request("info()")
        assert (code, free, total) == (0, 20000 - 100 - ANCHOR_MIB, 20000)
        made.burst().send(wire.Burst(0, 1000 * MIB, 2000 * MIB))
        wait_for(lambda: gpu.request("info()")[2] == 2000)


def test_elastic_memory_goes_up_to_the_limit_and_resident_memory_to_the_guarantee(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        assert gpu.request("managed(1001)")[0] == OUT_OF_MEMORY
        gpu.must("managed(900)")
        assert gpu.request("managed(101)")[0] == OUT_OF_MEMORY
        gpu.must("alloc(3000)")
        assert gpu.request("alloc(99)")[0] == OUT_OF_MEMORY, "with the anchor that is 1 MiB too much"
        gpu.must("alloc(98)")
        assert sum(made.leased.values()) == 4000 * MIB


def test_a_lease_that_is_not_used_is_returned_before_one_of_the_other_kind_is_requested(stage: Stage) -> None:
    with arbiter(stage, limits=(1000, 1001)) as made:
        gpu = worker(stage)
        for _ in range(3):
            block = gpu.must("alloc(990)")
            gpu.must(f"free({block})")
            other = gpu.must("managed(990)")
            gpu.must(f"free({other})")
        assert all(good for _, need, good in made.leases if need < 990 * MIB)


def test_a_recall_gets_what_is_unused_of_both_kinds_and_its_answer_comes_last(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must(f"free({gpu.must('alloc(200)')})")
        gpu.must(f"free({gpu.must('managed(100)')})")
        gpu.must(f"free({gpu.must('alloc(200)')})")
        before = len(made.returns)
        answer = made.recall(4000)
        kinds = [one.kind for one in made.returns[before:]]
        assert kinds in ([RESIDENT, ELASTIC], [ELASTIC])
        assert answer.kind is ELASTIC
        assert answer.bytes >= 200 * MIB, "kept regions are released for it"
        assert made.recall(10).bytes == 0, "it is answered with nothing, too"


def test_an_arbiter_that_lowers_the_limit_gets_what_is_not_used_at_once(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu, peer = worker(stage), made.burst()
        at, other = gpu.must("alloc(1500)"), gpu.must("alloc(300)")
        gpu.must(f"free({other})")
        peer.send(wire.Burst(0, 1000 * MIB, 1000 * MIB))
        wait_for(lambda: made.leased[ELASTIC] == 1500 * MIB)
        assert gpu.request("info()")[1:] == [0, 1000]
        assert gpu.request("alloc(1001)")[0] == OUT_OF_MEMORY
        gpu.must(f"fill({at}, 1500, 7)")
        peer.send(wire.Burst(0, 1000 * MIB, 4000 * MIB))
        wait_for(lambda: gpu.request("info()")[2] == 4000)
        assert is_elastic(gpu, gpu.must("alloc(1000)"))


def test_equal_limits_are_no_burst(stage: Stage) -> None:
    with arbiter(stage, limits=(1000, 1000)) as made:
        gpu = worker(stage)
        assert not is_elastic(gpu, gpu.must("alloc(100)"))
        assert needed(made, ELASTIC) == []


def test_a_request_waits_while_other_containers_make_room(stage: Stage) -> None:
    """Longer than for an arbiter that is silent."""
    with arbiter(stage, pending=True) as made:
        gpu = worker(stage)
        gpu.start("alloc(100)")
        threading.Event().wait(3)
        made.pending = False
        assert gpu.finish()[0] == 0


def test_it_waits_no_longer_than_the_file_allows_and_the_program_goes_on(stage: Stage) -> None:
    burst(stage, 4000, wait_s=0)
    with arbiter(stage, pending=True) as made:
        gpu, began_s = worker(stage), time.monotonic()
        assert gpu.request("alloc(100)")[0] == OUT_OF_MEMORY
        assert time.monotonic() - began_s >= 4.99, (
            "the arbiter is to refuse first, within 5 s; the library counts in whole ms"
        )
        made.pending = False
        wait_for(lambda: gpu.request("alloc(100)")[0] == 0)


def test_without_limits_a_process_waits_once_and_has_plain_memory_and_says_so(stage: Stage) -> None:
    with arbiter(stage, limits=None) as made:
        gpu, peer = worker(stage), made.burst()
        began_s = time.monotonic()
        assert not is_elastic(gpu, gpu.must("alloc(10)"))
        assert time.monotonic() - began_s >= 0.9
        assert peer.state(lambda state: state.reason != 0).reason == NO_ARBITER
        peer.send(wire.Burst(0, 1000 * MIB, 4000 * MIB))
        wait_for(lambda: gpu.request("info()")[2] == 4000)
        assert not is_elastic(gpu, gpu.must("alloc(10)")), "for its life"
        assert needed(made, ELASTIC) == []
        assert gpu.end().count("this process cannot be swapped: the arbiter has not sent") == 1


def test_limits_that_come_within_the_second_are_in_time(stage: Stage) -> None:
    with arbiter(stage, limits=None) as made:
        gpu, peer = worker(stage), made.burst()
        gpu.start("alloc(10)")
        threading.Event().wait(0.2)
        made.limits = (1000, 4000)
        peer.send(wire.Burst(0, 1000 * MIB, 4000 * MIB))
        assert is_elastic(gpu, gpu.finish()[1])


def test_an_arbiter_that_serves_no_bursts_gets_no_such_connection_and_is_not_waited_for(stage: Stage) -> None:
    with arbiter(stage, features=FEATURES & ~wire.UNDERSTANDS_BURST) as made:
        gpu = worker(stage)
        assert not is_elastic(gpu, gpu.must("alloc(10)"))
        assert wire.FOR_BURST not in made.hellos
        assert "the arbiter has not sent" in gpu.end()


def test_a_process_without_a_helper_has_plain_memory_and_no_such_connection(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage, **stage.without_threads)
        assert not is_elastic(gpu, gpu.must("alloc(10)"))
        assert wire.FOR_BURST not in made.hellos
        assert needed(made, ELASTIC) == []


def test_a_container_without_a_burst_opens_no_such_connection(stage: Stage) -> None:
    (stage.folder / "grants" / stage.key / "burst").unlink()
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(10)")
        assert wire.FOR_BURST not in made.hellos


@pytest.mark.parametrize(
    ("number", "body"),
    [(18, bytes(8)), (18, b"\0" * 8 + b"\1" + b"\0" * 15), (18, b"\1" + b"\0" * 23), (3, bytes(24)), (99, b""), (22, bytes(512))],
)  # fmt: skip
def test_a_packet_that_cannot_be_read_ends_the_connection_and_the_next_one_is_as_good(
    stage: Stage, number: int, body: bytes
) -> None:
    with arbiter(stage) as made:
        gpu, peer = worker(stage), made.burst()
        gpu.must("alloc(10)")
        peer.send_raw(number, body)
        assert peer.ends()
        again = made.burst()
        assert again.state(lambda state: state.elastic_bytes == 10 * MIB).away_bytes == 0
        gpu.must("alloc(10)")


def test_a_restarted_arbiter_gets_the_state_and_the_limits_stay_meanwhile(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(1500)")
        made.burst()
    assert gpu.request("info()")[2] == 4000
    with arbiter(stage) as again:
        assert again.burst().state(lambda _: True) == wire.Swappable(0, 0, 1500 * MIB, 0)
        wait_for(lambda: again.usages)
        assert again.usages[0].leased_bytes >= 1500 * MIB


def test_elastic_bytes_are_stated_when_they_change(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu, peer = worker(stage), made.burst()
        at = gpu.must("alloc(100)")
        peer.state(lambda state: state.elastic_bytes == 100 * MIB)
        gpu.must("alloc(50)")
        peer.state(lambda state: state.elastic_bytes == 150 * MIB)
        assert peer.swappable[-1].reason == 0
        gpu.request(f"sync_memops({at}, 1)")
        assert peer.state(lambda state: state.reason != 0).reason == 6


@pytest.mark.parametrize("own", ["os.open('/dev/zero', os.O_RDONLY)", "os.pipe()[0]"], ids=["readable", "silent"])
def test_a_descriptor_that_the_program_closed_and_uses_for_itself_is_left_alone(stage: Stage, own: str) -> None:
    """Also where nothing ever comes on it."""
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(10)")
        made.burst()
        folder = Path(f"/proc/{gpu.pid}/fd")
        sockets = [int(file.name) for file in folder.iterdir() if "socket:" in str(file.readlink())]
        gpu.must(f"[0, [os.dup2({own}, fd) for fd in {sockets}]]")
        made.burst().state(lambda state: state.elastic_bytes == 10 * MIB)
        assert not any("socket:" in str((folder / str(fd)).readlink()) for fd in sockets)
        gpu.must("alloc(10)")


def test_a_forked_child_has_no_part_of_its_parents_connection(stage: Stage) -> None:
    """Nor does it open one before it uses CUDA. The driver's own socket is all that it has."""
    sockets = "len([fd for fd in os.listdir('/proc/self/fd') if 'socket:' in os.path.realpath('/proc/self/fd/' + fd)])"
    with arbiter(stage) as made:
        gpu, peer = worker(stage), made.burst()
        gpu.must("alloc(10)")
        peer.state(lambda state: state.elastic_bytes == 10 * MIB)
        code = gpu.must(f"[0, (lambda pid: os.waitpid(pid, 0)[1] if pid else os._exit({sockets}))(os.fork())]")
        assert os.waitstatus_to_exitcode(code) <= 1
        peer.send(wire.Burst(0, 1000 * MIB, 3000 * MIB))
        wait_for(lambda: gpu.request("info()")[2] == 3000)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_that_changed_its_root_comes_back(stage: Stage, tmp_path: Path) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(10)")
        made.burst()
        gpu.must(f"[os.chroot({str(tmp_path)!r}) or 0]")
    with arbiter(stage) as again:
        again.burst().state(lambda state: state.elastic_bytes == 10 * MIB)


def test_a_program_with_no_descriptor_left_comes_back_by_a_spare_socket(stage: Stage) -> None:
    with arbiter(stage) as made:
        gpu = worker(stage)
        gpu.must("alloc(10)")
        made.burst()
        wait_for(
            lambda: sum("socket:" in str(file.readlink()) for file in Path(f"/proc/{gpu.pid}/fd").iterdir()) >= SOCKETS
        )
        gpu.must("[0, __import__('resource').setrlimit(7, (3, 3))]")
    with arbiter(stage) as again:
        again.burst().state(lambda state: state.elastic_bytes == 10 * MIB)
