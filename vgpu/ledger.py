"""Who of a container's processes holds how much of its limit.

One ledger serves one grant: its cards, the processes connected to it (named by any number), and what each has leased. It is
pure: calls bring what happened and the time, and return what is to be told to whom. Nothing is ever leased beyond the limit.
Two things can bring the sum above it, and then nothing more is leased until it is below again: what a process re-states after
the arbiter came back, and contexts that grow (`context`), which nobody can refuse.

An ask that does not fit is held while the other processes are asked to return what they do not use. All of them are asked at
once, each for all that is missing: what comes back too much is unused anyway, and one round is all that a waiting allocation
can afford. Asks for one card are decided in the order they came. A sibling that could answer and has not (the machine is busy)
is waited for longer than one that cannot: stopped or dead.

Code that a process loads later, kernel by kernel, makes its context grow when the container may be full already. So beside each
context some room is kept, which its growth uses up; together at most a sixteenth of the limit.

Who has just initialised the driver is promised what a context takes, if it is free: it is charged as its context, and so he can
make one without asking first. If he has not begun one in time, it is free again; an ask that does not fit for promises alone waits until
they end. Nothing is promised while anybody waits, so that wait is bounded.

Memory that processes share is charged once, whoever of them goes first (`vgpu/shared.py`).

Units: bytes; time in seconds of any one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from vgpu.context import ContextMeasure
from vgpu.errors import BadDocument
from vgpu.holding import Ask, CardBook, Holding, Part

RECALLS: Final = 0x80000000
"""The bit of a sequence number that says it is a recall's. Specified: protocol.md."""
RECALL_WAIT_S: Final = 0.05
"""How long an ask waits for its siblings. Specified: an allocation may not hang on a process that is stopped."""
RECALL_MOST_S: Final = 0.5
"""And for those that are alive and not stopped. Specified; a busy machine schedules everybody within it."""
STATED_MOST: Final = 2**50
"""A PiB, which no card has: sums of what processes state stay within 64 bits."""
PROMISE_S: Final = 1.0
"""How long a context is held for who has not begun it. Specified: a library relies on half of it (docs/reference/protocol.md)."""
SHARE_OF_REST: Final = 4
"""Beyond its need an ask gets at most this part of what is left, so that chunks shrink near the limit. Guessed."""


