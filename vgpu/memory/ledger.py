"""How much of its container's limit each process has leased.

One ledger serves one grant: its GPUs, the processes connected to it (identified by any number), and the lease of each. It is
pure: calls pass an event and the time, and return the messages to its processes. The ledger never leases more than the limit.
Three things can raise the sum above the limit, because they cannot be refused: statements of processes after a restart of the
arbiter, contexts that grow (`context`), and memory of processes that never connected. Until the sum is below the limit again, nothing is leased.

A request that does not fit waits while the arbiter recalls unused memory from the other processes (`vgpu/memory/recalls.py`). Requests for one GPU are
decided in the order of arrival.

A process that has just initialised the driver gets a promise for the size of a context, if that is free: its BEGIN is granted then, whatever
happened since, so it need not wait for the answer. A promise does not count as used memory, and expires. A request that would fit without the promises
waits until they expire or are redeemed. Nothing is promised while a request waits, so that wait is bounded.

Memory that processes share is charged once, whichever process ends first (`vgpu/memory/shared.py`). `vgpu/memory/accounts.py` has the free memory of a GPU.
What fits into the container's limits must also be free on the GPU, where containers may burst (`vgpu/memory/node_requests.py`, `vgpu/memory/ceiling.py`).
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
from vgpu.memory.node_requests import NodeRequests
from vgpu.memory.recalls import RECALL_WAIT_S, Recalls
from vgpu.memory.records import Denied, Event, Granted, LeaseRequest, NodeAnswer, NodeRoom, Part, ProcessRecord, Promise

STATED_MOST: Final = 2**50
"""A PiB, which no GPU has: sums of stated sizes stay within 64 bits."""
PROMISE_S: Final = 1.0
"""How long a promise is valid. Specified: a library relies on half of it (docs/reference/protocol.md)."""


class Ledger:
    """Leases of one grant.

    `opens_at_s`: until then requests wait, so that processes can re-state their leases.
    `room_bytes`: reserved beside each context for code that it loads later.
    `may_answer`: whether a process is alive and not stopped. Called for siblings that owe an answer.
    `node`: decides whether the GPUs have the memory; None = the sum of all limits fits on each of them.
    """

    def __init__(
        self,
        limits_bytes: Sequence[int],
        opens_at_s: float = 0.0,
        recall_wait_s: float = RECALL_WAIT_S,
        may_answer: Callable[[int], bool] = lambda _: False,
        room_bytes: int = 0,
        node: NodeRoom | None = None,
    ) -> None:
        self._gpus = [GpuAccounts(limit, room_bytes) for limit in limits_bytes]
        self._node = NodeRequests(self._gpus, node, opens_at_s)
        self._opens_at_s = opens_at_s
        self._recalls = Recalls(self._gpus, may_answer, recall_wait_s)

    def join(self, process: int) -> None:
        """A process connected. It has no lease."""
        for gpu in self._gpus:
            gpu.records[process] = ProcessRecord()

    def leases_exactly(self, process: int, now_s: float, *, exact: bool) -> list[Event]:
        """A process leases no more than it uses and could not answer a recall: the ledger sends it none, and waits for no answer that it owes."""
        if not exact:
            self._recalls.exact.discard(process)
            return []
        self._recalls.exact.add(process)
        for gpu in range(len(self._gpus)):
            self._recalls.answered(gpu, process)
        return self._decide_all(now_s)

    def silent_s(self, process: int, now_s: float) -> float | None:
        """How long a process with a lease has owed the answer to a recall; None = it owes none."""
        records = (gpu.records[process] for gpu in self._gpus)
        return max((now_s - one.recalled_at_s for one in records if one.recall and one.leased_bytes), default=None)

    def leave(self, process: int, now_s: float) -> list[Event]:
        """A process disconnected: all its leases are free again."""
        self._recalls.exact.discard(process)
        events: list[Event] = []
        for number, gpu in enumerate(self._gpus):
            if not gpu.lose(process):
                continue
            gpu.requests = deque(request for request in gpu.requests if request.process != process)
            self._node.withdraw(number, process)
            for request in gpu.requests:
                request.waits_for.discard(process)
            events += self._decide(number, now_s)
        return events

    def request(
        self, process: int, gpu: int, seq: int, need_bytes: int, want_bytes: int, now_s: float, *, elastic: bool = False, waited_s: float = 0.0,
    ) -> list[Event]:  # fmt: skip
        """A process requests at least `need_bytes`, at best `want_bytes`, and has waited for `waited_s` before. Raises BadDocument."""
        self._record(process, gpu).known = True
        wanted = LeaseRequest(process, seq, need_bytes, max(need_bytes, want_bytes), elastic=elastic, waited_s=waited_s)
        self._gpus[gpu].queue(gpu, wanted)
        return self._decide(gpu, now_s)

    def promise(self, process: int, gpu: int, context_bytes: int, now_s: float) -> int:
        """A process without a request may make a context of `context_bytes` soon: reserve that for PROMISE_S, if it is free and no request waits.
        Returns the reserved bytes."""
        of = self._gpus[gpu]
        busy = bool(of.requests) or of.records[process].known or now_s < self._opens_at_s
        if busy or context_bytes == 0 or of.free_bytes < context_bytes or self._node.decides(gpu):
            return 0
        of.promises[process] = Promise(context_bytes, now_s + PROMISE_S)
        return context_bytes

    def begin_context(self, process: int, gpu: int, seq: int, estimate_bytes: int, now_s: float) -> list[Event]:
        """A process is about to make its first context on a GPU, which may use `estimate_bytes`. Raises BadDocument."""
        record = self._record(process, gpu)
        context = record.context
        record.known = record.begun = True
        context.counts_from_s = inf
        if (promise := self._gpus[gpu].promises.pop(process, None)) is not None:
            self._gpus[gpu].charge(record, max(promise.bytes, context.bytes), made_bytes=estimate_bytes)
            return [Granted(process, gpu, seq, context.bytes), *self._decide(gpu, now_s)]
        need_bytes = max(0, estimate_bytes - context.bytes)
        self._gpus[gpu].queue(gpu, LeaseRequest(process, seq, need_bytes, need_bytes, context=True))
        self._gpus[gpu].charge(record, context.bytes, made_bytes=estimate_bytes)
        return self._decide(gpu, now_s)

    def end_context(self, process: int, gpu: int, now_s: float, *, made: bool = True) -> None:
        """Its contexts are made, or destroyed: readings from now on count. Raises BadDocument."""
        record = self._record(process, gpu)
        record.context.counts_from_s = now_s
        if not made:
            self._gpus[gpu].charge(record, record.context.bytes, made_bytes=0)

    def bound_context(self, process: int, gpu: int, seq: int, bound_bytes: int, now_s: float) -> list[Event]:
        """A process is about to make calls that may make its contexts grow by `bound_bytes`. The context room is used first.
        Raises BadDocument."""
        record = self._record(process, gpu)
        record.known = True
        of = self._gpus[gpu]
        if of.has_room(record, bound_bytes) and now_s >= self._opens_at_s and not self._node.decides(gpu):
            of.bound(record, bound_bytes)
            return [Granted(process, gpu, seq, bound_bytes)]
        self._gpus[gpu].queue(gpu, LeaseRequest(process, seq, bound_bytes, bound_bytes, bound=True))
        return self._decide(gpu, now_s)

    def settle_bound(self, process: int, gpu: int, now_s: float, unneeded_bytes: int = 0) -> list[Event]:
        """Those calls have returned: readings from now on include their memory. For `unneeded_bytes` of the bound there was no call. Raises BadDocument."""
        record = self._record(process, gpu)
        record.context.settles_from_s = now_s
        self._gpus[gpu].unbound(record, unneeded_bytes)
        return self._decide(gpu, now_s) if unneeded_bytes else []

    def restate_context(self, process: int, gpu: int, context_bytes: int) -> None:
        """A process that reconnected states the size of its contexts, which counts until a reading contradicts it. Raises BadDocument."""
        record = self._record(process, gpu)
        if not record.begun:
            measured_bytes = record.context.measured_bytes
            most_bytes = self._gpus[gpu].limit_bytes if measured_bytes is None else measured_bytes
            stated_bytes = max(record.context.bytes, min(context_bytes, most_bytes))
            self._gpus[gpu].charge(record, stated_bytes, made_bytes=stated_bytes)

    def measure(
        self,
        process: int,
        gpu: int,
        measured_bytes: int,
        at_s: float,
        now_s: float,
        *,
        exact: bool = False,
        away_bytes: int = 0,
    ) -> list[Event]:
        """NVML counted `measured_bytes` for a process at `at_s`, beside `away_bytes` of its lease that are in host memory. `exact`: the process cannot have
        allocated anything meanwhile."""
        record = self._gpus[gpu].records[process]
        before_bytes = record.context.bytes
        self._gpus[gpu].measure(process, measured_bytes, away_bytes, at_s, exact=exact)
        return self._decide(gpu, now_s) if record.context.bytes < before_bytes else []

    def give_back(
        self, process: int, gpu: int, amount_bytes: int, seq: int, now_s: float, *, elastic: bool = False
    ) -> list[Event]:
        """A process returns a part of its resident or elastic lease, or answers the recall `seq`. Raises BadDocument."""
        record = self._record(process, gpu)
        if amount_bytes > record.leased_bytes:
            raise BadDocument(f"RETURN of {amount_bytes} bytes of GPU {gpu}: 0 to {record.leased_bytes} are leased")
        self._gpus[gpu].shrink(record, amount_bytes, elastic=elastic)
        if record.recall and seq == record.recall:
            self._recalls.answered(gpu, process)
        return self._decide(gpu, now_s)

    def convert(self, process: int, gpu: int, seq: int, amount_bytes: int) -> Granted | Denied:
        """A part of its elastic lease is to become resident. Decided at once: nothing is recalled for it. Raises BadDocument."""
        record = self._record(process, gpu)
        converted = self._gpus[gpu].convert(record, amount_bytes)
        return Granted(process, gpu, seq, amount_bytes) if converted else Denied(process, gpu, seq)

    def states_elastic(self, process: int, gpu: int, elastic_bytes: int, now_s: float) -> list[Event]:
        """A process has so much elastic memory. After a restart of the arbiter that is the first that is known of the kinds of its lease: so much of it is
        elastic, and no longer counts as resident. Never more than it stated of its lease."""
        sorted_bytes = self._gpus[gpu].sort(self._record(process, gpu), elastic_bytes)
        return self._decide(gpu, now_s) if sorted_bytes else []

    def maker(self, gpu: int, key: bytes) -> int | None:
        """The process that shared the memory of this key first; None if there is none."""
        return self._gpus[gpu].shared.maker(key)

    def make(self, process: int, gpu: int, key: bytes, amount_bytes: int) -> None:
        """A process shares memory of its lease with others by a key. Memory beyond its lease is not recorded, nor are keys
        beyond the limit: then the process that opens it pays. Raises BadDocument."""
        record = self._record(process, gpu)
        record.known = True
        shared = self._gpus[gpu].shared
        if shared.made_bytes(process, without=key) + amount_bytes <= record.leased_bytes and not shared.full():
            shared.make(key, process, amount_bytes)

    def hold(self, process: int, gpu: int, seq: int, key: bytes, amount_bytes: int, now_s: float) -> list[Event]:
        """A process opened shared memory by its key. It is charged once, if no process pays for it. Raises BadDocument."""
        self._record(process, gpu).known = True
        self._gpus[gpu].queue(gpu, LeaseRequest(process, seq, amount_bytes, amount_bytes, key=key))
        return self._decide(gpu, now_s)

    def restate_hold(self, process: int, gpu: int, key: bytes, amount_bytes: int) -> None:
        """A process that reconnected states the shared memory that it has open: that cannot be refused. Raises BadDocument."""
        self._record(process, gpu).known = True
        shared = self._gpus[gpu].shared
        if shared.full():
            raise BadDocument(f"HOLD of one more key of GPU {gpu}: a container has at most {shared.entries_limit}")
        shared.open(key, process, min(amount_bytes, STATED_MOST))

    def drop(self, process: int, gpu: int, key: bytes, back_bytes: int, now_s: float, *, made: bool) -> list[Event]:
        """A process freed or closed shared memory. `back_bytes` of its lease, which paid for the memory, end with that. They are charged
        to the key if others have it open. Raises BadDocument."""
        record = self._record(process, gpu)
        of = self._gpus[gpu]
        if back_bytes > record.leased_bytes:
            raise BadDocument(f"DROP of {back_bytes} bytes of GPU {gpu}: 0 to {record.leased_bytes} are leased")
        of.shrink(record, back_bytes)
        of.shared.let_go(key, process, made=made, opened=not made)
        of.heirs_moved()
        return self._decide(gpu, now_s)

    def state(self, process: int, gpu: int, used_bytes: int, leased_bytes: int, managed_bytes: int = 0) -> None:
        """A process states its used memory, in all and managed; the first time, before its first request, also its lease from an earlier arbiter.
        Raises BadDocument."""
        record = self._record(process, gpu)
        if leased_bytes > STATED_MOST:
            raise BadDocument(f"USAGE of {leased_bytes} bytes leased of GPU {gpu}: at most {STATED_MOST}")
        if not record.known:
            record.known = True
            self._gpus[gpu].leased_bytes += leased_bytes - record.leased_bytes
            record.leased_bytes = record.unsorted_bytes = leased_bytes
            # a reading before this counted its allocations as contexts
            self._gpus[gpu].charge(record, 0, made_bytes=record.made_bytes)
            record.context = ContextMeasure()
        record.used_bytes = min(used_bytes, record.leased_bytes)
        record.managed_bytes = min(managed_bytes, record.used_bytes)
        record.context.moved(record.leased_bytes)

    def node_decided(self, process: int, gpu: int, seq: int, now_s: float, *, granted: bool) -> list[Event]:
        """The node has, or will not have, the memory for a request that waited there. One that was withdrawn meanwhile is ignored."""
        of, request = self._gpus[gpu], self._node.remove(gpu, process, seq)
        if request is None:
            return []
        free_bytes = of.left_bytes(elastic=request.elastic)  # the limits may be lower than when it was requested
        if granted and request.need_bytes <= free_bytes:
            answer: Event = of.grant(gpu, request, request.need_bytes)
        else:
            answer = self._denied(gpu, request, now_s)
        return [answer, *self._decide(gpu, now_s)]

    def expire(self, now_s: float) -> list[Event]:
        """End expired promises, decide requests that have waited long enough, and repeat the answer of those that wait for the node. A BEGIN that was sent before
        `now_s` has been read."""
        for gpu in self._gpus:
            gpu.promises = {process: promise for process, promise in gpu.promises.items() if now_s < promise.until_s}
        return self._decide_all(now_s) + self._node.repeat(now_s)

    def deadline_s(self) -> float | None:
        """When `expire` is to be called next, or None."""
        requests_s = [self._due_s(number, gpu.requests[0]) for number, gpu in enumerate(self._gpus) if gpu.requests]
        promises_s = [promise.until_s for gpu in self._gpus for promise in gpu.promises.values()]
        return min([*requests_s, *promises_s, *self._node.due_s()], default=None)

    def set_limits(
        self,
        limits_bytes: Sequence[int],
        now_s: float,
        bursts_bytes: Sequence[int] | None = None,
        highest_bytes: Sequence[int] | None = None,
    ) -> list[Event]:
        """The same GPUs have other limits: for resident memory, and with `bursts_bytes` higher ones for all. Existing leases stay. `highest_bytes`: the
        highest limits until now; what is leased counts for the GPUs up to these."""
        highest_bytes = highest_bytes or [gpu.highest_bytes for gpu in self._gpus]
        for gpu, *limits in zip(self._gpus, limits_bytes, bursts_bytes or limits_bytes, highest_bytes, strict=True):
            gpu.set_limits(*limits)
        return self._decide_all(now_s)

    def charge_unconnected(self, gpu: int, amount_bytes: int, now_s: float) -> list[Event]:
        """NVML counts `amount_bytes` for processes of the container that are not connected: that cannot be refused."""
        of = self._gpus[gpu]
        fell, of.unconnected_bytes = amount_bytes < of.unconnected_bytes, amount_bytes
        return self._decide(gpu, now_s) if fell else []

    def unleased_bytes(self, gpu: int) -> int:
        """Bytes that no process has leased for allocations or contexts, and that are not reserved beside a context."""
        return self._gpus[gpu].unleased_bytes

    def leased_bytes(self, gpu: int) -> int:
        """Leases of all processes together for allocations."""
        return self._gpus[gpu].leased_bytes

    def context_bytes(self, gpu: int) -> int:
        """Memory of all their contexts together."""
        return self._gpus[gpu].context_bytes

    def shared_bytes(self, gpu: int) -> int:
        """Memory that some of them have open and no lease pays for."""
        return self._gpus[gpu].shared.charged_bytes

    def used_bytes(self, gpu: int) -> int:
        """Used memory by their last statements."""
        return sum(record.used_bytes for record in self._gpus[gpu].records.values())

    def part_of(self, process: int, gpu: int) -> Part:
        """The part of one process on a GPU."""
        return self._gpus[gpu].records[process].part

    def recall(self, gpu: int, missing_bytes: int, now_s: float) -> list[Event]:
        """Other containers lack this much memory: recall it from what no process of this one uses. What returns is no longer claimed."""
        return self._recalls.of_all(gpu, missing_bytes, now_s)

    def owes(self, gpu: int) -> bool:
        """Whether a process has yet to answer a recall."""
        return any(record.recall for record in self._gpus[gpu].records.values())

    def claimed_bytes(self, gpu: int) -> tuple[int, int]:
        """What the container has of a GPU, or may take without a request: memory that cannot be swapped, and elastic leases."""
        return self._gpus[gpu].claimed_bytes

    def _record(self, process: int, gpu: int) -> ProcessRecord:
        if gpu >= len(self._gpus):
            raise BadDocument(f"packet names GPU {gpu}: this container has {len(self._gpus)}, from 0")
        return self._gpus[gpu].records[process]

    def _decide_all(self, now_s: float) -> list[Event]:
        return [event for gpu in range(len(self._gpus)) for event in self._decide(gpu, now_s)]

    def _decide(self, number: int, now_s: float) -> list[Event]:
        """Answer requests from the head of the queue until one has to wait for the container's own processes."""
        gpu = self._gpus[number]
        events: list[Event] = []
        if gpu.requests:
            self._node.read_ceiling(number)
        while gpu.requests and now_s >= self._opens_at_s:
            request = gpu.requests[0]
            free_bytes = gpu.left_bytes(elastic=request.elastic, promised=True)
            missing_bytes = gpu.shared.missing_bytes(request.key, request.need_bytes)
            full = bool(request.key) and gpu.shared.full()
            if missing_bytes <= free_bytes and not full:
                answer = self._node.request(number, request, missing_bytes, free_bytes, now_s)
                events.append(self._denied(number, request, now_s) if isinstance(answer, NodeAnswer) else answer)
            elif not full and (wanted := self._recall(number, request, missing_bytes - free_bytes, now_s)):
                return events + wanted
            elif self._recalls.goes_on(number, request, now_s):
                return events
            elif gpu.promised_bytes and missing_bytes <= gpu.left_bytes(elastic=request.elastic) and not full:
                request.waits_for.clear()
                request.awaits_limits = False
                return events
            elif not full and self._node.awaits_limits(number, request, missing_bytes, now_s):
                return events
            else:
                events.append(self._denied(number, request, now_s))
            gpu.requests.popleft()
        return events

    def _denied(self, number: int, request: LeaseRequest, now_s: float) -> Denied:
        if request.context:
            self._gpus[number].records[request.process].context.counts_from_s = now_s
        return Denied(request.process, number, request.seq, self._gpus[number].refusal(request))

    def _due_s(self, number: int, head: LeaseRequest) -> float:
        """When the first request of a GPU is decided without a further event. If it waits for promises alone: when they expire."""
        if not head.recalled:
            return self._opens_at_s
        limits_due_s = self._node.limits_due_s(number) if head.awaits_limits else inf
        return head.until_s if head.waits_for else limits_due_s

    def _recall(self, number: int, request: LeaseRequest, missing_bytes: int, now_s: float) -> list[Event]:
        """Recall once what a request lacks, unless no recall could make it fit, and once more from siblings that have just answered an earlier recall."""
        gpu = self._gpus[number]
        answered_others = request.owed and not request.waits_for
        if gpu.is_hopeless(request) or (request.recalled and not answered_others):
            request.recalled = True
            return []
        return self._recalls.begin(number, request, missing_bytes, now_s)
