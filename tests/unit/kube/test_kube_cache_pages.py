"""The watch cache reads a list page by page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import cast

import pytest

from kube.cache import Cache
from kube.client import Client
from kube.errors import ApiError
from kube.objects import Node


class Paged:
    """Stands for the client: pages of two nodes, and no watch. A page that is not there is an error."""

    def __init__(self, pages: int, there: int) -> None:
        self.requested: list[str] = []
        self._pages, self._there = pages, there

    async def get(self, _path: str, params: Mapping[str, str], **_: object) -> bytes:
        at = int(params.get("continue", "0"))
        self.requested.append(params.get("continue", ""))
        await asyncio.sleep(0)
        if at >= self._there:
            raise ApiError(503, "Unavailable", "later")
        metadata = {"resourceVersion": "7"} | ({"continue": str(at + 1)} if at + 1 < self._pages else {})
        items = [{"metadata": {"name": f"n{at}-{which}", "resourceVersion": "1"}} for which in range(2)]
        return json.dumps({"metadata": metadata, "items": items}).encode()


async def test_the_next_page_is_on_its_way_while_one_is_processed() -> None:
    client = Paged(3, there=3)
    requested_when_reported: dict[str, int] = {}
    cache = Cache(
        cast(Client, client), "/api/v1/nodes", Node,
        on_change=lambda _, new: requested_when_reported.setdefault(new.key if new else "", len(client.requested)),
    )  # fmt: skip
    await cache._list()
    assert requested_when_reported == {"n0-0": 2, "n0-1": 2, "n1-0": 3, "n1-1": 3, "n2-0": 3, "n2-1": 3}
    assert client.requested == ["", "1", "2"], "and each page once"
    assert cache.has_synced.is_set()


async def test_a_list_whose_next_page_fails_is_not_complete() -> None:
    client = Paged(3, there=1)
    cache = Cache(cast(Client, client), "/api/v1/nodes", Node)
    with pytest.raises(ApiError):
        await cache._list()
    assert {one.key for one in cache.items()} == {"n0-0", "n0-1"}
    assert not cache.has_synced.is_set()