ROOM_SHARE: Final = 16
"""The room beside all contexts of a card is at most this part of the limit. Guessed: a container of 1 GiB keeps 64 MiB."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Tell `process`: its ask `seq` has so many bytes."""

    process: int
    card: int
    seq: int
    granted_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """Tell `process`: its ask `seq` does not fit."""

    process: int
    card: int
    seq: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Ask `process` to return up to so many unused bytes, and to answer with `recall`."""

    process: int
    card: int
    recall: int
    missing_bytes: int


Event = Granted | Denied | Wanted


def _nobody(_: int) -> bool:
    return False


class Ledger:
    """Leases of one grant.

    `opens_at_s`: until then asks are held, so that processes can re-state what they hold.
    `room_bytes`: kept beside each context for code that it loads later.
    `may_answer`: is this process alive and not stopped? Asked of siblings that owe an answer.
    """

    def __init__(
        self,
        limits_bytes: Sequence[int],
        opens_at_s: float = 0.0,
        recall_wait_s: float = RECALL_WAIT_S,
        may_answer: Callable[[int], bool] = _nobody,
        room_bytes: int = 0,
    ) -> None:
        self._cards = [CardBook(limit) for limit in limits_bytes]
        self._opens_at_s = opens_at_s
        self._recall_wait_s = recall_wait_s
        self._may_answer = may_answer
        self._room_bytes = room_bytes
        self._recalls = 0

    def join(self, process: int) -> None:
        """A process connected. It holds nothing."""
        for card in self._cards:
            card.holdings[process] = Holding()

    def leave(self, process: int, now_s: float) -> list[Event]:
        """A process hung up: all it leased is free again."""
        events: list[Event] = []
        for number, card in enumerate(self._cards):
            holding = card.holdings.pop(process, None)
            if holding is None:
                continue
            card.shared.leave(process)
            self._heirs_moved(card)
            card.leased_bytes -= holding.leased_bytes
            self._take_out(card, holding)
            card.promises.pop(process, None)
            card.asks = deque(ask for ask in card.asks if ask.process != process)
            for ask in card.asks:
                ask.waits_for.discard(process)
            events += self._decide(number, now_s)
        return events

    def ask(self, process: int, card: int, seq: int, need_bytes: int, want_bytes: int, now_s: float) -> list[Event]:
        """A process asks for at least `need_bytes`, at best `want_bytes`. Raises BadDocument."""
        holding = self._holding(process, card)
        holding.known = True
        self._queue(card, Ask(process, seq, need_bytes, max(need_bytes, want_bytes)))
        return self._decide(card, now_s)

    def promise(self, process: int, card: int, context_bytes: int, now_s: float) -> int:
        """A process that holds nothing may make a context soon, which takes so much: hold that for PROMISE_S, if it is free and nobody
        waits. What is held."""
        of = self._cards[card]
        holding = of.holdings[process]
        if of.asks or now_s < self._opens_at_s or holding.known or self.unleased_bytes(card) < context_bytes:
            return 0
        if context_bytes > 0:
            self._charge(card, holding, context_bytes, made_bytes=0)
            holding.context.counts_from_s = inf
            of.promises[process] = now_s + PROMISE_S
        return context_bytes

    def begin_context(self, process: int, card: int, seq: int, estimate_bytes: int, now_s: float) -> list[Event]:
        """A process is about to make its first context on a card, which may take `estimate_bytes`. Raises BadDocument."""
        holding = self._holding(process, card)
        context = holding.context
        self._cards[card].promises.pop(process, None)
        holding.known = holding.begun = True
        need_bytes = max(0, estimate_bytes - context.bytes)
        self._queue(card, Ask(process, seq, need_bytes, need_bytes, context=True))
        self._charge(card, holding, context.bytes, made_bytes=estimate_bytes)
        context.counts_from_s = inf
        return self._decide(card, now_s)

    def end_context(self, process: int, card: int, now_s: float, *, made: bool = True) -> None:
        """Its contexts are made, or gone: readings from now on count. Raises BadDocument."""
        holding = self._holding(process, card)
        holding.context.counts_from_s = now_s
        if not made:
            self._charge(card, holding, holding.context.bytes, made_bytes=0)

    def restate_context(self, process: int, card: int, context_bytes: int) -> None:
        """A process that came back says what its contexts take; it stands while no reading contradicts it. Raises BadDocument."""
        holding = self._holding(process, card)
        if not holding.begun:
            measured_bytes = holding.context.measured_bytes
            most_bytes = self._cards[card].limit_bytes if measured_bytes is None else measured_bytes
            stated_bytes = max(holding.context.bytes, min(context_bytes, most_bytes))
            self._charge(card, holding, stated_bytes, made_bytes=stated_bytes)

    def measure(
        self, process: int, card: int, measured_bytes: int, at_s: float, now_s: float, *, exact: bool = False
    ) -> list[Event]:
        """NVML counted so much for a process at `at_s`. `exact`: it can have allocated nothing meanwhile."""
        holding = self._cards[card].holdings[process]
        context = holding.context
        before_bytes = context.bytes
        self._take_out(self._cards[card], holding)
        opened_bytes, orphaned_bytes = self._cards[card].shared.opened_bytes(process)
        context.read(
            measured_bytes, holding.used_bytes, holding.leased_bytes, at_s,
            exact=exact, opened_bytes=opened_bytes, orphaned_bytes=orphaned_bytes,
        )  # fmt: skip
        if exact and holding.made_bytes == 0:
            holding.made_bytes = context.bytes
        self._put_back(self._cards[card], holding)
        return self._decide(card, now_s) if context.bytes < before_bytes else []

    def give_back(self, process: int, card: int, amount_bytes: int, seq: int, now_s: float) -> list[Event]:
        """A process returns a part of its lease, or answers the recall `seq`. Raises BadDocument."""
        holding = self._holding(process, card)
        if amount_bytes > holding.leased_bytes:
            raise BadDocument(f"RETURN of {amount_bytes} bytes of card {card}: 0 to {holding.leased_bytes} are leased")
        holding.context.moved(holding.leased_bytes)
        holding.leased_bytes -= amount_bytes
        self._cards[card].leased_bytes -= amount_bytes
        if holding.recall and seq == holding.recall:
            holding.recall = 0
            for ask in self._cards[card].asks:
                ask.waits_for.discard(process)
        return self._decide(card, now_s)

    def make(self, process: int, card: int, key: bytes, amount_bytes: int) -> None:
        """A process gives others a name for memory that its lease pays for. What its lease cannot pay for is not noted, nor is
        one key too many: then who opens it pays. Raises BadDocument."""
        holding = self._holding(process, card)
        holding.known = True
        shared = self._cards[card].shared
        if shared.made_bytes(process, without=key) + amount_bytes <= holding.leased_bytes and not shared.full():
            shared.make(key, process, amount_bytes)

    def hold(self, process: int, card: int, seq: int, key: bytes, amount_bytes: int, now_s: float) -> list[Event]:
        """A process opened memory of which it got the name. It is charged once, if nobody pays for it. Raises BadDocument."""
        self._holding(process, card).known = True
        self._queue(card, Ask(process, seq, amount_bytes, amount_bytes, key=key))
        return self._decide(card, now_s)

    def restate_hold(self, process: int, card: int, key: bytes, amount_bytes: int) -> None:
        """A process that came back says what it has open: nobody can refuse that. Raises BadDocument."""
        self._holding(process, card).known = True
        shared = self._cards[card].shared
        if shared.full():
            raise BadDocument(f"HOLD of one more key of card {card}: a container holds at most {shared.holds_most}")
        shared.open(key, process, min(amount_bytes, STATED_MOST))

    def drop(self, process: int, card: int, key: bytes, back_bytes: int, now_s: float, *, made: bool) -> list[Event]:
        """A process has memory that it made, or opened, no more. `back_bytes` of its lease, which paid for it, end with that, and
        go to the key if others have it open. Raises BadDocument."""
        holding = self._holding(process, card)
        of = self._cards[card]
        if back_bytes > holding.leased_bytes:
            raise BadDocument(f"DROP of {back_bytes} bytes of card {card}: 0 to {holding.leased_bytes} are leased")
        holding.context.moved(holding.leased_bytes)
        holding.leased_bytes -= back_bytes
        of.leased_bytes -= back_bytes
        of.shared.let_go(key, process, made=made, opened=not made)
        self._heirs_moved(of)
        return self._decide(card, now_s)

    def state(self, process: int, card: int, used_bytes: int, leased_bytes: int) -> None:
        """A process says what it uses; the first time, before it asked for anything, also what it leased from an earlier arbiter.
        Raises BadDocument."""
        holding = self._holding(process, card)
        if leased_bytes > STATED_MOST:
            raise BadDocument(f"USAGE of {leased_bytes} bytes leased of card {card}: at most {STATED_MOST}")
        if not holding.known:
            holding.known = True
            self._cards[card].leased_bytes += leased_bytes - holding.leased_bytes
            holding.leased_bytes = leased_bytes
            # a reading before this took its allocations for contexts
            self._charge(card, holding, 0, made_bytes=holding.made_bytes)
            holding.context = ContextMeasure()
        holding.used_bytes = min(used_bytes, holding.leased_bytes)
        holding.context.moved(holding.leased_bytes)

    def expire(self, now_s: float) -> list[Event]:
        """Time passed: end promises, and decide what has waited long enough. At `now_s` all had been heard that was said before."""
        for number, card in enumerate(self._cards):
            for process in [process for process, until_s in card.promises.items() if now_s >= until_s]:
                self._end_promise(number, process, now_s)
        return self._decide_all(now_s)

    def deadline_s(self) -> float | None:
        """When `expire` has something to do, or None."""
        heads = [card.asks[0] for card in self._cards if card.asks]
        asks_s = [
            ask.until_s if ask.recalled else self._opens_at_s for ask in heads if ask.waits_for or not ask.recalled
        ]
        return min([*asks_s, *(until_s for card in self._cards for until_s in card.promises.values())], default=None)

    def set_limits(self, limits_bytes: Sequence[int], now_s: float) -> list[Event]:
        """The same cards have other limits. What is leased stays leased."""
        for card, limit in zip(self._cards, limits_bytes, strict=True):
            card.limit_bytes = limit
        return self._decide_all(now_s)

    def unleased_bytes(self, card: int) -> int:
        """What no process holds, for allocations or contexts, and is not kept beside a context."""
        of = self._cards[card]
        room_bytes = min(of.room_bytes, of.limit_bytes // ROOM_SHARE)
        return max(0, of.limit_bytes - of.leased_bytes - of.context_bytes - of.shared.charged_bytes - room_bytes)

    def leased_bytes(self, card: int) -> int:
        """What all processes hold together for allocations."""
        return self._cards[card].leased_bytes

    def context_bytes(self, card: int) -> int:
        """What their contexts take together."""
        return self._cards[card].context_bytes

    def shared_bytes(self, card: int) -> int:
        """What some of them have open of memory that no lease pays for."""
        return self._cards[card].shared.charged_bytes

    def used_bytes(self, card: int) -> int:
        """What they last said they use."""
        return sum(holding.used_bytes for holding in self._cards[card].holdings.values())

    def part_of(self, process: int, card: int) -> Part:
        """What one process has of a card."""
        holding = self._cards[card].holdings[process]
        context = holding.context
        return Part(holding.leased_bytes, holding.used_bytes, context.bytes, context.measured_bytes)

    def _holding(self, process: int, card: int) -> Holding:
        if card >= len(self._cards):
            raise BadDocument(f"packet names card {card}: this container has {len(self._cards)}, from 0")
        return self._cards[card].holdings[process]

    def _end_promise(self, card: int, process: int, now_s: float) -> None:
        """It is not kept any longer. What NVML saw of the process stays charged."""
        of = self._cards[card]
        if of.promises.pop(process, None) is not None:
            holding = of.holdings[process]
            seen_bytes = min(holding.context.bytes, holding.context.measured_bytes or 0)
            self._charge(card, holding, seen_bytes, made_bytes=0)
            holding.context.counts_from_s = now_s

    def _heirs_moved(self, card: CardBook) -> None:
        """NVML may count for them now what it counted for somebody else."""
        for process in card.shared.openers():
            card.holdings[process].context.moved(card.holdings[process].leased_bytes)

    def _queue(self, card: int, ask: Ask) -> None:
        queue = self._cards[card].asks
        if any(other.process == ask.process and other.kind == ask.kind for other in queue):
            what = ask.kind
            raise BadDocument(f"{what} of card {card} while an earlier one is not answered: one at a time")
        queue.append(ask)

    def _charge(self, card: int, holding: Holding, context_bytes: int, *, made_bytes: int) -> None:
        self._take_out(self._cards[card], holding)
        holding.context.bytes, holding.made_bytes = context_bytes, made_bytes
        self._put_back(self._cards[card], holding)

    def _take_out(self, card: CardBook, holding: Holding) -> None:
        """Its contexts and their room, out of the sums until `_put_back`."""
        card.context_bytes -= holding.context.bytes
        card.room_bytes -= self._room_of(holding)

    def _put_back(self, card: CardBook, holding: Holding) -> None:
        card.context_bytes += holding.context.bytes
        card.room_bytes += self._room_of(holding)

    def _room_of(self, holding: Holding) -> int:
        if holding.made_bytes == 0 or holding.context.bytes == 0:
            return 0
        return max(0, holding.made_bytes + self._room_bytes - holding.context.bytes)

    def _decide_all(self, now_s: float) -> list[Event]:
        return [event for card in range(len(self._cards)) for event in self._decide(card, now_s)]

    def _decide(self, number: int, now_s: float) -> list[Event]:
        """Answer asks from the head of the queue until one has to wait."""
        card = self._cards[number]
        events: list[Event] = []
        while card.asks and now_s >= self._opens_at_s:
            ask = card.asks[0]
            free_bytes = self.unleased_bytes(number)
            missing_bytes = card.shared.missing_bytes(ask.key, ask.need_bytes)
            full = bool(ask.key) and card.shared.full()
            if missing_bytes <= free_bytes and not full:
                events.append(self._grant(number, ask, free_bytes))
            elif not ask.recalled and not full and (wanted := self._recall(number, ask, missing_bytes - free_bytes)):
                ask.asked_at_s, ask.until_s = now_s, now_s + self._recall_wait_s
                return events + wanted
            elif (ask.waits_for and (now_s < ask.until_s or self._worth_waiting(ask, now_s))) or (
                not full and missing_bytes - free_bytes <= self._promised_bytes(card, ask.process)
            ):
                return events
            else:
                if ask.context:
                    card.holdings[ask.process].context.counts_from_s = now_s
                events.append(Denied(ask.process, number, ask.seq))
            card.asks.popleft()
        return events

    @staticmethod
    def _promised_bytes(card: CardBook, but: int) -> int:
        """To others than that process."""
        return sum(card.holdings[process].context.bytes for process in card.promises if process != but)

    def _grant(self, number: int, ask: Ask, free_bytes: int) -> Granted:
        card = self._cards[number]
        holding = card.holdings[ask.process]
        if ask.key:
            card.shared.open(ask.key, ask.process, ask.need_bytes)
            return Granted(ask.process, number, ask.seq, ask.need_bytes)
        spare_bytes = 0 if ask.recalled else (free_bytes - ask.need_bytes) // SHARE_OF_REST
        granted_bytes = min(ask.want_bytes, ask.need_bytes + spare_bytes)
        if ask.context:
            self._charge(number, holding, holding.context.bytes + granted_bytes, made_bytes=holding.made_bytes)
            return Granted(ask.process, number, ask.seq, holding.context.bytes)
        holding.leased_bytes += granted_bytes
        holding.context.moved(holding.leased_bytes)
        card.leased_bytes += granted_bytes
        return Granted(ask.process, number, ask.seq, granted_bytes)

    def _worth_waiting(self, ask: Ask, now_s: float) -> bool:
        """The short wait is over: is there somebody who will answer?"""
        ask.waits_for = {process for process in ask.waits_for if self._may_answer(process)}
        ask.until_s = min(now_s + self._recall_wait_s, ask.asked_at_s + RECALL_MOST_S)
        return bool(ask.waits_for) and now_s < ask.until_s

    def _recall(self, number: int, ask: Ask, missing_bytes: int) -> list[Event]:
        """Ask every sibling that holds something. One that still owes an answer is not waited for again."""
        card = self._cards[number]
        ask.recalled = True
        events: list[Event] = []
        if missing_bytes + self.unleased_bytes(number) > card.limit_bytes:
            return events
        for process, holding in card.holdings.items():
            if process == ask.process or holding.leased_bytes == 0 or holding.recall:
                continue
            self._recalls = self._recalls % 0x7FFFFFFF + 1
            holding.recall = RECALLS | self._recalls
            ask.waits_for.add(process)
            events.append(Wanted(process, number, holding.recall, missing_bytes))
        return events
