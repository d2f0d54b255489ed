"""When an order looks again by itself, because no event tells it what it waits for."""

from __future__ import annotations

from typing import cast

from arbiter.gputime.blocks import BlockStatus
from arbiter.swap.orders import LOOK_S, RECALL_S, OrderHost, OutOrder
from vgpu.memory.swap.events import ContainerEvent, Suspended

GPU = "GPU-a"


class HostDouble:
    """A container whose suspend and recall the test decides, without processes."""

    name = "one"
    processes = ()

    def __init__(self) -> None:
        self.at_s, self.halted, self.unanswered = 100.0, False, True
        self.events: list[ContainerEvent] = []

    def used_bytes(self, _: str) -> int:
        return 100

    def apply(self, event: ContainerEvent) -> None:
        self.events.append(event)

    def status(self) -> BlockStatus:
        return BlockStatus(self.halted)

    def recall(self, *_: object) -> None: ...

    def owes(self, _: str) -> bool:
        return self.unanswered

    def now_s(self) -> float:
        return self.at_s


def order_of(host: HostDouble) -> OutOrder:
    return OutOrder(cast("OrderHost", host), {GPU: 100})


def test_it_is_due_at_a_time_that_does_not_move_while_nothing_happens() -> None:
    host = HostDouble()
    order = order_of(host)
    order.turn()
    due_s = order.deadline_s()
    host.at_s += 2 * LOOK_S
    assert order.deadline_s() == due_s <= host.at_s, "else it is never due"


def test_a_suspend_is_found_at_the_next_look() -> None:
    host = HostDouble()
    order = order_of(host)
    order.turn()
    host.halted, host.at_s = True, order.deadline_s()
    order.turn()
    assert [type(event) for event in host.events] == [Suspended]


def test_blocks_are_requested_when_the_recall_is_answered_or_after_a_while() -> None:
    for answered in (True, False):
        host = HostDouble()
        host.halted = True
        order = order_of(host)
        order.turn()
        assert order.failure == "", "it waits for the recall"
        host.unanswered, host.at_s = not answered, host.at_s + (LOOK_S if answered else RECALL_S)
        order.turn()
        assert order.failure == "no process has memory that can be moved"
