"""Requests that fit into the container's limits and wait for memory of the GPU itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.memory.ceiling import Ceiling, Refusal, RefusedBy, ceiling
from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied, Event, Granted, NodeAnswer, Recalled, Waiting

ONE, TWO = 1, 2


@dataclass
class Node:
    """A GPU with this much memory for the container; what is asked for while it lasts is granted, everything else waits."""

    free: int
    shared: bool = True
    refuses: bool = False
    knows: bool = True
    most: Ceiling | None = None
    waiting: dict[tuple[int, int], int] = field(default_factory=dict)
    used: tuple[int, int] = (0, 0)
    """By the container, as the node knows it."""
    used_at_requests: list[tuple[int, int]] = field(default_factory=list)

    def use(self, _: int, claimed_bytes: tuple[int, int]) -> None:
        self.used = claimed_bytes

    def knows_limits(self, _: int) -> bool:
        return self.knows

    def ceiling(self, _: int) -> Ceiling | None:
        return self.most

    def decides(self, _: int) -> bool:
        return self.shared

    def request(self, _: int, process: int, seq: int, need_bytes: int, **__: float) -> NodeAnswer:
        self.used_at_requests.append(self.used)
        if self.refuses:
            return NodeAnswer.REFUSED
        if need_bytes <= self.free:
            self.free -= need_bytes
            return NodeAnswer.GRANTED
        self.waiting[process, seq] = need_bytes
        return NodeAnswer.WAITS

    def withdraw(self, _: int, process: int, seq: int) -> None:
        del self.waiting[process, seq]

    def free_bytes(self, _: int) -> int:
        return 0 if self.waiting else self.free


def ledger(node: Node, guarantee: int = 100, burst: int = 300) -> Ledger:
    made = Ledger([guarantee], node=node)
    made.set_limits([guarantee], 0, [burst])
    for process in (ONE, TWO):
        made.join(process)
    return made


def test_what_the_gpu_has_is_granted_and_counted() -> None:
    node = Node(150)
    book = ledger(node)
    assert book.request(ONE, 0, 1, 120, 120, 0, elastic=True) == [Granted(ONE, 0, 1, 120)]
    assert node.free == 30


def test_a_request_waits_while_a_new_arbiter_does_not_know_the_limits() -> None:
    """The process has more than the guarantee, by its limit under the arbiter before; what it requests fits that limit."""
    node = Node(1000, knows=False)
    book = ledger(node, burst=100)
    book.state(ONE, 0, 200, 200)
    book.states_elastic(ONE, 0, 200, 0)
    assert book.request(ONE, 0, 1, 10, 10, 0) == []
    assert book.deadline_s() == 0
    assert book.expire(0) == [Waiting(ONE, 0, 1, 10)]
    assert book.deadline_s() == 1.0
    assert book.expire(1.0) == [Waiting(ONE, 0, 1, 10)], "or its library takes the arbiter for absent"
    assert book.deadline_s() == 2.0
    node.knows = True
    assert book.set_limits([100], 1.5, [300]) == [Granted(ONE, 0, 1, 10)]


def test_it_is_refused_if_the_limits_stay_unknown_or_the_limit_is_lower() -> None:
    node = Node(1000, knows=False)
    book = ledger(node, burst=100)
    assert book.request(ONE, 0, 1, 110, 110, 0, elastic=True) == []
    assert book.expire(9.9) == [Waiting(ONE, 0, 1, 110)]
    assert book.expire(10.0) == [Denied(ONE, 0, 1)]
    node.knows = True
    assert book.request(ONE, 0, 2, 110, 110, 10.0, elastic=True) == [Denied(ONE, 0, 2)]
    assert book.expire(10.9) == []
    assert book.deadline_s() is None


def test_resident_memory_that_no_limit_could_fit_is_refused_at_once() -> None:
    """Its limit is the guarantee, whatever the copier says."""
    book = ledger(Node(1000, knows=False), burst=100)
    assert book.request(ONE, 0, 1, 110, 110, 0) == [Denied(ONE, 0, 1)]
    assert book.request(ONE, 0, 2, 60, 60, 0) == [Granted(ONE, 0, 2, 60)]
    (recalled,) = book.request(TWO, 0, 3, 50, 50, 0)
    assert isinstance(recalled, Recalled)
    assert book.give_back(ONE, 0, 0, recalled.recall, 0) == [Denied(TWO, 0, 3)]


def test_resident_memory_waits_while_what_was_stated_may_be_elastic() -> None:
    node = Node(1000, knows=False)
    book = ledger(node, burst=100)
    book.leases_exactly(ONE, 0, exact=True)
    book.state(ONE, 0, 90, 90)
    assert book.request(TWO, 0, 1, 50, 50, 0) == []
    assert book.expire(0) == [Waiting(TWO, 0, 1, 50)]
    assert book.states_elastic(ONE, 0, 30, 1.0) == [], "60 may be elastic, too"
    node.knows = True
    assert book.set_limits([100], 2.0, [300]) == [Denied(TWO, 0, 1)], "90 and 50, and 30 of that elastic"
    book.states_elastic(ONE, 0, 60, 3.0)
    assert book.request(TWO, 0, 2, 50, 50, 3.0) == [Granted(TWO, 0, 2, 50)]


def test_that_requests_wait_for_the_limits_is_answered_at_once() -> None:
    """Their libraries have waited for the arbiter to open, and give up after 2 s without an answer."""
    book = Ledger([100], node=Node(1000, knows=False), opens_at_s=1.0)
    for process in (ONE, TWO):
        book.join(process)
        assert book.request(process, 0, 1, 110, 110, 0, elastic=True) == []
    assert book.deadline_s() == 1.0
    assert book.expire(1.0) == [Waiting(ONE, 0, 1, 110), Waiting(TWO, 0, 1, 110)]
    assert book.deadline_s() == 2.0


def test_a_request_that_waited_for_the_limits_recalls_what_it_then_lacks() -> None:
    """While the limits were not known, no recall could have made it fit."""
    node = Node(1000, knows=False)
    book = ledger(node, burst=100)
    assert book.request(ONE, 0, 1, 60, 60, 0, elastic=True) == [Granted(ONE, 0, 1, 60)]
    assert book.request(TWO, 0, 1, 270, 270, 0, elastic=True) == []
    node.knows = True
    (recalled,) = book.set_limits([100], 1.0, [300])
    assert isinstance(recalled, Recalled)
    assert recalled.process == ONE
    assert book.give_back(ONE, 0, 60, recalled.recall, 1.0, elastic=True) == [Granted(TWO, 0, 1, 270)]


def test_a_request_that_waits_for_a_promise_is_not_due_before_its_end_where_limits_stay_unknown() -> None:
    """Else the arbiter would not rest until then."""
    node = Node(1000, shared=False, knows=False)
    book = ledger(node, burst=100)
    assert book.promise(TWO, 0, 50, 10.5) == 50
    assert book.request(ONE, 0, 1, 60, 60, 10.6) == []
    assert book.deadline_s() == 11.5
    assert book.expire(11.5) == [Granted(ONE, 0, 1, 60)]


def test_the_node_decides_on_a_request_without_what_its_process_returned_for_it() -> None:
    """Else a request within the guarantee may be above it, and be refused."""
    node = Node(1000)
    book = ledger(node)
    book.request(ONE, 0, 1, 60, 60, 0)
    book.request(TWO, 0, 1, 70, 70, 0, elastic=True)
    book.give_back(ONE, 0, 50, 0, 0)
    book.give_back(TWO, 0, 40, 0, 0, elastic=True)
    book.request(ONE, 0, 2, 90, 90, 0)
    assert node.used_at_requests == [(0, 0), (60, 0), (10, 30)]


def test_two_requests_of_one_number_do_not_wait_together() -> None:
    """Their kinds differ, and the node knows a request by its process and number: it could grant the small one, and the large one would be answered."""
    node = Node(0)
    book = ledger(node)
    assert book.request(ONE, 0, 7, 1, 1, 0, elastic=True) == [Waiting(ONE, 0, 7, 1)]
    assert book.hold(ONE, 0, 7, b"key", 90, 0) == [Denied(ONE, 0, 7)]
    assert node.waiting == {(ONE, 7): 1}
    assert book.node_decided(ONE, 0, 7, 0, granted=True) == [Granted(ONE, 0, 7, 1)]


def test_an_advance_is_no_more_than_the_gpu_has() -> None:
    book = ledger(Node(150))
    assert book.request(ONE, 0, 1, 100, 200, 0, elastic=True) == [Granted(ONE, 0, 1, 112)], "a quarter of the rest"


def test_a_lease_in_advance_is_no_more_than_the_gpu_has_and_waits_for_nothing() -> None:
    node = Node(16)
    assert ledger(node).request(ONE, 0, 1, 0, 64, 0) == [Granted(ONE, 0, 1, 4)]
    node.free = 0
    assert ledger(node).request(ONE, 0, 1, 0, 64, 0) == [Granted(ONE, 0, 1, 0)]


def test_a_request_that_waits_is_granted_when_the_node_has_the_memory() -> None:
    node = Node(50)
    book = ledger(node)
    assert book.request(ONE, 0, 1, 120, 200, 0, elastic=True) == [Waiting(ONE, 0, 1, 120)]
    assert book.node_decided(ONE, 0, 1, 5, granted=True) == [Granted(ONE, 0, 1, 120)]


def test_a_request_that_the_node_gives_up_is_denied() -> None:
    book = ledger(Node(50))
    book.request(ONE, 0, 1, 120, 120, 0, elastic=True)
    assert book.node_decided(ONE, 0, 1, 5, granted=False) == [Denied(ONE, 0, 1)]


def test_one_that_the_node_refuses_is_denied_at_once() -> None:
    assert ledger(Node(50, refuses=True)).request(ONE, 0, 1, 10, 10, 0) == [Denied(ONE, 0, 1)]


def test_a_request_that_waits_delays_no_later_one() -> None:
    book = ledger(Node(50))
    book.request(ONE, 0, 1, 120, 120, 0, elastic=True)
    assert book.request(TWO, 0, 1, 40, 40, 0) == [Granted(TWO, 0, 1, 40)]


def test_what_waits_counts_against_the_limit() -> None:
    book = ledger(Node(50))
    book.request(ONE, 0, 1, 280, 280, 0, elastic=True)
    assert book.request(TWO, 0, 1, 40, 40, 0, elastic=True) == [], "the first may get the rest of the limit"
    assert book.node_decided(ONE, 0, 1, 1, granted=False) == [Denied(ONE, 0, 1), Granted(TWO, 0, 1, 40)]


def test_each_second_all_that_wait_are_told() -> None:
    book = ledger(Node(50))
    book.request(ONE, 0, 1, 280, 280, 0, elastic=True)
    book.request(TWO, 0, 2, 40, 40, 0, elastic=True)
    assert book.deadline_s() == 1
    assert book.expire(1) == [Waiting(ONE, 0, 1, 280), Waiting(TWO, 0, 2, 40)]
    assert book.deadline_s() == 2
    book.node_decided(ONE, 0, 1, 1.5, granted=True)
    book.leave(TWO, 1.6)
    assert book.expire(2) == []
    assert book.expire(10.9) == []
    assert book.deadline_s() is None


def test_a_process_that_ends_withdraws_its_request() -> None:
    node = Node(50)
    book = ledger(node)
    book.request(ONE, 0, 1, 120, 120, 0, elastic=True)
    book.leave(ONE, 1)
    assert node.waiting == {}
    assert book.node_decided(ONE, 0, 1, 2, granted=True) == []


def test_limits_that_fell_meanwhile_count() -> None:
    book = ledger(Node(50))
    book.request(ONE, 0, 1, 120, 120, 0, elastic=True)
    book.set_limits([100], 1, [110])
    assert book.node_decided(ONE, 0, 1, 2, granted=True) == [Denied(ONE, 0, 1)]


def test_nothing_is_promised_and_no_growth_is_unasked_where_memory_may_be_short() -> None:
    node = Node(0)
    book = ledger(node)
    assert book.promise(ONE, 0, 10, 0) == 0
    assert book.bound_context(ONE, 0, 3, 10, 0) == [Waiting(ONE, 0, 3, 10)]
    node.shared = False
    assert book.promise(TWO, 0, 10, 0) == 10


def test_memory_that_others_lack_is_recalled_from_all_processes_but_those_that_have_none_unused() -> None:
    book = ledger(Node(300))
    book.request(ONE, 0, 1, 50, 50, 0, elastic=True)
    book.request(TWO, 0, 1, 50, 50, 0)
    book.leases_exactly(TWO, 0, exact=True)
    (recalled,) = book.recall(0, 30, 1)
    assert isinstance(recalled, Recalled)
    assert (recalled.process, recalled.missing_bytes) == (ONE, 30)
    assert book.recall(0, 30, 1.1) == [], "it owes an answer"
    book.give_back(ONE, 0, 30, recalled.recall, 1.2, elastic=True)
    assert book.claimed_bytes(0) == (50, 20)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["request", "return", "room", "leave"]), st.sampled_from([ONE, TWO]), st.integers(0, 150), st.booleans()),
    max_size=40,
)  # fmt: skip


@settings(max_examples=examples(300))
@given(ACTIONS, st.integers(0, 300))
def test_any_order_of_requests_returns_and_room(actions: list[tuple[str, int, int, bool]], free: int) -> None:
    """Every request is answered once, nothing is granted beyond the limits or the GPU's memory."""
    node = Node(free)
    book, now, total = ledger(node), 0.0, free
    open_: dict[tuple[int, int], bool] = {}
    held = {(process, kind): 0 for process in (ONE, TWO) for kind in (False, True)}

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Recalled):
                take(book.give_back(event.process, 0, 0, event.recall, now))
            elif not isinstance(event, Waiting):
                kind = open_.pop((event.process, event.seq))
                if isinstance(event, Granted):
                    held[event.process, kind] += event.granted_bytes

    for seq, (what, process, amount, elastic) in enumerate(actions, 1):
        now += 0.1
        if what == "request" and not any(one == process for one, _ in open_):
            open_[process, seq] = elastic
            take(book.request(process, 0, seq, amount, amount, now, elastic=elastic))
        elif what == "return":
            amount = min(amount, held[process, elastic])
            held[process, elastic] -= amount
            node.free += amount
            take(book.give_back(process, 0, amount, 0, now, elastic=elastic))
        elif what == "leave":
            for key in [key for key in open_ if key[0] == process]:
                del open_[key]
            node.free += sum(held[process, kind] for kind in (False, True))
            held[process, False] = held[process, True] = 0
            take(book.leave(process, now))
            book.join(process)
        elif what == "room":
            node.free, total = node.free + amount, total + amount
            for (waits, number), need in list(node.waiting.items()):
                if need <= node.free:
                    del node.waiting[waits, number]
                    node.free -= need
                    take(book.node_decided(waits, 0, number, now, granted=True))
        resident, elastic_bytes = (sum(held[process, kind] for process in (ONE, TWO)) for kind in (False, True))
        assert book.claimed_bytes(0) == (resident, elastic_bytes)
        assert resident <= 100
        assert resident + elastic_bytes <= 300
        assert resident + elastic_bytes <= total
        assert set(node.waiting) <= set(open_)
        assert all(key in node.waiting or node.waiting for key in open_), "what waits, waits for the node"


