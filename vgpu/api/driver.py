"""Which NVIDIA drivers Tangram supports. The one place that defines them; a version is text as the driver writes it, such as 580.159.04."""

from __future__ import annotations

from typing import Final

OLDEST_BRANCH: Final = 535
"""Specified: the oldest branch whose functions the integration tests go through. Older ones are not refused for their number, but for
what they lack."""


def too_old(version: str) -> str:
    """A sentence on a driver that lacks a function. `version` may be empty: it is not known."""
    which = f"NVIDIA driver {version}" if version else "the NVIDIA driver"
    return f"{which} lacks a function that Tangram needs; the oldest supported driver is {OLDEST_BRANCH}"
