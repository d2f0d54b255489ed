"""Recalls: requests to the processes of one container to return memory that they leased and do not use.

A request that does not fit recalls from all siblings at once, from each the whole missing size: any surplus is unused anyway, and a waiting
allocation can afford one round only. It waits longer for a sibling that could answer and has not (the machine is busy) than for one that cannot answer:
stopped or dead. On a node where containers may burst, memory that others lack is recalled too, and nothing waits for the answers here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

from vgpu.memory.accounts import GpuAccounts
from vgpu.memory.records import Event, LeaseRequest, Recalled

RECALLS: Final = 0x80000000
"""The bit that marks the sequence number of a recall. Specified: protocol.md."""
RECALL_WAIT_S: Final = 0.05
"""How long a request waits for its siblings. Specified: an allocation may not hang on a process that is stopped."""
RECALL_MOST_S: Final = 0.5
"""The same for siblings that are alive and not stopped. Specified; a busy machine schedules every process within it."""


class Recalls:
    """See the module. `may_answer`: whether a process is alive and not stopped; called for siblings that owe an answer."""

    def __init__(self, gpus: Sequence[GpuAccounts], may_answer: Callable[[int], bool], wait_s: float) -> None:
        self.exact: set[int] = set()
        """Processes that lease no more than they use: they are never sent a recall."""
        self._gpus, self._may_answer, self._wait_s = gpus, may_answer, wait_s
        self._numbers = 0

    def begin(self, number: int, request: LeaseRequest, missing_bytes: int, now_s: float) -> list[Event]:
        """Recall for a request from every sibling that has unused memory; empty if there is none. A sibling that will still answer an earlier recall, which
        was for another's memory, is waited for and then sent one for this request."""
        first, again = not request.recalled, request.owed
        request.recalled = True
        request.owed = {
            process
            for process, record in self._gpus[number].records.items()
            if process != request.process
            and record.recall
            and record.leased_bytes
            and self._in_time(number, process, now_s)
        }
        events = self.of_all(number, missing_bytes, now_s, but=request.process, of=None if first else again)
        request.waits_for |= request.owed | {event.process for event in events}
        if first:
            request.requested_at_s = now_s
        request.until_s = min(now_s + self._wait_s, request.requested_at_s + RECALL_MOST_S)
        return events

    def _in_time(self, number: int, process: int, now_s: float) -> bool:
        """Whether a process that owes an answer is worth the wait."""
        age_s = now_s - self._gpus[number].records[process].recalled_at_s
        return age_s < self._wait_s or (age_s < RECALL_MOST_S and self._may_answer(process))

    def of_all(
        self, number: int, missing_bytes: int, now_s: float, *, but: int | None = None, of: Set[int] | None = None
    ) -> list[Event]:
        """Recall from all processes with a lease, or from some of them. One that still owes an answer gets no further recall."""
        events: list[Event] = []
        for process, record in self._gpus[number].records.items():
            if process == but or record.leased_bytes == 0 or record.recall or process in self.exact:
                continue
            if of is not None and process not in of:
                continue
            self._numbers = self._numbers % 0x7FFFFFFF + 1
            record.recall, record.recalled_at_s = RECALLS | self._numbers, now_s
            events.append(Recalled(process, number, record.recall, missing_bytes))
        return events

    def goes_on(self, number: int, request: LeaseRequest, now_s: float) -> bool:
        """Whether a request waits on for some process: during the short wait, and after it for those that will still answer."""
        if not request.waits_for:
            return False
        if now_s < request.until_s:
            return True
        request.waits_for = {process for process in request.waits_for if self._in_time(number, process, now_s)}
        request.until_s = min(now_s + self._wait_s, request.requested_at_s + RECALL_MOST_S)
        return bool(request.waits_for) and now_s < request.until_s

    def answered(self, number: int, process: int) -> None:
        """A process answered, or will owe none."""
        self._gpus[number].records[process].recall = 0
        for request in self._gpus[number].requests:
            request.waits_for.discard(process)