def test_what_the_host_pool_can_never_hold_is_refused_at_once_with_its_sizes() -> None:
    most = Ceiling(120, RefusedBy.POOL, 20)
    node = Node(0, most=most)
    book = ledger(node)
    assert book.request(ONE, 0, 1, 121, 121, 0, elastic=True) == [Denied(ONE, 0, 1, Refusal(121, 0, 100, most))]
    assert book.request(ONE, 0, 2, 301, 301, 0, elastic=True) == [Denied(ONE, 0, 2)], "above its limit"
    assert node.used_at_requests == []
    assert book.request(ONE, 0, 3, 120, 120, 0, elastic=True) == [Waiting(ONE, 0, 3, 120)]
    node.most = None
    assert book.request(TWO, 0, 4, 121, 121, 0, elastic=True) == [Waiting(TWO, 0, 4, 121)], "the pool is not ready"


def test_what_a_sibling_does_not_use_is_recalled_before_the_pool_refuses() -> None:
    node = Node(1000, most=Ceiling(120, RefusedBy.POOL, 20))
    book = ledger(node)
    assert book.request(TWO, 0, 1, 60, 60, 0, elastic=True) == [Granted(TWO, 0, 1, 60)]
    (recall,) = book.request(ONE, 0, 1, 90, 90, 0, elastic=True)
    assert isinstance(recall, Recalled)
    assert recall.missing_bytes == 30
    assert book.give_back(TWO, 0, 30, recall.recall, 0.01, elastic=True) == [Granted(ONE, 0, 1, 90)]


