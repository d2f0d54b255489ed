"""A thread for slow reads beside the arbiter's loop: NVML, processes' maps and descriptors.

It begins once and ends once. `close` waits for a second at most: a thread that still waits for an answer then ends with the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

CLOSE_S: Final = 1.0
"""How long `close` waits for the thread. Guessed: an answer of NVML takes milliseconds."""


class ReaderThread:
    """Runs `run`, which returns soon after `closing` is set. `changed` guards the shared state of the thread and the loop, and `closing`."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self.closing = False
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError if the machine has no thread left."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def wait(self, condition: Callable[[], object], seconds: float | None = None) -> None:
        """Wait until the condition is true, `close` is called, or `seconds` have passed. For the thread, which has acquired `changed`."""
        self.changed.wait_for(lambda: self.closing or condition(), seconds)

    def pause(self, seconds: float) -> bool:
        """Wait for `seconds`, or until `close` is called. Returns whether it was. For the thread."""
        with self.changed:
            self.wait(lambda: False, seconds)
            return self.closing

    def close(self) -> bool:
        """End the thread. Returns whether it has ended; until then, the descriptors that it may write to must stay open."""
        with self.changed:
            self.closing = True
            self.changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        return not self.alive
