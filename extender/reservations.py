"""Places that were promised and are not in the API yet, and when each lapses.

    reserved  --bind begins-->  binding  --API says yes-->  bound     --the watch sees it-->  (gone: the pod's own claim stands)
                                         --no answer-->     in doubt  --time passes-->        (gone)
                                         --API says no-->   (gone)

Only `reserved` may be taken back for a new filter call. The others may still become a bound pod: giving their GPU to someone else
could book it twice. Knows nothing of cards and reads no clock: the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Stage = Literal["reserved", "binding", "in doubt", "bound"]

LIFE_S: Final = 60.0
"""From filter to bind; scheduling cycles with volumes or permits may take seconds. Specified in the contract (30 to 60 s)."""

DOUBT_S: Final = 60.0
"""The API server gives up on a write after 60 s (its --request-timeout), so one that was not answered cannot happen later."""

BOUND_S: Final = 300.0
"""The watch lags by seconds. A pod that was bound and deleted while nobody watched is forgotten after this. Guessed."""


@dataclass(slots=True)
class Reservation:
    """One pod's promise."""

    key: str
    node: str
    expires_at_s: float
    stage: Stage = "reserved"

    @property
    def firm(self) -> bool:
        """May this still become, or has it become, a bound pod whatever we decide?"""
        return self.stage != "reserved"


class Reservations:
    """By pod UID."""

    def __init__(self, life_s: float = LIFE_S) -> None:
        self._life_s = life_s
        self._by_uid: dict[str, Reservation] = {}
        self._none_before_s = float("inf")
        """Nothing lapses before this: a filter call need not look at each."""

    def __len__(self) -> int:
        return len(self._by_uid)

    def __contains__(self, uid: str) -> bool:
        return uid in self._by_uid

    def __iter__(self) -> Iterator[tuple[str, Reservation]]:
        return iter(self._by_uid.items())

    def get(self, uid: str) -> Reservation | None:
        """A pod's reservation."""
        return self._by_uid.get(uid)

    def put(self, uid: str, key: str, node: str, now_s: float) -> Reservation:
        """Promise a place to a pod, in place of any earlier promise."""
        reservation = Reservation(key, node, now_s + self._life_s)
        self._by_uid[uid] = reservation
        self._none_before_s = min(self._none_before_s, reservation.expires_at_s)
        return reservation

    def move(self, uid: str, stage: Stage, now_s: float) -> None:
        """A pod's reservation is now at this stage. Nothing when the watch was faster and it is gone."""
        reservation = self._by_uid.get(uid)
        if reservation is None:
            return
        reservation.stage = stage
        life_s = {"reserved": self._life_s, "binding": float("inf"), "in doubt": DOUBT_S, "bound": BOUND_S}[stage]
        reservation.expires_at_s = now_s + life_s
        self._none_before_s = min(self._none_before_s, reservation.expires_at_s)

    def drop(self, uid: str) -> bool:
        """Forget a reservation. Answers whether there was one."""
        return self._by_uid.pop(uid, None) is not None

    def lapsed(self, now_s: float) -> list[str]:
        """UIDs whose time is up. They stay until they are dropped."""
        if now_s < self._none_before_s:
            return []
        self._none_before_s = min((one.expires_at_s for one in self._by_uid.values()), default=float("inf"))
        return [uid for uid, reservation in self._by_uid.items() if reservation.expires_at_s <= now_s]
