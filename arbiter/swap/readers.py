"""Which containers' connections for bursts are read now: each has a budget for what it states, and one that has used it waits.

A container has its own poller and budget (`arbiter.attention`), as for its other messages. Its processes' messages wait in their sockets meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from arbiter.attention import Attention
from arbiter.swap.poller import Poller


class ContainerReaders:
    """Of one node."""

    def __init__(self, poller: Poller, clock: Callable[[], float]) -> None:
        self._poller, self._clock = poller, clock
        self._attentions: dict[str, Attention] = {}
        self._resting: dict[str, float] = {}
        """Throttled containers, and until when they wait."""

    def add(self, name: str, attention: Attention) -> None:
        """Read this container."""
        self._attentions[name] = attention
        self._poller.add(attention.fd, partial(self._serve, name))

    def remove(self, name: str) -> None:
        """It is read no more."""
        attention = self._attentions.pop(name)
        if self._resting.pop(name, None) is None:
            self._poller.remove(attention.fd)

    def turn(self) -> None:
        """Those that have waited long enough are read again."""
        now_s = self._clock()
        for name in [name for name, until_s in self._resting.items() if until_s <= now_s]:
            del self._resting[name]
            self._poller.add(self._attentions[name].fd, partial(self._serve, name))

    def deadline_s(self) -> float:
        """When `turn` is due."""
        return min(self._resting.values(), default=inf)

    def throttles(self) -> dict[str, int]:
        """How often each had to wait; only containers that ever had. From any thread."""
        return {name: one.throttles for name, one in list(self._attentions.items()) if one.throttles}

    def _serve(self, name: str) -> None:
        attention = self._attentions[name]
        attention.serve()
        if (until_s := attention.rest_s(self._clock())) is not None:
            self._poller.remove(attention.fd)
            self._resting[name] = until_s
