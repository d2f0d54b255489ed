"""Which GPUs are healthy, from the driver's XID events and from queries. Pure.

A GPU becomes unhealthy at an XID that no application causes by itself, or when it does not answer. It is healthy again after
`ANSWERS_TO_RECOVER` answers in a row. No GPU stays unhealthy for good.
"""

from __future__ import annotations

from typing import Final

APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program's own mistakes raise: they show nothing about the GPU. As in NVIDIA's device plugin."""

ANSWERS_TO_RECOVER: Final = 2
"""Pulled out of the air: one answer may be luck in the middle of a reset."""


class HealthTracker:
    """The unhealthy GPUs, each with the reason."""

    def __init__(self) -> None:
        self.unhealthy: dict[str, str] = {}
        """UUID -> the reason, for a person."""
        self._answers: dict[str, int] = {}

    def xid(self, uuid: str, xid: int) -> bool:
        """The driver reported an XID. Returns whether the GPU's health changed."""
        if xid in APPLICATION_XIDS:
            return False
        self._answers.pop(uuid, None)
        return self._set_unhealthy(uuid, f"GPU {uuid}: the driver reported XID {xid}")

    def answered(self, uuid: str, trouble: str | None) -> bool:
        """The GPU was queried: `trouble` is None when it is healthy. Returns whether its health changed."""
        if trouble is not None:
            self._answers.pop(uuid, None)
            return self._set_unhealthy(uuid, trouble)
        if uuid not in self.unhealthy:
            return False
        self._answers[uuid] = self._answers.get(uuid, 0) + 1
        if self._answers[uuid] < ANSWERS_TO_RECOVER:
            return False
        del self.unhealthy[uuid], self._answers[uuid]
        return True

    def _set_unhealthy(self, uuid: str, why: str) -> bool:
        was_healthy = uuid not in self.unhealthy
        self.unhealthy[uuid] = why
        return was_healthy
