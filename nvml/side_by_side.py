"""Answers about several GPUs at a time, each in a thread of its own: a description takes some thirty calls of NVML, and GPUs do not wait for each other in the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from nvml.messages import AnyReply, GpuAtRequest, RequestPacket


class SideBySide:
    """Of one packet: the descriptions in it, if there are several. They need nothing of each other, and change nothing."""

    def __init__(self, packet: Iterable[RequestPacket], answer: Callable[[GpuAtRequest], AnyReply]) -> None:
        self._answer = answer
        self._threads: dict[int, threading.Thread] = {}
        self._replies: dict[int, AnyReply] = {}
        wanted = [(one.number, one.request) for one in packet if isinstance(one.request, GpuAtRequest)]
        for number, request in wanted if len(wanted) > 1 else ():
            thread = threading.Thread(target=self._run, args=(number, request), daemon=True)
            with suppress(RuntimeError):  # no thread is to be had: it is answered in its turn
                thread.start()
                self._threads[number] = thread

    @property
    def left(self) -> bool:
        """Are there some that `reply` has not returned?"""
        return bool(self._threads)

    def reply(self, number: int) -> AnyReply | None:
        """Waits for it. None = it is not among these."""
        thread = self._threads.pop(number, None)
        if thread is None:
            return None
        thread.join()
        return self._replies.pop(number, None)

    def _run(self, number: int, request: GpuAtRequest) -> None:
        self._replies[number] = self._answer(request)