@settings(max_examples=examples(300))
@given(
    st.integers(0, 200),
    st.integers(0, 200),
    st.lists(
        st.tuples(st.sampled_from([ONE, TWO]), st.integers(1, 150), st.booleans(), st.integers(0, 80)), max_size=12
    ),
)
def test_no_request_that_the_ceiling_allows_is_refused_and_none_above_it_waits(
    pool: int, gpu: int, steps: list[tuple[int, int, bool, int]]
) -> None:
    """A GPU with little free memory: by the sums of an obvious model."""
    guarantee, limit = 100, 300
    bound = min(guarantee + pool, max(guarantee, gpu))
    most = ceiling(guarantee, pool, gpu)
    assert most is not None
    assert most.bytes == bound
    node = Node(150, most=most)
    book = ledger(node, guarantee, limit)
    has = {ONE: [0, 0], TWO: [0, 0]}
    waiting: set[int] = set()
    for seq, (process, need, elastic, back) in enumerate(steps):
        if process in waiting:
            continue
        used = sum(map(sum, has.values()))
        promised = sum(node.waiting.values())
        fits = used + promised + need <= min(bound, limit)
        fits_resident = sum(one[0] for one in has.values()) + need <= guarantee
        events = book.request(process, 0, seq, need, need, 0, elastic=elastic)
        for one in [one for one in events if isinstance(one, Recalled)]:
            events += book.give_back(one.process, 0, 0, one.recall, 0)
        answers = [one for one in events if not isinstance(one, Recalled)]
        if not answers:
            assert used + need <= min(bound, limit), "it waits for what is promised to others, and fits without that"
            return
        (answer,) = answers
        if isinstance(answer, Denied):
            assert not (fits and (elastic or fits_resident))
            continue
        assert fits
        if isinstance(answer, Waiting):
            waiting.add(process)
            continue
        has[process][elastic] += need
        freed = min(back, has[process][elastic])
        has[process][elastic] -= freed
        book.give_back(process, 0, freed, 0, 0, elastic=elastic)
