"""The sockets at which processes of containers connect to the arbiter.

A container from which no connection can be accepted now is paused until `resume`: its waiting connections would keep the loop busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from arbiter import descriptors
from arbiter.attention import Attention
from arbiter.connection import Connection
from arbiter.memory.container import ServedContainer

_log = structlog.get_logger()


class Listeners:
    """See the module. `attention`: of each container that is served. `accept(container)` accepts what waits."""

    def __init__(
        self, attention: Mapping[ServedContainer, Attention], accept: Callable[[ServedContainer], None]
    ) -> None:
        self._attention, self._accept = attention, accept
        self.paused: set[ServedContainer] = set()
        """Free files are few, or what the container passed is not closed yet."""

    def add(self, container: ServedContainer) -> None:
        """Listen on its socket."""
        self._attention[container].add(container.listener.fileno(), lambda: self._accept(container))

    def remove(self, container: ServedContainer) -> None:
        """Close its socket: the container is no longer served."""
        descriptors.end_listener(container.listener, container.folder.name)
        self.paused.discard(container)

    def renew(self, container: ServedContainer) -> None:
        """Listen on a new socket after the old one was removed: a new process of the container could not connect."""
        self._accept(container)
        try:
            listener = container.bind()
        except OSError as error:
            _log.error("no process can connect", grant=container.folder.name, reason=str(error))
            return  # retried at the next rescan
        self.paused.discard(container)
        self._attention[container].remove(container.listener.fileno())
        descriptors.end_listener(container.listener, container.folder.name)
        container.listener = listener
        self.add(container)
        _log.warning("the socket of a grant was missing and is put back", grant=container.folder.name)

    def resume(self) -> None:
        """Accept again where that may be possible now."""
        for container in [one for one in self.paused if not descriptors.is_full(one.folder.name)]:
            self.paused.discard(container)
            self.add(container)

    def next_of(self, container: ServedContainer) -> Connection | None:
        """The container's next connection; None: none waits, or it is paused now."""
        if descriptors.is_full(container.folder.name):
            self._pause(container)
            return None
        try:
            return container.accept()
        except OSError as error:
            if not self.paused:
                _log.error("no connection can be accepted now", grant=container.folder.name, reason=str(error))
            self._pause(container)
            return None

    def _pause(self, container: ServedContainer) -> None:
        self.paused.add(container)
        self._attention[container].remove(container.listener.fileno())
