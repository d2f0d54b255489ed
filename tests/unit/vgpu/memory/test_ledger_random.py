"""The ledger compared with the obvious slow version, for any actions of processes in any order."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.memory.ledger import PROMISE_S, Ledger
from vgpu.memory.records import Event, Granted, Recalled


@dataclass
class LedgerModel:
    """The obvious slow version: processes that obey, and what was granted to each."""

    limit: int
    book: Ledger
    held: dict[int, int] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    asking: dict[int, int] = field(default_factory=dict)
    recalls: list[Recalled] = field(default_factory=list)
    contexts: dict[int, int] = field(default_factory=dict)
    beginning: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    """The estimate of a context at its BEGIN; 0 = unknown."""
    room: int = 0
    """Beside each context."""
    promised: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Bytes, and until when."""
    fresh: set[int] = field(default_factory=set)
    """Connected, and have requested nothing."""
    grew: bool = False
    """NVML was read, and may have found contexts that are larger than what was held for them."""
    now: float = 0.0
    seq: int = 0
    """Of the last request: leases have even numbers, contexts odd ones."""

    def kept(self) -> int:
        """Beside all contexts."""
        rooms = (
            max(0, self.made[process] + self.room - took)
            for process, took in self.contexts.items()
            if took and self.made.get(process)
        )
        return min(sum(rooms), self.limit // 16)

    def receive(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Recalled):
                self.recalls.append(event)
                continue
            others = sum(self.held.values()) + sum(self.contexts.values())
            if event.seq % 2:
                cost = self.beginning.pop(event.process)
                if isinstance(event, Granted):
                    assert event.granted_bytes == max(cost, self.contexts.get(event.process, 0))
                    self.contexts[event.process] = event.granted_bytes
                    # NVML may have counted more than the limit: then only existing memory is granted
                    assert sum(self.held.values()) + sum(self.contexts.values()) <= max(self.limit, others)
                else:
                    assert others + cost - self.contexts.get(event.process, 0) > self.limit - self.kept()
                continue
            need = self.asking.pop(event.process)
            if isinstance(event, Granted):
                assert event.granted_bytes >= need
                self.held[event.process] += event.granted_bytes
                self.used[event.process] += need
            else:
                assert others + need > self.limit - self.kept(), "refused though it fits beside all that is held"
            if isinstance(event, Granted) and event.granted_bytes:
                assert sum(self.held.values()) + sum(self.contexts.values()) + self.promised_bytes() <= self.limit

    def promised_bytes(self) -> int:
        return sum(amount for amount, _ in self.promised.values())

    def unleased_bytes(self) -> int:
        return max(0, self.limit - sum(self.held.values()) - sum(self.contexts.values()) - self.kept())

    def check(self) -> None:
        assert self.book.leased_bytes(0) == sum(self.held.values())
        assert self.book.context_bytes(0) == sum(self.contexts.values())
        assert self.book.unleased_bytes(0) == self.unleased_bytes()
        held = sum(self.held.values()) + sum(self.contexts.values()) + self.promised_bytes()
        assert held <= self.limit or self.grew, "more is held and promised than there is"

    # --- what processes do; each is there, and whether it may is checked here as the library checks it ---

    def join(self, process: int) -> None:
        self.book.join(process)
        self.held[process] = self.used[process] = 0
        self.fresh.add(process)

    def promise(self, process: int, amount: int) -> None:
        """It has just sent HELLO, from cuInit."""
        if process in self.fresh and process not in self.promised:
            free = self.unleased_bytes() - self.promised_bytes()
            kept = amount if not self.asking and not self.beginning and amount <= free else 0
            assert self.book.promise(process, 0, amount, self.now) == kept
            if kept:
                self.promised[process] = kept, self.now + PROMISE_S

    def leave(self, process: int) -> None:
        for of in (self.held, self.used):
            del of[process]
        self.fresh.discard(process)
        for maybe in (self.asking, self.beginning, self.contexts, self.made, self.promised):
            maybe.pop(process, None)
        self.recalls = [recall for recall in self.recalls if recall.process != process]
        self.receive(self.book.leave(process, self.now))

    def request(self, process: int, amount: int) -> None:
        if process not in self.asking:
            self.fresh.discard(process)
            self.promised.pop(process, None)
            self.seq += 2
            self.asking[process] = amount
            self.receive(self.book.request(process, 0, self.seq, amount, amount * 2, self.now))

    def free(self, process: int, amount: int) -> None:
        self.used[process] -= min(amount, self.used[process])

    def give_back(self, process: int, amount: int) -> None:
        give = min(amount, self.held[process] - self.used[process])
        self.held[process] -= give
        self.receive(self.book.give_back(process, 0, give, 0, self.now))

    def begin(self, process: int, amount: int) -> None:
        if process not in self.beginning:
            self.fresh.discard(process)
            promised, _ = self.promised.pop(process, (0, 0.0))
            self.seq += 2
            self.beginning[process] = self.made[process] = amount
            events = self.book.begin_context(process, 0, self.seq + 1, amount, self.now)
            if promised:  # kept, whatever NVML has shown since
                del self.beginning[process]
                self.contexts[process] = max(promised, self.contexts.get(process, 0))
                assert events.pop(0) == Granted(process, 0, self.seq + 1, self.contexts[process])
            self.receive(events)

    def done(self, process: int, amount: int) -> None:
        if process not in self.beginning:
            made = amount % 4 > 0
            self.book.end_context(process, 0, self.now, made=made)
            if not made:
                self.made[process] = 0

    def read(self, process: int, amount: int) -> None:
        """NVML is read, and finds so much more than the process uses."""
        before = self.book.context_bytes(0)
        context = self.contexts.get(process, 0)
        self.grew = True
        events = self.book.measure(process, 0, self.used[process] + amount, self.now, self.now)
        granted = {event.process for event in events if isinstance(event, Granted) and event.seq % 2}
        mine = self.book.part_of(process, 0).context_bytes
        if process not in granted:
            self.contexts[process] = mine
        assert mine != context or self.book.context_bytes(0) >= before
        self.receive(events)

    # --- what happens to all ---

    def answer(self, amount: int) -> None:
        """One of the processes with a recall returns memory."""
        if self.recalls:
            recall = self.recalls.pop(amount % len(self.recalls))
            give = min(recall.missing_bytes, self.held[recall.process] - self.used[recall.process])
            self.held[recall.process] -= give
            self.receive(self.book.give_back(recall.process, 0, give, recall.recall, self.now))

    def wait(self, milliseconds: int) -> None:
        self.now += milliseconds / 1000
        self.promised = {process: kept for process, kept in self.promised.items() if self.now < kept[1]}
        self.receive(self.book.expire(self.now))
        assert (self.book.deadline_s() or inf) > self.now, "it would be asked again at once, and again"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "leave", "request", "free", "give_back", "answer", "wait", "begin", "done", "read", "promise"]
        ),
        st.integers(0, 5),
        st.integers(0, 130),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(st.integers(0, 400), st.integers(0, 40), STEPS)
def test_whatever_processes_do_the_leases_stay_within_the_limit(
    limit: int, room: int, steps: list[tuple[str, int, int]]
) -> None:
    model = LedgerModel(limit, Ledger([limit], may_answer=lambda process: process % 2 == 0, room_bytes=room), room=room)
    for what, process, amount in steps:
        model.now += 0.001
        there = process in model.held
        match what:
            case "join" if not there:
                model.join(process)
            case "leave" if there:
                model.leave(process)
            case "answer" | "wait":
                getattr(model, what)(amount)
            case "request" | "free" | "give_back" | "begin" | "done" | "read" | "promise" if there:
                getattr(model, what)(process, amount)
        model.check()
    for _ in range(len(model.asking) + len(model.beginning) + len(model.promised)):
        model.wait(1000)
    assert not model.asking, "a request was never answered"
    assert not model.beginning, "a context was never answered"
    assert model.book.deadline_s() is None
