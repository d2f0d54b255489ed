"""Reading from a connection pauses: for a time, or until a queue admits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from observe.fairness import FairQueue


def closed() -> None:
    """Ends a connection that has ended."""


class RestingFlow(FlowControl):
    """Reads nothing for a while, too. After that it waits in `queue`: a flood's rests end together, and to read from all of them took 30 ms."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, queue: FairQueue, address: str
    ) -> None:
        super().__init__(transport)
        self._loop, self._queue, self._address = loop, queue, address
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None
        self._withdraw: Callable[[], None] = closed

    def rest(self, seconds: float) -> None:
        """For so long from now on; a rest that is under way is not prolonged."""
        if self._begin_rest():
            self._timer = self._loop.call_later(seconds, self._queue_up)

    def rest_until(self, submit: Callable[[Callable[[], object]], Callable[[], None]]) -> None:
        """Until what is submitted is called. `submit` answers what takes that back."""
        if self._begin_rest():
            self._withdraw = submit(self._rested)

    def stop_waiting(self) -> None:
        """For what was submitted: read again."""
        if self._resting and self._timer is None:
            self._withdraw()
            self._rested()

    def end(self) -> None:
        """The connection was lost: a timer would keep it, with all its memory."""
        if self._timer is not None:
            self._timer.cancel()
        self._withdraw()
        self._withdraw = closed

    def resume_reading(self) -> None:
        if self._resting:
            self.read_paused = False
        else:
            super().resume_reading()

    def _begin_rest(self) -> bool:
        if self._resting or self._transport.is_closing():
            return False
        self._transport.pause_reading()
        self._resting = True
        return True

    def _queue_up(self) -> None:
        self._withdraw = self._queue.submit(self._address, self._rested)

    def _rested(self) -> None:
        self._resting, self._timer, self._withdraw = False, None, closed
        if not self.read_paused:
            self._transport.resume_reading()
