"""Which addresses open new connections faster than any client that a listener is for. Values only: `acceptor` refuses, `address_filter` drops in the kernel.

Each address has a budget, as a token bucket: `new_per_s` connections a second after `new_at_once`. A connection that is closed for others while its address has more than an equal part, that
exceeds a time limit, or whose request is refused costs `REFUSED_COST` more. An address without budget is blocked until it has one again, at most `BLOCKED_MOST_S`: its new connections are
refused, the open ones go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

REFUSED_COST: Final = 10.0
"""In new connections. The API server, the kubelet and Prometheus are refused nothing. Guessed."""

BLOCKED_S: Final = 1.0
"""At least. A client of TCP tries again after 1 s (tcp(7)), so less is no relief for it."""
BLOCKED_MOST_S: Final = 10.0
"""An address that many clients share is served now and then. Guessed."""

ADDRESSES_MOST: Final = 8192
"""That have less than a full budget. With more the one that spent nothing for the longest time is forgotten."""


@dataclass(slots=True)
class _Budget:
    left: float
    at_s: float


class ConnectionRates:
    """Of one listener. Without `new_per_s` nobody is blocked."""

    def __init__(self, new_per_s: float = inf, new_at_once: float = inf) -> None:
        self._per_s, self._at_once = new_per_s, new_at_once
        self._budgets: dict[str, _Budget] = {}
        self._blocked: dict[str, float] = {}
        """Until when."""

    @property
    def blocked(self) -> list[str]:
        """Addresses, the one that was blocked first comes first."""
        return list(self._blocked)

    def is_blocked(self, address: str) -> bool:
        """Until `release` has released it."""
        return address in self._blocked

    def spend(self, address: str, at_s: float, cost: float = 1.0) -> bool:
        """It opened a connection, or was refused something; both prolong a block. True: it is blocked from now on."""
        if self._per_s == inf:
            return False
        left = max(self._left(address, at_s) - cost, (BLOCKED_S - BLOCKED_MOST_S) * self._per_s)
        began = left < 0 and address not in self._blocked
        if left < 0:
            self._blocked[address] = at_s + BLOCKED_S - left / self._per_s
        self._budgets.pop(address, None)
        self._budgets[address] = _Budget(left, at_s)
        if len(self._budgets) > ADDRESSES_MOST:
            oldest = next(iter(self._budgets))
            del self._budgets[oldest]
            self._blocked.pop(oldest, None)
        return began

    def release(self, at_s: float, well: Callable[[str], bool] = lambda _: False) -> bool:
        """Those whose time is over, or that are `well`, are blocked no longer. True: there are any."""
        over = [address for address, until_s in self._blocked.items() if until_s <= at_s or well(address)]
        for address in over:
            del self._blocked[address]
        full = [address for address in self._budgets if self._left(address, at_s) >= self._at_once]
        for address in full:
            del self._budgets[address]
        return bool(over)

    def _left(self, address: str, at_s: float) -> float:
        had = self._budgets.get(address)
        if had is None:
            return self._at_once
        return min(self._at_once, had.left + (at_s - had.at_s) * self._per_s)
