"""Access to a program's metrics: when a token is reviewed, and for how long the answer counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from observe.access import (
    ACCEPTED_S,
    ACCEPTED_TOKENS,
    NEW_AT_ONCE,
    OF_ADDRESS,
    REFUSED_S,
    REFUSED_TOKENS,
    STALE_S,
    TOKEN_BYTES,
    Access,
)
from observe.page import Page, text


class Cluster:
    """Reviews tokens as a test sets, and counts. The clock stands still but for `passes`."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {"good": 200, "poor": 403}
        self.away = False
        self.reviews: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.now_s = 0.0
        self.hold: asyncio.Event | None = None
        self.access = Access(self._review, self._count, lambda: self.now_s)

    def _count(self, reason: str, more: int = 1, /) -> None:
        self.refused[reason] += more

    async def _review(self, token: str) -> Page:
        self.reviews[token] += 1
        if self.hold is not None:
            await self.hold.wait()
        return text(503, "away") if self.away else text(self.statuses.get(token, 401), token)

    async def status(self, token: str, address: str = "10.0.0.1") -> int:
        page = await self.access.refusal(address, f"Bearer {token}".encode())
        return 200 if page is None else page.status


async def came(condition: Callable[[], bool]) -> None:
    """Polls what has no event to wait for."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_client_without_a_token_is_answered_without_a_review() -> None:
    cluster = Cluster()
    for header in (
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic abc",
        b"Bearer " + b"x" * (TOKEN_BYTES + 1),
        b"Bearer \xff",
    ):
        page = await cluster.access.refusal("10.0.0.1", header)
        assert page is not None
        assert page.status == 401
        assert b"bearer token" in page.body
    assert not cluster.reviews


async def test_an_accepted_token_is_reviewed_once_in_two_minutes() -> None:
    cluster = Cluster()
    for _ in range(50):
        assert await cluster.status("good") == 200
    assert cluster.reviews["good"] == 1
    cluster.now_s += ACCEPTED_S + 1
    assert await cluster.status("good") == 200
    assert cluster.reviews["good"] == 2
    assert not cluster.refused


async def test_a_token_that_is_no_longer_accepted_ends_at_its_next_review() -> None:
    cluster = Cluster()
    assert await cluster.status("good") == 200
    cluster.statuses["good"] = 401
    cluster.now_s += ACCEPTED_S + 1
    assert await cluster.status("good") == 401
    cluster.away = True
    assert await cluster.status("good") == 401


async def test_a_refused_token_is_reviewed_again_after_half_a_minute() -> None:
    cluster = Cluster()
    assert [await cluster.status(token) for token in ("poor", "poor", "none", "none")] == [403, 403, 401, 401]
    assert cluster.reviews == {"poor": 1, "none": 1}
    assert cluster.refused == {"forbidden": 2, "unauthorized": 2}
    cluster.statuses["poor"] = 200
    cluster.now_s += REFUSED_S + 1
    assert await cluster.status("poor") == 200


async def test_without_reviews_an_accepted_token_counts_for_ten_minutes_and_no_other_is_accepted() -> None:
    cluster = Cluster()
    assert await cluster.status("good") == 200
    cluster.away = True
    cluster.now_s += ACCEPTED_S + STALE_S - 1
    assert await cluster.status("good") == 200
    assert await cluster.status("other") == 503
    cluster.now_s += 2
    assert await cluster.status("good") == 503
    cluster.away = False
    assert await cluster.status("good") == 200
    assert cluster.refused == {"not-reviewed": 2}


async def test_requests_with_one_token_wait_for_one_review() -> None:
    cluster = Cluster()
    cluster.hold = asyncio.Event()
    asking = [asyncio.create_task(cluster.status("good", f"10.0.0.{n}")) for n in range(10)]
    await came(lambda: bool(cluster.reviews))
    cluster.hold.set()
    assert await asyncio.gather(*asking) == [200] * 10
    assert cluster.reviews["good"] == 1


async def test_made_up_tokens_are_reviewed_slowly_and_a_new_client_comes_before_the_flood() -> None:
    cluster = Cluster()
    addresses = [f"10.0.1.{n}" for n in range(50)]
    flood = [
        asyncio.create_task(cluster.status(f"{address}-{n}", address))
        for address in addresses
        for n in range(OF_ADDRESS + 3)
    ]
    await came(lambda: sum(cluster.reviews.values()) >= NEW_AT_ONCE)
    assert sum(cluster.reviews.values()) == NEW_AT_ONCE
    assert cluster.refused["review-rate"] > 0
    honest = asyncio.create_task(cluster.status("good", "10.0.0.1"))

    def later() -> bool:
        cluster.now_s += 0.05
        return honest.done()

    await came(later)
    assert honest.result() == 200
    assert sum(cluster.reviews.values()) <= len(addresses) + 5, (
        "each address had one, and the newcomer comes before a second"
    )
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_an_accepted_token_is_reviewed_again_beside_a_flood_of_others() -> None:
    cluster = Cluster()
    assert await cluster.status("good") == 200
    flood = [asyncio.create_task(cluster.status(f"{n}", f"10.0.1.{n % 50}")) for n in range(300)]
    await came(lambda: sum(cluster.reviews.values()) >= NEW_AT_ONCE)
    cluster.now_s += 0.001
    cluster.access._accepted.update(dict.fromkeys(cluster.access._accepted, -ACCEPTED_S - 1.0))
    assert await cluster.status("good") == 200
    assert cluster.reviews["good"] == 2
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_what_is_remembered_of_tokens_is_bounded() -> None:
    cluster = Cluster()
    for n in range(ACCEPTED_TOKENS + 10):
        cluster.statuses[f"good-{n}"] = 200
    for n in range(REFUSED_TOKENS + 50):
        cluster.now_s += 1.0
        await cluster.status(f"bad-{n}")
        await cluster.status(f"good-{n}") if n < ACCEPTED_TOKENS + 10 else None
    assert len(cluster.access._accepted) <= ACCEPTED_TOKENS
    assert len(cluster.access._refused) <= REFUSED_TOKENS
    assert set(cluster.access._queue._had) == {"10.0.0.1"}
