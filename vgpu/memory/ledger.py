"""How much of its container's limit each process has leased.

One ledger serves one grant: its GPUs, the processes connected to it (named by any number), and what each has leased. It is
pure: calls bring what happened and the time, and return the messages to its processes. Nothing is ever leased beyond the limit.
Three things can bring the sum above it, and then nothing more is leased until it is below again: what a process re-states after
the arbiter came back, contexts that grow (`context`), and what processes hold that never connected. Nobody can refuse those.

A request that does not fit waits while the arbiter recalls from the other processes what they do not use. All are recalled from at
once, each for all that is missing: what comes back too much is unused anyway, and one round is all that a waiting allocation
can afford. requests one GPU are decided in the order they came. A sibling that could answer and has not (the machine is busy)
is waited for longer than one that cannot: stopped or dead.

A process that has just initialised the driver is promised what a context takes, if it is free: its BEGIN is granted then, whatever
happened since, so it need not wait for the answer. A promise is no use, and ends by itself. A request that would fit but for promises waits until
they end or are redeemed. Nothing is promised while anybody waits, so that wait is bounded.

Memory that processes share is charged once, whichever ends first (`vgpu/memory/shared.py`). What a GPU has left is `vgpu/memory/accounts.py`'s.

Units: bytes; time in seconds of any one clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from vgpu.api.errors import BadDocument
from vgpu.memory.accounts import GpuAccounts
from vgpu.memory.context import ContextMeasure
from vgpu.memory.records import Denied, Event, Granted, Holding, LeaseRequest, Part, Promise, Wanted

RECALLS: Final = 0x80000000
"""The bit of a sequence number that says it is a recall's. Specified: protocol.md."""
RECALL_WAIT_S: Final = 0.05
"""How long a request waits for its siblings. Specified: an allocation may not hang on a process that is stopped."""
RECALL_MOST_S: Final = 0.5
"""And for those that are alive and not stopped. Specified; a busy machine schedules every process within it."""
STATED_MOST: Final = 2**50
"""A PiB, which no GPU has: sums of what processes state stay within 64 bits."""
PROMISE_S: Final = 1.0
"""How long a promise is kept. Specified: a library relies on half of it (docs/reference/protocol.md)."""
SHARE_OF_REST: Final = 4
"""Beyond its need a request gets at most this part of what is left, so that chunks shrink near the limit. Guessed."""


def _nobody(_: int) -> bool:
    return False


