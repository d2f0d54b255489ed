"""Containers that may burst, on an arbiter whose part that swaps is in the test's hands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbiter.memory.node_share import NodeShare, RequestId
from arbiter.swap.node import SwapNode
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, ArbiterNode, Process, a_grant, wait_for
from tests.unit.arbiter.memory.node_double import NodeDouble
from vgpu.api.burst import BurstLimits
from vgpu.api.grant import GrantGpu
from vgpu.memory.ceiling import Ceiling, RefusedBy
from vgpu.protocol import wire
from vgpu.protocol.messages import LeaseKind

GUARANTEE, LIMIT = 1000, 3000


@pytest.fixture
def swap_node(node: ArbiterNode) -> Iterator[NodeDouble]:
    made = NodeDouble()
    node.swap_node = cast("SwapNode", made)
    yield made
    node.stop()


@pytest.fixture
def bursting(node: ArbiterNode, swap_node: NodeDouble) -> NodeDouble:
    """An arbiter with one container that may burst."""
    node.allocate("k")
    node.write_burst("k", limits())
    node.write("k", a_grant(GUARANTEE))
    node.start()
    return swap_node


def limits(mib: int = LIMIT, wait_s: int = 7) -> BurstLimits:
    return BurstLimits((GrantGpu(GPU, mib, 0),), wait_s)


def lease(process: Process, mib: int) -> wire.Leased:
    process.send(wire.Lease(0, mib * MIB, mib * MIB, LeaseKind.ELASTIC), 9)
    answer = process.receive()
    assert isinstance(answer, wire.Leased)
    return answer


def test_the_node_has_the_guarantee_and_the_limit(bursting: NodeDouble) -> None:
    assert bursting.contracts["k"].gpus == {GPU: (GUARANTEE * MIB, LIMIT * MIB)}


def test_the_page_tells_the_library_that_it_may_connect_for_bursts(node: ArbiterNode, bursting: NodeDouble) -> None:
    page = node.process().page
    assert page is not None
    assert page[wire.WORDS_AT // 8] & wire.UNDERSTANDS_BURST
    assert not bursting.taken


def shown(process: Process) -> tuple[int, int]:
    """Limit and unleased MiB, as any process of the container reads them."""
    assert process.page is not None
    assert process.page[wire.WORDS_AT // 8] & wire.SHOWS_LIMITS
    return process.page[wire.LIMITS_AT // 8] // MIB, process.page[0] // MIB


def test_the_page_shows_the_limit_to_a_process_without_a_connection_for_bursts(
    node: ArbiterNode, bursting: NodeDouble
) -> None:
    process, sibling = node.process(), node.process()
    assert shown(process) == (LIMIT, LIMIT)
    lease(sibling, 2000)
    assert shown(process) == (LIMIT, LIMIT - 2000)
    node.write_burst("k", limits(mib=LIMIT + 500))
    wait_for(lambda: shown(process) == (LIMIT + 500, LIMIT + 500 - 2000))


def test_the_page_shows_the_guarantee_until_the_pool_is_ready(node: ArbiterNode, swap_node: NodeDouble) -> None:
    swap_node.pools.clear()
    node.allocate("k")
    node.write_burst("k", limits())
    node.write("k", a_grant(GUARANTEE))
    node.start()
    process, sibling = node.process(), node.process()
    assert shown(process) == (GUARANTEE, GUARANTEE)
    assert not sibling.lease(100 * MIB).refused
    assert shown(process) == (GUARANTEE, GUARANTEE - 100)
    swap_node.change_pool(GPU)
    wait_for(lambda: shown(process) == (LIMIT, LIMIT - 100))


def test_a_connection_for_bursts_is_the_nodes(node: ArbiterNode, bursting: NodeDouble) -> None:
    node.connect().hello(wire.FOR_BURST)
    wait_for(lambda: bursting.taken)
    (name, connection), pid = bursting.taken[0], os.getpid()
    assert (name, connection.pid) == ("k", pid)


def test_elastic_memory_may_exceed_the_guarantee_and_the_node_knows_what_is_used(
    node: ArbiterNode, bursting: NodeDouble
) -> None:
    process = node.process()
    assert not process.lease(100 * MIB).refused
    assert lease(process, 2900).granted_bytes == 2900 * MIB
    assert lease(process, 1).refused
    wait_for(lambda: bursting.used["k", GPU] == (100, 2900))
    process.close()
    wait_for(lambda: bursting.used["k", GPU] == (0, 0))


def restated(node: ArbiterNode, mib: int) -> Process:
    """A process that states its lease of an earlier arbiter, whose kinds are not in USAGE."""
    process = node.process()
    process.send(wire.Usage(0, mib * MIB, mib * MIB), 0)
    return process


@pytest.mark.parametrize("elastic_first", [True, False])
def test_the_kinds_of_leases_are_known_again_after_a_restart(
    node: ArbiterNode, bursting: NodeDouble, elastic_first: bool
) -> None:
    """Its two connections state them in any order."""
    if elastic_first:
        bursting.state("k", 1900)
    process = restated(node, 2000)
    if not elastic_first:
        wait_for(lambda: bursting.used.get(("k", GPU)) == (2000, 0))
        assert process.lease(MIB).refused
        bursting.state("k", 1900)
    wait_for(lambda: bursting.used.get(("k", GPU)) == (100, 1900))
    assert process.lease(901 * MIB).refused
    assert not process.lease(900 * MIB).refused


def test_a_gpu_without_a_pool_has_the_guarantee_until_there_is_one(node: ArbiterNode, swap_node: NodeDouble) -> None:
    swap_node.pools.clear()
    swap_node.free = 0
    node.allocate("k")
    node.write_burst("k", limits())
    node.write("k", a_grant(GUARANTEE))
    node.start()
    assert swap_node.contracts["k"].gpus == {GPU: (GUARANTEE * MIB, GUARANTEE * MIB)}
    process = node.process()
    assert lease(process, GUARANTEE + 1).refused, "at once, though the container may wait"
    swap_node.change_pool(OTHER_GPU)
    swap_node.change_pool(GPU)
    wait_for(lambda: swap_node.contracts["k"].gpus == {GPU: (GUARANTEE * MIB, LIMIT * MIB)})
    process.send(wire.Lease(0, 1500 * MIB, 1500 * MIB, LeaseKind.ELASTIC), 7)
    assert process.receive_numbered() == (7, wire.Pending(0, 1500 * MIB))


def test_what_a_process_states_while_the_limits_become_known_refuses_no_request_that_waits_for_them(
    node: ArbiterNode, swap_node: NodeDouble
) -> None:
    """A restarted arbiter learns both in its first half second."""
    swap_node.pools.clear()
    swap_node.unknown.add(GPU)
    node.allocate("k")
    node.write_burst("k", limits())
    node.write("k", a_grant(GUARANTEE))
    node.start()
    process = restated(node, 100)
    wait_for(lambda: swap_node.used.get(("k", GPU)) == (100, 0))
    process.send(wire.Lease(0, 1500 * MIB, 1500 * MIB, LeaseKind.ELASTIC), 7)
    assert process.receive_numbered() == (7, wire.Pending(0, 1500 * MIB))
    swap_node.pools.add(GPU)
    swap_node.changes.append(GPU)
    swap_node.unknown.clear()
    swap_node.state("k", 50)
    number, answer = process.receive_numbered()
    assert number == 7
    assert isinstance(answer, wire.Leased)
    assert not answer.refused


def test_a_pool_that_ends_lowers_the_limit_of_no_container_that_has_had_it(
    node: ArbiterNode, bursting: NodeDouble
) -> None:
    bursting.contracts.clear()
    bursting.change_pool(GPU)
    wait_for(lambda: "k" in bursting.contracts)
    assert bursting.contracts["k"].gpus == {GPU: (GUARANTEE * MIB, LIMIT * MIB)}
    node.allocate("later")
    node.write_burst("later", limits())
    node.write("later", a_grant(GUARANTEE, "later"))
    wait_for(lambda: "later" in bursting.contracts)
    assert bursting.contracts["later"].gpus == {GPU: (GUARANTEE * MIB, GUARANTEE * MIB)}


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50), st.integers(0, 90), st.integers(0, 90))
def test_a_container_may_keep_what_it_leased_under_a_higher_limit_and_no_more(
    guarantee: int, more: int, lowered: int, resident: int, elastic: int
) -> None:
    share = NodeShare("k", cast("SwapNode", NodeDouble.__new__(NodeDouble)))
    limit, highest = (guarantee + more) * MIB, (guarantee + more + lowered) * MIB
    claimed = [(resident * MIB, elastic * MIB)]
    share.highest_bytes(a_grant(guarantee), limits(highest // MIB))
    (lawful,) = share.lawful_bytes(a_grant(guarantee), limits(guarantee + more), claimed)
    assert limit <= lawful <= highest
    if resident <= guarantee and resident + elastic <= guarantee + more:
        assert lawful == limit
    assert lawful <= max(limit, (guarantee + elastic) * MIB)
    assert lawful >= min(highest, (min(resident, guarantee) + elastic) * MIB)


def test_what_a_process_states_raises_no_limit(node: ArbiterNode, bursting: NodeDouble) -> None:
    """A container without a burst, whose process states a lease and elastic memory that no GPU has."""
    node.allocate("hostile")
    node.write("hostile", a_grant(GUARANTEE, "hostile"))
    wait_for(lambda: "hostile" in bursting.contracts)
    process = node.process("hostile")
    process.send(wire.Usage(0, 0, 2**50, 0))
    wait_for(lambda: ("hostile", GPU) in bursting.used and sum(bursting.used["hostile", GPU]) > 0)
    assert bursting.used["hostile", GPU] == (GUARANTEE, 0)
    bursting.state("hostile", 2**30)
    wait_for(lambda: bursting.used["hostile", GPU] == (0, GUARANTEE))
    container = node.server.containers["hostile"] if node.server is not None else None
    assert container is not None
    assert container.grant is not None
    assert container.memory.lawful_bytes(container.grant, container.burst) == {GPU: GUARANTEE * MIB}


def test_a_request_that_waits_is_told_so_and_then_answered(node: ArbiterNode, bursting: NodeDouble) -> None:
    process = node.process()
    bursting.free = 0
    for granted in (True, False):
        process.send(wire.Lease(0, 500 * MIB, 500 * MIB, LeaseKind.ELASTIC), 7)
        assert process.receive_numbered() == (7, wire.Pending(0, 500 * MIB))
        assert list(bursting.waiting.values()) == [7.0]
        bursting.decide(granted=granted)
        seq, answer = process.receive_numbered()
        assert seq == 7
        assert isinstance(answer, wire.Leased)
        assert (answer.refused, answer.granted_bytes) == (not granted, 500 * MIB * granted)


def test_a_process_that_ends_waits_no_more(node: ArbiterNode, bursting: NodeDouble) -> None:
    process = node.process()
    bursting.free = 0
    process.send(wire.Lease(0, 500 * MIB, 500 * MIB, LeaseKind.ELASTIC), 7)
    process.receive()
    process.close()
    wait_for(lambda: not bursting.waiting)


def test_an_edit_of_the_limits_applies_to_running_processes(node: ArbiterNode, bursting: NodeDouble) -> None:
    process = node.process()
    node.write_burst("k", limits(1500))
    wait_for(lambda: bursting.contracts["k"].gpus[GPU][1] == 1500 * MIB)
    assert lease(process, 1501).refused
    assert not lease(process, 1500).refused


@pytest.mark.parametrize(
    "text",
    [
        "", "tangram-burst 2\nend\n", f"tangram-burst 1\nwait_s 1\ncard {GPU} mib=999 core_percent=0\nend\n",
        f"tangram-burst 1\nwait_s 1\ncard {OTHER_GPU} mib=2000 core_percent=0\nend\n", "x" * 70_000,
    ],
)  # fmt: skip
def test_limits_that_cannot_be_used_leave_the_guarantee(node: ArbiterNode, bursting: NodeDouble, text: str) -> None:
    (node.folder / "k" / "burst").write_text(text)
    wait_for(lambda: bursting.contracts["k"].gpus[GPU] == (GUARANTEE * MIB, GUARANTEE * MIB))


def test_a_file_that_is_removed_leaves_the_guarantee(node: ArbiterNode, bursting: NodeDouble) -> None:
    (node.folder / "k" / "burst").unlink()
    wait_for(lambda: bursting.contracts["k"].gpus[GPU] == (GUARANTEE * MIB, GUARANTEE * MIB))


def test_a_container_that_is_gone_leaves_and_an_arbiter_that_ends_takes_nothing_back(
    node: ArbiterNode, bursting: NodeDouble
) -> None:
    gone: Path = node.allocate("gone", a_grant(pod="b"))
    wait_for(lambda: "gone" in bursting.contracts)
    for file in (*gone.iterdir(), gone):
        file.rmdir() if file.is_dir() else file.unlink()
    wait_for(lambda: bursting.said == ["leave gone"])
    node.stop()
    assert bursting.said[:2] == ["leave gone", "close"], "before the containers leave"


def test_memory_that_others_lack_is_recalled(node: ArbiterNode, bursting: NodeDouble) -> None:
    process = node.process()
    lease(process, 500)
    server = node.server
    assert server is not None
    with server.lock:
        server.swapping.recall("k", GPU, 300 * MIB)
    seq, recall = process.receive_numbered()
    assert recall == wire.Recall(0, 300 * MIB)
    process.send(wire.Return(0, 300 * MIB, LeaseKind.ELASTIC), seq)
    wait_for(lambda: bursting.used["k", GPU] == (0, 200))


@given(
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1),
    st.integers(0, 63),
    st.integers(0),
    st.integers(0, 2**32 - 1),
)
def test_the_name_of_a_request_leads_back_to_it(name: str, gpu: int, process: int, seq: int) -> None:
    request = RequestId(name, gpu, process, seq)
    assert RequestId.of(request.id) == request


def test_what_can_never_be_granted_is_refused_with_the_size_that_is_too_small(
    node: ArbiterNode, bursting: NodeDouble
) -> None:
    bursting.most = Ceiling((GUARANTEE + 500) * MIB, RefusedBy.POOL, 500 * MIB)
    process = node.process()
    answer = lease(process, 2000)
    assert (answer.refused, answer.granted_bytes) == (RefusedBy.POOL, 500 * MIB)
    assert lease(process, 1500).refused == RefusedBy.NOTHING
    assert lease(process, LIMIT).refused == RefusedBy.LIMIT
