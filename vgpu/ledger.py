"""Who of a container's processes holds how much of its limit.

One ledger serves one grant: its cards, the processes connected to it (named by any number), and what each has leased. It is
pure: calls bring what happened and the time, and return what is to be told to whom. Nothing is ever leased beyond the limit;
only a process that re-states what it already holds, after the arbiter came back, can bring the sum above it, and then nothing
more is leased until it is below again.

An ask that does not fit is held while the other processes are asked to return what they do not use. All of them are asked at
once, each for all that is missing: what comes back too much is unused anyway, and one round is all that a waiting allocation
can afford. Asks for one card are decided in the order they came.

Units: bytes; time in seconds of any one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from vgpu.errors import BadDocument

RECALL_WAIT_S: Final = 0.05
"""How long an ask waits for its siblings. Specified: an allocation may not hang on a process that is stopped."""
SHARE_OF_REST: Final = 4
"""Beyond its need an ask gets at most this part of what is left, so that chunks shrink near the limit. Guessed."""


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


@dataclass(slots=True)
class _Holding:
    leased_bytes: int = 0
    used_bytes: int = 0
    asked: bool = False
    recall: int = 0
    """Number of the recall it has not answered; 0 = none."""


@dataclass(slots=True)
class _Ask:
    process: int
    seq: int
    need_bytes: int
    want_bytes: int
    recalled: bool = False
    until_s: float = 0.0
    waits_for: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Card:
    limit_bytes: int
    holdings: dict[int, _Holding] = field(default_factory=dict)
    asks: deque[_Ask] = field(default_factory=deque)
    leased_bytes: int = 0


class Ledger:
    """Leases of one grant. `opens_at_s`: until then asks are held, so that processes can re-state what they hold."""

    def __init__(
        self, limits_bytes: Sequence[int], opens_at_s: float = 0.0, recall_wait_s: float = RECALL_WAIT_S
    ) -> None:
        self._cards = [_Card(limit) for limit in limits_bytes]
        self._opens_at_s = opens_at_s
        self._recall_wait_s = recall_wait_s
        self._recalls = 0

    def join(self, process: int) -> None:
        """A process connected. It holds nothing."""
        for card in self._cards:
            card.holdings[process] = _Holding()

    def leave(self, process: int, now_s: float) -> list[Event]:
        """A process hung up: all it leased is free again."""
        events: list[Event] = []
        for number, card in enumerate(self._cards):
            holding = card.holdings.pop(process, None)
            if holding is None:
                continue
            card.leased_bytes -= holding.leased_bytes
            card.asks = deque(ask for ask in card.asks if ask.process != process)
            for ask in card.asks:
                ask.waits_for.discard(process)
            events += self._decide(number, now_s)
        return events

    def ask(self, process: int, card: int, seq: int, need_bytes: int, want_bytes: int, now_s: float) -> list[Event]:
        """A process asks for at least `need_bytes`, at best `want_bytes`. Raises BadDocument."""
        holding = self._holding(process, card)
        queue = self._cards[card].asks
        if any(ask.process == process for ask in queue):
            raise BadDocument(f"LEASE of card {card} while an earlier one is not answered: one at a time")
        holding.asked = True
        queue.append(_Ask(process, seq, need_bytes, max(need_bytes, want_bytes)))
        return self._decide(card, now_s)

    def give_back(self, process: int, card: int, amount_bytes: int, seq: int, now_s: float) -> list[Event]:
        """A process returns a part of its lease, or answers the recall `seq`. Raises BadDocument."""
        holding = self._holding(process, card)
        if amount_bytes > holding.leased_bytes:
            raise BadDocument(f"RETURN of {amount_bytes} bytes of card {card}: 0 to {holding.leased_bytes} are leased")
        holding.leased_bytes -= amount_bytes
        self._cards[card].leased_bytes -= amount_bytes
        if holding.recall and seq == holding.recall:
            holding.recall = 0
            for ask in self._cards[card].asks:
                ask.waits_for.discard(process)
        return self._decide(card, now_s)

    def state(self, process: int, card: int, used_bytes: int, leased_bytes: int) -> None:
        """A process says what it uses; before its first ask, also what it leased from an earlier arbiter. Raises BadDocument."""
        holding = self._holding(process, card)
        if not holding.asked:
            self._cards[card].leased_bytes += leased_bytes - holding.leased_bytes
            holding.leased_bytes = leased_bytes
        holding.used_bytes = min(used_bytes, holding.leased_bytes)

    def expire(self, now_s: float) -> list[Event]:
        """Time passed: decide what has waited long enough."""
        return [event for card in range(len(self._cards)) for event in self._decide(card, now_s)]

    def deadline_s(self) -> float | None:
        """When `expire` has something to do, or None."""
        heads = [card.asks[0] for card in self._cards if card.asks]
        return min((ask.until_s if ask.recalled else self._opens_at_s for ask in heads), default=None)

    def set_limits(self, limits_bytes: Sequence[int], now_s: float) -> list[Event]:
        """The same cards have other limits. What is leased stays leased."""
        for card, limit in zip(self._cards, limits_bytes, strict=True):
            card.limit_bytes = limit
        return self.expire(now_s)

    def unleased_bytes(self, card: int) -> int:
        """What no process holds."""
        return max(0, self._cards[card].limit_bytes - self._cards[card].leased_bytes)

    def leased_bytes(self, card: int) -> int:
        """What all processes hold together."""
        return self._cards[card].leased_bytes

    def used_bytes(self, card: int) -> int:
        """What they last said they use."""
        return sum(holding.used_bytes for holding in self._cards[card].holdings.values())

    def used_by(self, process: int, card: int) -> int:
        """What one process last said it uses."""
        return self._cards[card].holdings[process].used_bytes

    def _holding(self, process: int, card: int) -> _Holding:
        if card >= len(self._cards):
            raise BadDocument(f"packet names card {card}: this container has {len(self._cards)}, from 0")
        return self._cards[card].holdings[process]

    def _decide(self, number: int, now_s: float) -> list[Event]:
        """Answer asks from the head of the queue until one has to wait."""
        card = self._cards[number]
        events: list[Event] = []
        while card.asks and now_s >= self._opens_at_s:
            ask = card.asks[0]
            free_bytes = self.unleased_bytes(number)
            if ask.need_bytes <= free_bytes:
                events.append(self._grant(number, ask, free_bytes))
            elif not ask.recalled and (wanted := self._recall(number, ask, ask.need_bytes - free_bytes)):
                ask.until_s = now_s + self._recall_wait_s
                return events + wanted
            elif ask.waits_for and now_s < ask.until_s:
                return events
            else:
                events.append(Denied(ask.process, number, ask.seq))
            card.asks.popleft()
        return events

    def _grant(self, number: int, ask: _Ask, free_bytes: int) -> Granted:
        spare_bytes = 0 if ask.recalled else (free_bytes - ask.need_bytes) // SHARE_OF_REST
        granted_bytes = min(ask.want_bytes, ask.need_bytes + spare_bytes)
        card = self._cards[number]
        card.holdings[ask.process].leased_bytes += granted_bytes
        card.leased_bytes += granted_bytes
        return Granted(ask.process, number, ask.seq, granted_bytes)

    def _recall(self, number: int, ask: _Ask, missing_bytes: int) -> list[Event]:
        """Ask every sibling that holds something. One that still owes an answer is not waited for again."""
        card = self._cards[number]
        ask.recalled = True
        events: list[Event] = []
        if ask.need_bytes > card.limit_bytes:
            return events
        for process, holding in card.holdings.items():
            if process == ask.process or holding.leased_bytes == 0 or holding.recall:
                continue
            self._recalls = self._recalls % 0x7FFFFFFF + 1
            holding.recall = 0x80000000 | self._recalls
            ask.waits_for.add(process)
            events.append(Wanted(process, number, holding.recall, missing_bytes))
        return events
