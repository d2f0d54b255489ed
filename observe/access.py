"""Access to a program's metrics: for a client whose bearer token was reviewed, as the API server reviews tokens.

This module decides which tokens are reviewed and for how long an answer counts. It uses no API server: `review` calls one, by way of the program. Tokens are kept as
their SHA-256 only.

    accepted   counts for 2 minutes; then the token is reviewed again, beside all limits. While it cannot be reviewed, it counts for 10 minutes more
    refused    counts for 30 seconds
    unknown    at most 5 new tokens a second are reviewed, after a burst of 20; more wait, and the address that had least reviewed of late comes first
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Final

from observe.page import Page, text
from observe.refusals import RefusalCounter, not_counted

ACCEPTED_S: Final = 120.0
STALE_S: Final = 600.0
REFUSED_S: Final = 30.0
ACCEPTED_TOKENS: Final = 64
REFUSED_TOKENS: Final = 1024
TOKEN_BYTES: Final = 8192
"""A service account's token has about 1,000 (measured)."""
NEW_PER_S: Final = 5.0
NEW_AT_ONCE: Final = 20.0
WAITING: Final = 256
"""New tokens that wait, of all addresses; of one address at most `OF_ADDRESS`."""
OF_ADDRESS: Final = 4
AT_ONCE: Final = 4
"""Reviews under way."""
HAD_S: Final = 60.0
"""What an address had counts half after so long."""

Review = Callable[[str], Awaitable[Page]]
"""200, 401, 403, or 503 where that is unknown; with a sentence."""

_REASONS: Final = {401: "unauthorized", 403: "forbidden", 503: "not-reviewed"}


class Access:
    """Of one listener."""

    def __init__(
        self, review: Review, refused: RefusalCounter = not_counted, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._review, self._count, self._clock = review, refused, clock
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """When each token was accepted last."""
        self._refused: OrderedDict[bytes, tuple[float, Page]] = OrderedDict()
        self._requested: dict[bytes, asyncio.Future[Page]] = {}
        self._queue = NewTokens(clock)

    async def refusal(self, address: str, authorization: bytes | None) -> Page | None:
        """What to answer instead of the page; None = the client may read it."""
        page = await self._judge(address, authorization)
        if page is not None:
            self._count(_REASONS.get(page.status, "review-rate") if authorization else "no-token")
        return page

    async def _judge(self, address: str, authorization: bytes | None) -> Page | None:
        kind, _, token = (authorization or b"").partition(b" ")
        token = token.strip()
        if kind.lower() != b"bearer" or not token or len(token) > TOKEN_BYTES or not token.isascii():
            return text(401, "metrics are read with a bearer token of a service account that may get /metrics")
        key, now_s = hashlib.sha256(token).digest(), self._clock()
        accepted_s = self._accepted.get(key)
        if accepted_s is not None and now_s - accepted_s < ACCEPTED_S:
            return None
        if key in self._refused and now_s - self._refused[key][0] < REFUSED_S:
            return self._refused[key][1]
        if key not in self._requested:
            self._requested[key] = asyncio.ensure_future(self._request(key, token.decode(), address))
        page = await asyncio.shield(self._requested[key])
        if page.status == 200:
            return None
        if page.status == 503 and accepted_s is not None and self._clock() - accepted_s < ACCEPTED_S + STALE_S:
            return None
        return page

    async def _request(self, key: bytes, token: str, address: str) -> Page:
        """For all requests that come with this token meanwhile."""
        try:
            if key in self._accepted:
                page = await self._review(token)
            elif await self._queue.admit(address):
                try:
                    page = await self._review(token)
                finally:
                    self._queue.done()
            else:
                return text(429, "too many new tokens: retry in a while")
        finally:
            del self._requested[key]
        if page.status == 200:
            self._accepted[key] = self._clock()
            self._accepted.move_to_end(key)
            if len(self._accepted) > ACCEPTED_TOKENS:
                self._accepted.popitem(last=False)
        elif page.status != 503:
            self._accepted.pop(key, None)
            self._refused[key] = self._clock(), page
            self._refused.move_to_end(key)
            if len(self._refused) > REFUSED_TOKENS:
                self._refused.popitem(last=False)
        return page


class NewTokens:
    """In which order, and how fast, unknown tokens are reviewed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left, self._at_s, self._under_way = NEW_AT_ONCE, clock(), 0
        self._waiting: dict[str, deque[asyncio.Future[bool]]] = {}
        self._had: dict[str, tuple[float, float]] = {}
        """How much an address had, and when that was counted."""
        self._pumping: asyncio.Task[None] | None = None

    async def admit(self, address: str) -> bool:
        """Waits until a review may begin. False: too many wait already. After True the caller calls `done` at the end."""
        of_address = self._waiting.get(address, ())
        if len(of_address) >= OF_ADDRESS or sum(map(len, self._waiting.values())) >= WAITING:
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(address, deque()).append(future)
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.create_task(self._pump())
        return await future

    def done(self) -> None:
        """A review has ended."""
        self._under_way -= 1

    async def _pump(self) -> None:
        while self._waiting:
            now_s = self._clock()
            self._left = min(NEW_AT_ONCE, self._left + (now_s - self._at_s) * NEW_PER_S)
            self._at_s = now_s
            if self._left < 1 or self._under_way >= AT_ONCE:
                await asyncio.sleep(1 / NEW_PER_S / 4)
                continue
            address = min(self._waiting, key=lambda one: self._of(one, now_s))
            future = self._waiting[address].popleft()
            if not self._waiting[address]:
                del self._waiting[address]
            if future.cancelled():
                continue
            self._left -= 1
            self._under_way += 1
            self._had[address] = self._of(address, now_s) + 1, now_s
            self._had = {one: had for one, had in self._had.items() if now_s - had[1] < 10 * HAD_S}
            future.set_result(True)
            await asyncio.sleep(0)

    def _of(self, address: str, now_s: float) -> float:
        had, at_s = self._had.get(address, (0.0, now_s))
        return float(had * 0.5 ** ((now_s - at_s) / HAD_S))
