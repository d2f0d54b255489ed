"""Which GPUs are fit for use, from the driver's XID events and from queries. Pure.

A GPU falls ill at an XID that is not an application's own doing, or when it does
not answer; it is well again after it has answered `ANSWERS_TO_RECOVER` times in a row since. A GPU never stays ill for good.
"""

from __future__ import annotations

from typing import Final

APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program's own mistakes raise: they say nothing of the GPU. As in NVIDIA's device plugin."""

ANSWERS_TO_RECOVER: Final = 2
"""Pulled out of the air: one answer may be luck in the middle of a reset."""


class Health:
    """Why each ill GPU is ill."""

    def __init__(self) -> None:
        self.ill: dict[str, str] = {}
        """UUID -> the reason, for a person."""
        self._answers: dict[str, int] = {}

    def xid(self, uuid: str, xid: int) -> bool:
        """The driver reported an XID. Answers whether the GPU's health changed."""
        if xid in APPLICATION_XIDS:
            return False
        self._answers.pop(uuid, None)
        return self._fall_ill(uuid, f"GPU {uuid}: the driver reported XID {xid}")

    def answered(self, uuid: str, trouble: str | None) -> bool:
        """The GPU was asked: `trouble` is None when all is well. Answers whether its health changed."""
        if trouble is not None:
            self._answers.pop(uuid, None)
            return self._fall_ill(uuid, trouble)
        if uuid not in self.ill:
            return False
        self._answers[uuid] = self._answers.get(uuid, 0) + 1
        if self._answers[uuid] < ANSWERS_TO_RECOVER:
            return False
        del self.ill[uuid], self._answers[uuid]
        return True

    def _fall_ill(self, uuid: str, why: str) -> bool:
        was_well = uuid not in self.ill
        self.ill[uuid] = why
        return was_well
