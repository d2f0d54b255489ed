"""Processes that answer what they may not: their connection ends, their container is unable, and no other notices."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable

import pytest

from arbiter.attention import MS_A_SECOND, MS_AGAIN
from arbiter.budget import MessageBudget
from arbiter.swap import process
from tests.unit.arbiter.conftest import open_files
from tests.unit.arbiter.swap.node_kit import GPU, GRAIN, RESIDENT, SimulatedNode, SimulatedProcess, contract
from vgpu.memory.records import NodeAnswer
from vgpu.protocol import wire
from vgpu.protocol.messages import (
    Block,
    Blocks,
    Hello,
    Leased,
    SwapOut,
    Swappable,
    Unable,
    UnableReason,
    Unmap,
    Unmapped,
)

Lie = Callable[[SimulatedProcess, int], None]


def fds(count: int) -> tuple[int, ...]:
    return tuple(os.memfd_create("lie") for _ in range(count))


def named(*blocks: tuple[int, int], descriptors: int | None = None, more: bool = False, seq: int | None = None) -> Lie:
    def lie(process: SimulatedProcess, order_seq: int) -> None:
        made = fds(len(blocks) if descriptors is None else descriptors)
        message = Blocks(0, tuple(Block(*one) for one in blocks), more)
        process.send(message, order_seq if seq is None else seq, made)
        for fd in made:
            os.close(fd)

    return lie


def endless(process: SimulatedProcess, seq: int) -> None:
    for at in range(40):
        named(*((100 + at * 8 + n, GRAIN) for n in range(8)), more=True)(process, seq)


def in_two(process: SimulatedProcess, seq: int) -> None:
    named((1, 3 * GRAIN), more=True)(process, seq)
    named((2, 4 * GRAIN))(process, seq)


def said(message: wire.Message) -> Lie:
    return lambda process, seq: process.send(message, seq)  # type: ignore[arg-type]


LIES: dict[str, tuple[Lie, str]] = {
    "another seq": (named((1, GRAIN), seq=999), "no such order is unanswered"),
    "no multiple of 2 MiB": (named((1, GRAIN + 4096)), "must be a multiple of"),
    "no bytes": (named((1, 0)), "must be a multiple of"),
    "a block of 2 EiB": (named((1, 2**61)), "must be a multiple of"),
    "more than it has leased": (named((1, 64 * GRAIN)), "are leased"),
    "a block twice": (named((1, GRAIN), (1, GRAIN)), "names block 1"),
    "more blocks than it was asked for": (named(*((n, GRAIN) for n in range(5))), "4 at most|8388608 bytes are in 4"),
    "a block that could be left out": (named((1, 4 * GRAIN), (2, 4 * GRAIN)), "a block of 8388608 could be left out"),
    "such a block in its second answer": (in_two, "a block of 6291456 could be left out"),
    "no descriptor": (named((1, GRAIN), descriptors=0), "1 blocks with 0 descriptors"),
    "too many descriptors": (named((1, GRAIN), descriptors=3), "1 blocks with 3 descriptors"),
    "far too many descriptors": (named((1, GRAIN), descriptors=200), "1 blocks with 200 descriptors"),
    "endless blocks": (endless, "at most|leased"),
    "another answer": (said(Unmapped(0, (1,))), "UNMAPPED answers no SWAPOUT"),
    "an order": (said(SwapOut(0, 5)), "SWAPOUT on a connection for bursts"),
    "HELLO": (said(Hello(1, 4, "x")), "HELLO on a connection for bursts"),
    "LEASED": (said(Leased(0, False, 5, 5)), "LEASED on a connection for bursts"),
    "a GPU that it has not": (said(Swappable(3, 0, 0, 0)), "the container has 1"),
    "garbage": (lambda process, _: process.sock.send(b"x" * 50) and None, "packet begins with"),  # type: ignore[union-attr]
}


def swap_out_seq(process: SimulatedProcess) -> int:
    """Of the SWAP_OUT that it has."""
    assert process.sock is not None
    while True:
        seq, message = wire.decode(process.sock.recv(wire.PACKET_LIMIT))
        if isinstance(message, SwapOut):
            return seq


@pytest.fixture
def big(node: SimulatedNode) -> SimulatedProcess:
    """It was ordered to name 4 grains."""
    for name in ("big", "small"):
        node.join(name, contract(4, 16))
    made, small = node.process("big"), node.process("small")
    node.settle(1.0)
    for _ in range(4):
        assert node.request(made, 4) is NodeAnswer.GRANTED
    assert node.request(small, 4) is NodeAnswer.WAITS
    node.turn()
    node.now_s += 0.05
    node.turn()
    return made


@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_connection_and_nothing_else(
    node: SimulatedNode, big: SimulatedProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PIECE_S", 60.0)  # or a busy processor decides which of two packets a turn reads
    before = open_files()
    lie, error = LIES[name]
    lie(big, swap_out_seq(big))
    node.settle(1.0)
    assert big.sock is None, "the connection is closed"
    assert re.search(f"broke the protocol: .*({error})", node.swaps.status("big").unable)
    if lie is not endless:  # an ERROR is lost where the peer's own packets were not all read
        assert [one.code for one in big.errors] == [1]
    assert [block.state for block in big.blocks.values()] == [RESIDENT] * 4
    assert not node.blocked("big")
    assert node.swaps._pools[GPU].slots.free_bytes == node.pool * GRAIN  # type: ignore[union-attr]
    assert open_files() == before - 2, "no descriptor of it is left"
    big.connect()
    node.settle(1.0)
    assert "broke the protocol" in node.swaps.status("big").unable
    assert node.swaps.status("small").unable == ""


def unmap_seq(node: SimulatedNode, process: SimulatedProcess) -> tuple[int, tuple[int, ...]]:
    process.step()
    node.turn()
    while node.copier.step():
        node.turn()
    assert process.sock is not None
    while True:
        seq, message = wire.decode(process.sock.recv(wire.PACKET_LIMIT))
        if isinstance(message, Unmap):
            return seq, message.ids


@pytest.mark.parametrize("ids", [(77,), (1, 1), (1, 77)])
def test_unmapped_of_what_was_not_ordered_is_a_lie(node: SimulatedNode, big: SimulatedProcess, ids: tuple[int, ...]) -> None:  # fmt: skip
    seq, _ = unmap_seq(node, big)
    big.send(Unmapped(0, ids), seq)
    node.turn()
    big.step()
    assert [one.code for one in big.errors] == [1]
    node.settle(1.0)
    assert node.blocked("big"), "whether the block is away is not known until it states so"
    big.connect()
    node.settle(1.0)
    assert not node.blocked("big")


def test_an_unmap_that_is_refused_leaves_the_block_where_it_is(node: SimulatedNode, big: SimulatedProcess) -> None:
    seq, _ = unmap_seq(node, big)
    big.send(Unable(0, UnableReason.DRIVER), seq)
    big._stay()
    node.turn()
    assert not node.blocked("big"), "it need not state so"
    node.settle(1.0)
    assert not node.blocked("big")
    assert [block.state for block in big.blocks.values()] == [RESIDENT] * 4


def test_a_flood_of_swappable_is_a_lie(node: SimulatedNode, big: SimulatedProcess) -> None:
    for _ in range(20):
        for _ in range(30):
            big.state()
        node.turn()
    node.settle(1.0)
    assert "more than 400 SWAPPABLE" in node.swaps.status("big").unable


def test_a_container_that_states_too_much_is_read_later_and_no_other_waits(node: SimulatedNode) -> None:
    for name in ("floods", "calm"):
        node.join(name, contract(4, 16))
    floods, calm = [node.process("floods") for _ in range(8)], node.process("calm")
    node.settle(1.0)
    container = node.swaps._containers["floods"]
    container.attention._budget = MessageBudget(node.now_s, MS_A_SECOND, 1.0, MS_AGAIN)  # any SWAPPABLE uses it up
    for one in floods:
        one.state()
    node.swaps.turn()
    assert node.swaps.throttles() == {"floods": 1}
    stated_s, until_s = container.stated_s, node.swaps.deadline_s()
    for one in floods:
        one.state()
    node.request(calm, 2)
    node.swaps.turn()
    assert container.stated_s == stated_s, "nothing more of it is read"
    assert calm.limits
    assert node.swaps.status("calm").gpus[0].present_bytes == 2 * GRAIN
    assert until_s is not None
    assert until_s <= node.now_s + MS_AGAIN / MS_A_SECOND, "the loop comes back to it"
    for _ in range(16):
        node.now_s += MS_AGAIN / MS_A_SECOND
        node.swaps.turn()
    assert container.stated_s > stated_s
    assert node.swaps.status("floods").unable == ""
    node.swaps.leave("floods")
    node.swaps.turn()


def test_what_answers_an_order_is_not_charged(node: SimulatedNode, big: SimulatedProcess) -> None:
    container = node.swaps._containers["big"]
    stated: list[float] = []
    plain = container._charge
    process = next(iter(container.processes))
    process._charge = lambda seconds: (stated.append(seconds), plain(seconds))[1]
    big.state = lambda *_: None  # type: ignore[method-assign]
    node.settle(1.0)
    assert node.swaps.status("big").gpus[0].present_bytes < 16 * GRAIN, "it gave way"
    assert stated == []
    assert node.swaps.throttles() == {}


def test_a_process_that_reads_nothing_never_blocks_the_loop(node: SimulatedNode, big: SimulatedProcess) -> None:
    big.deaf = True
    for limit in range(5000):
        node.swaps.change("big", contract(4, 5 + limit % 2))
    node.settle(2.0)
    assert not node.blocked("big")


def test_a_process_that_states_a_reason_makes_its_container_unable(node: SimulatedNode) -> None:
    node.join("a", contract(4, 16))
    first, second = node.process("a"), node.process("a")
    node.settle(1.0)
    assert node.may_burst("a")
    second.reason = 2
    second.state()
    node.settle(1.0)
    assert node.swaps.status("a").unable == "the process sees a GPU that its container's grant does not name"
    assert not node.may_burst("a")
    node.kill(second)
    node.settle(2.0)
    assert node.may_burst("a")
    assert first.errors == []


def test_a_process_that_the_arbiter_cannot_see_gets_no_orders(node: SimulatedNode) -> None:
    node.join("a", contract(4, 16))
    hidden = SimulatedProcess(node, "a", 0)
    hidden.connect()
    node.settle(1.0)
    assert "cannot be identified" in node.swaps.status("a").unable
    hidden.drop()
    node.settle(1.0)
    assert isinstance(hidden.sock, socket.socket) is False
