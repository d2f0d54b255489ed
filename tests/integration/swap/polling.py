"""Waits for what has no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60
"""Of a wait for what comes within moments on an idle machine."""


def until(what: Callable[[], Any], limit_s: float = LIMIT_S) -> float:
    """Seconds until `what()` is true. Polls what has no event to wait for."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < limit_s, f"not within {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - began
