"""How a program in an event loop is stopped. Kubernetes sends SIGTERM, a person's terminal SIGINT."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def on_stop_signal(act: Callable[[], object]) -> None:
    """Call `act` in the running loop on SIGTERM and SIGINT, each time."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)