class Ledger:
    """Leases of one grant.

    `opens_at_s`: until then requests wait, so that processes can re-state what they have.
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
        self._gpus = [GpuAccounts(limit, room_bytes) for limit in limits_bytes]
        self._opens_at_s = opens_at_s
        self._recall_wait_s = recall_wait_s
        self._may_answer = may_answer
        self._recalls = 0
        self._exact: set[int] = set()
        """Processes that are never sent a recall."""

    def join(self, process: int) -> None:
        """A process connected. It has nothing."""
        for gpu in self._gpus:
            gpu.holdings[process] = Holding()

    def leases_exactly(self, process: int, now_s: float, *, exact: bool) -> list[Event]:
        """A process leases no more than it uses and could not answer a recall: it is sent none. One that it owes is not waited for."""
        if not exact:
            self._exact.discard(process)
            return []
        self._exact.add(process)
        for gpu in self._gpus:
            gpu.holdings[process].recall = 0
            for request in gpu.requests:
                request.waits_for.discard(process)
        return self._decide_all(now_s)

    def silent_s(self, process: int, now_s: float) -> float | None:
        """How long a process with a lease has owed the answer to a recall; None = it owes none."""
        holdings = (gpu.holdings[process] for gpu in self._gpus)
        return max((now_s - one.recalled_at_s for one in holdings if one.recall and one.leased_bytes), default=None)

    def leave(self, process: int, now_s: float) -> list[Event]:
        """A process hung up: all it leased is free again."""
        self._exact.discard(process)
        events: list[Event] = []
        for number, gpu in enumerate(self._gpus):
            if not gpu.lose(process):
                continue
            gpu.requests = deque(request for request in gpu.requests if request.process != process)
            for request in gpu.requests:
                request.waits_for.discard(process)
            events += self._decide(number, now_s)
        return events

    def request(self, process: int, gpu: int, seq: int, need_bytes: int, want_bytes: int, now_s: float) -> list[Event]:
        """A process requests at least `need_bytes`, at best `want_bytes`. Raises BadDocument."""
        holding = self._holding(process, gpu)
        holding.known = True
        self._queue(gpu, LeaseRequest(process, seq, need_bytes, max(need_bytes, want_bytes)))
        return self._decide(gpu, now_s)

    def promise(self, process: int, gpu: int, context_bytes: int, now_s: float) -> int:
        """A process that has requested nothing may make a context soon, which takes so much: keep that for PROMISE_S, if it is free and
        no request waits. What is kept."""
        of = self._gpus[gpu]
        busy = bool(of.requests) or of.holdings[process].known or now_s < self._opens_at_s
        if busy or context_bytes == 0 or of.free_bytes < context_bytes:
            return 0
        of.promises[process] = Promise(context_bytes, now_s + PROMISE_S)
        return context_bytes

    def begin_context(self, process: int, gpu: int, seq: int, estimate_bytes: int, now_s: float) -> list[Event]:
        """A process is about to make its first context on a GPU, which may take `estimate_bytes`. Raises BadDocument."""
        holding = self._holding(process, gpu)
        context = holding.context
        holding.known = holding.begun = True
        context.counts_from_s = inf
        if (promise := self._gpus[gpu].promises.pop(process, None)) is not None:
            self._gpus[gpu].charge(holding, max(promise.bytes, context.bytes), made_bytes=estimate_bytes)
            return [Granted(process, gpu, seq, context.bytes), *self._decide(gpu, now_s)]
        need_bytes = max(0, estimate_bytes - context.bytes)
        self._queue(gpu, LeaseRequest(process, seq, need_bytes, need_bytes, context=True))
        self._gpus[gpu].charge(holding, context.bytes, made_bytes=estimate_bytes)
        return self._decide(gpu, now_s)

    def end_context(self, process: int, gpu: int, now_s: float, *, made: bool = True) -> None:
        """Its contexts are made, or gone: readings from now on count. Raises BadDocument."""
        holding = self._holding(process, gpu)
        holding.context.counts_from_s = now_s
        if not made:
            self._gpus[gpu].charge(holding, holding.context.bytes, made_bytes=0)

    def bound_context(self, process: int, gpu: int, seq: int, bound_bytes: int, now_s: float) -> list[Event]:
        """A process is about to make calls that may make its contexts grow by so much. The room beside them pays first.
        Raises BadDocument."""
        holding = self._holding(process, gpu)
        holding.known = True
        of = self._gpus[gpu]
        if of.has_room(holding, bound_bytes) and now_s >= self._opens_at_s:
            of.bound(holding, bound_bytes)
            return [Granted(process, gpu, seq, bound_bytes)]
        self._queue(gpu, LeaseRequest(process, seq, bound_bytes, bound_bytes, bound=True))
        return self._decide(gpu, now_s)

    def settle_bound(self, process: int, gpu: int, now_s: float) -> None:
        """Those calls are made: readings from now on know what they took. Raises BadDocument."""
        self._holding(process, gpu).context.settles_from_s = now_s

    def restate_context(self, process: int, gpu: int, context_bytes: int) -> None:
        """A process that came back says what its contexts take; it stands while no reading contradicts it. Raises BadDocument."""
        holding = self._holding(process, gpu)
        if not holding.begun:
            measured_bytes = holding.context.measured_bytes
            most_bytes = self._gpus[gpu].limit_bytes if measured_bytes is None else measured_bytes
            stated_bytes = max(holding.context.bytes, min(context_bytes, most_bytes))
            self._gpus[gpu].charge(holding, stated_bytes, made_bytes=stated_bytes)

    def measure(
        self, process: int, gpu: int, measured_bytes: int, at_s: float, now_s: float, *, exact: bool = False
    ) -> list[Event]:
        """NVML counted so much for a process at `at_s`. `exact`: it can have allocated nothing meanwhile."""
        holding = self._gpus[gpu].holdings[process]
        context = holding.context
        before_bytes = context.bytes
        self._gpus[gpu].take_out(holding)
        opened_bytes, orphaned_bytes = self._gpus[gpu].shared.opened_bytes(process)
        context.read(
            measured_bytes, holding.used_bytes - holding.managed_bytes, holding.leased_bytes, at_s,
            exact=exact, opened_bytes=opened_bytes, orphaned_bytes=orphaned_bytes, made_bytes=holding.made_bytes,
        )  # fmt: skip
        if exact and holding.made_bytes == 0:
            holding.made_bytes = context.bytes
        elif 0 < measured_bytes < holding.made_bytes and at_s >= context.counts_from_s:
            holding.made_bytes = measured_bytes  # others' took more: that was an estimate
        self._gpus[gpu].put_back(holding)
        return self._decide(gpu, now_s) if context.bytes < before_bytes else []

    def give_back(self, process: int, gpu: int, amount_bytes: int, seq: int, now_s: float) -> list[Event]:
        """A process returns a part of its lease, or answers the recall `seq`. Raises BadDocument."""
        holding = self._holding(process, gpu)
        if amount_bytes > holding.leased_bytes:
            raise BadDocument(f"RETURN of {amount_bytes} bytes of GPU {gpu}: 0 to {holding.leased_bytes} are leased")
        self._gpus[gpu].shrink(holding, amount_bytes)
        if holding.recall and seq == holding.recall:
            holding.recall = 0
            for request in self._gpus[gpu].requests:
                request.waits_for.discard(process)
        return self._decide(gpu, now_s)

    def make(self, process: int, gpu: int, key: bytes, amount_bytes: int) -> None:
        """A process gives others a name for memory that its lease pays for. What its lease cannot pay for is not noted, nor is
        one key too many: then the process that opens it pays. Raises BadDocument."""
        holding = self._holding(process, gpu)
        holding.known = True
        shared = self._gpus[gpu].shared
        if shared.made_bytes(process, without=key) + amount_bytes <= holding.leased_bytes and not shared.full():
            shared.make(key, process, amount_bytes)

    def hold(self, process: int, gpu: int, seq: int, key: bytes, amount_bytes: int, now_s: float) -> list[Event]:
        """A process opened memory of which it got the name. It is charged once, if no process pays for it. Raises BadDocument."""
        self._holding(process, gpu).known = True
        self._queue(gpu, LeaseRequest(process, seq, amount_bytes, amount_bytes, key=key))
        return self._decide(gpu, now_s)

    def restate_hold(self, process: int, gpu: int, key: bytes, amount_bytes: int) -> None:
        """A process that came back says what it has open: that cannot be refused. Raises BadDocument."""
        self._holding(process, gpu).known = True
        shared = self._gpus[gpu].shared
        if shared.full():
            raise BadDocument(f"HOLD of one more key of GPU {gpu}: a container has at most {shared.entries_limit}")
        shared.open(key, process, min(amount_bytes, STATED_MOST))

    def drop(self, process: int, gpu: int, key: bytes, back_bytes: int, now_s: float, *, made: bool) -> list[Event]:
        """A process has memory that it made, or opened, no more. `back_bytes` of its lease, which paid for it, end with that, and
        go to the key if others have it open. Raises BadDocument."""
        holding = self._holding(process, gpu)
        of = self._gpus[gpu]
        if back_bytes > holding.leased_bytes:
            raise BadDocument(f"DROP of {back_bytes} bytes of GPU {gpu}: 0 to {holding.leased_bytes} are leased")
        of.shrink(holding, back_bytes)
        of.shared.let_go(key, process, made=made, opened=not made)
        of.heirs_moved()
        return self._decide(gpu, now_s)

    def state(self, process: int, gpu: int, used_bytes: int, leased_bytes: int, managed_bytes: int = 0) -> None:
        """A process says what it uses, in all and of managed memory; the first time, before it requested anything, also what it leased from
        an earlier arbiter. Raises BadDocument."""
        holding = self._holding(process, gpu)
        if leased_bytes > STATED_MOST:
            raise BadDocument(f"USAGE of {leased_bytes} bytes leased of GPU {gpu}: at most {STATED_MOST}")
        if not holding.known:
            holding.known = True
            self._gpus[gpu].leased_bytes += leased_bytes - holding.leased_bytes
            holding.leased_bytes = leased_bytes
            # a reading before this took its allocations for contexts
            self._gpus[gpu].charge(holding, 0, made_bytes=holding.made_bytes)
            holding.context = ContextMeasure()
        holding.used_bytes = min(used_bytes, holding.leased_bytes)
        holding.managed_bytes = min(managed_bytes, holding.used_bytes)
        holding.context.moved(holding.leased_bytes)

    def expire(self, now_s: float) -> list[Event]:
        """Time passed: end promises, and decide what has waited long enough. A BEGIN that was sent before `now_s` has been read."""
        for gpu in self._gpus:
            gpu.promises = {process: promise for process, promise in gpu.promises.items() if now_s < promise.until_s}
        return self._decide_all(now_s)

    def deadline_s(self) -> float | None:
        """When `expire` has something to do, or None."""
        requests_s = [self._due_s(gpu.requests[0]) for gpu in self._gpus if gpu.requests]
        promises_s = [promise.until_s for gpu in self._gpus for promise in gpu.promises.values()]
        return min(requests_s + promises_s, default=None)

    def set_limits(self, limits_bytes: Sequence[int], now_s: float) -> list[Event]:
        """The same GPUs have other limits. What is leased stays leased."""
        for gpu, limit in zip(self._gpus, limits_bytes, strict=True):
            gpu.limit_bytes = limit
        return self._decide_all(now_s)

    def charge_unconnected(self, gpu: int, amount_bytes: int, now_s: float) -> list[Event]:
        """Processes of the container that are not connected have so much, as NVML counts it: that cannot be refused."""
        of = self._gpus[gpu]
        fell, of.unconnected_bytes = amount_bytes < of.unconnected_bytes, amount_bytes
        return self._decide(gpu, now_s) if fell else []

    def unleased_bytes(self, gpu: int) -> int:
        """What no process has leased, for allocations or contexts, and is not kept beside a context."""
        return self._gpus[gpu].unleased_bytes

    def leased_bytes(self, gpu: int) -> int:
        """What all processes hold together for allocations."""
        return self._gpus[gpu].leased_bytes

    def context_bytes(self, gpu: int) -> int:
        """What their contexts take together."""
        return self._gpus[gpu].context_bytes

    def shared_bytes(self, gpu: int) -> int:
        """What some of them have open of memory that no lease pays for."""
        return self._gpus[gpu].shared.charged_bytes

    def used_bytes(self, gpu: int) -> int:
        """What they last said they use."""
        return sum(holding.used_bytes for holding in self._gpus[gpu].holdings.values())

    def part_of(self, process: int, gpu: int) -> Part:
        """What one process has of a GPU."""
        return self._gpus[gpu].holdings[process].part

    def _holding(self, process: int, gpu: int) -> Holding:
        if gpu >= len(self._gpus):
            raise BadDocument(f"packet names GPU {gpu}: this container has {len(self._gpus)}, from 0")
        return self._gpus[gpu].holdings[process]

    def _queue(self, gpu: int, request: LeaseRequest) -> None:
        """A process that requests gives up what it was promised."""
        queue = self._gpus[gpu].requests
        if any(other.process == request.process and other.kind == request.kind for other in queue):
            what = request.kind
            raise BadDocument(f"{what} of GPU {gpu} while an earlier one is not answered: one at a time")
        self._gpus[gpu].promises.pop(request.process, None)
        queue.append(request)

    def _decide_all(self, now_s: float) -> list[Event]:
        return [event for gpu in range(len(self._gpus)) for event in self._decide(gpu, now_s)]

    def _decide(self, number: int, now_s: float) -> list[Event]:
        """Answer requests from the head of the queue until one has to wait."""
        gpu = self._gpus[number]
        events: list[Event] = []
        while gpu.requests and now_s >= self._opens_at_s:
            request = gpu.requests[0]
            free_bytes = gpu.free_bytes
            missing_bytes = gpu.shared.missing_bytes(request.key, request.need_bytes)
            full = bool(request.key) and gpu.shared.full()
            if missing_bytes <= free_bytes and not full:
                events.append(self._grant(number, request, free_bytes))
            elif (
                not request.recalled
                and not full
                and (wanted := self._recall(number, request, missing_bytes - free_bytes, now_s))
            ):
                request.requested_at_s, request.until_s = now_s, now_s + self._recall_wait_s
                return events + wanted
            elif request.waits_for and (now_s < request.until_s or self._worth_waiting(request, now_s)):
                return events
            elif gpu.promises and missing_bytes <= gpu.unleased_bytes and not full:
                request.waits_for.clear()
                return events
            else:
                if request.context:
                    gpu.holdings[request.process].context.counts_from_s = now_s
                events.append(Denied(request.process, number, request.seq))
            gpu.requests.popleft()
        return events

    def _due_s(self, head: LeaseRequest) -> float:
        """When the first request of a GPU is decided if nothing happens. One that waits for promises alone: when they end."""
        if not head.recalled:
            return self._opens_at_s
        return head.until_s if head.waits_for else inf

    def _grant(self, number: int, request: LeaseRequest, free_bytes: int) -> Granted:
        gpu = self._gpus[number]
        holding = gpu.holdings[request.process]
        if request.key:
            gpu.shared.open(request.key, request.process, request.need_bytes)
            return Granted(request.process, number, request.seq, request.need_bytes)
        if request.bound:
            gpu.bound(holding, request.need_bytes)
            return Granted(request.process, number, request.seq, request.need_bytes)
        spare_bytes = 0 if request.recalled else (free_bytes - request.need_bytes) // SHARE_OF_REST
        granted_bytes = min(request.want_bytes, request.need_bytes + spare_bytes)
        if request.context:
            gpu.charge(holding, holding.context.bytes + granted_bytes, made_bytes=holding.made_bytes)
            return Granted(request.process, number, request.seq, holding.context.bytes)
        holding.leased_bytes += granted_bytes
        holding.context.moved(holding.leased_bytes)
        gpu.leased_bytes += granted_bytes
        return Granted(request.process, number, request.seq, granted_bytes)

    def _worth_waiting(self, request: LeaseRequest, now_s: float) -> bool:
        """The short wait is over: is there a process that will answer?"""
        request.waits_for = {process for process in request.waits_for if self._may_answer(process)}
        request.until_s = min(now_s + self._recall_wait_s, request.requested_at_s + RECALL_MOST_S)
        return bool(request.waits_for) and now_s < request.until_s

    def _recall(self, number: int, request: LeaseRequest, missing_bytes: int, now_s: float) -> list[Event]:
        """Recall from every sibling that has something. One that still owes an answer is not waited for again."""
        gpu = self._gpus[number]
        request.recalled = True
        events: list[Event] = []
        if missing_bytes + gpu.free_bytes > gpu.limit_bytes:
            return events
        for process, holding in gpu.holdings.items():
            if process == request.process or holding.leased_bytes == 0 or holding.recall or process in self._exact:
                continue
            self._recalls = self._recalls % 0x7FFFFFFF + 1
            holding.recall, holding.recalled_at_s = RECALLS | self._recalls, now_s
            request.waits_for.add(process)
            events.append(Wanted(process, number, holding.recall, missing_bytes))
        return events
