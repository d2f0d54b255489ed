"""Two nodes, pods that may be evicted, one that is urgent, and kube-scheduler's preempt call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from extender.preemption import evictor as evicting
from tests.builders import PodBuilder, gpu, node, pod, share
from tests.fake_api import FakeApi
from tests.integration.extender.scheduler import Scheduler

FULL_MIB: Final = 81_920
HALF_MIB: Final = FULL_MIB // 2


@asynccontextmanager
async def two_nodes() -> AsyncIterator[FakeApi]:
    """n1 and n2, with two GPUs each."""
    async with FakeApi() as server:
        for name in ("n1", "n2"):
            server.put(node(name).with_gpus(2).plain())
        yield server


def evict_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extender's own evictions begin without a wait: no other preemption competes with them here."""
    defaults = evicting.Evictor.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "grace_s", 0.0)
    monkeypatch.setitem(defaults, "retry_s", 0.01)


def bound(name: str, at: str, row: int, mib: int, **annotations: str) -> PodBuilder:
    """A pod that runs on a GPU."""
    asking = pod(name).asking(mib=mib).annotated(**annotations).on(at).with_phase("Running")
    return asking.assigned(share(gpu(row, node=at), mib))


def uids(*names: str) -> list[dict[str, str]]:
    return [{"UID": f"uid-default-{name}"} for name in names]


async def preempt(scheduler: Scheduler, preemptor: PodBuilder, **nodes: list[dict[str, str]] | None) -> dict[str, Any]:
    """As kube-scheduler 1.36 writes it with nodeCacheCapable."""
    victims = {name: {"Pods": pods, "NumPDBViolations": 0} for name, pods in nodes.items()}
    body = {"Pod": preemptor.plain(), "NodeNameToVictims": None, "NodeNameToMetaVictims": victims}
    async with asyncio.timeout(10):
        await scheduler.extender.preemption.verb.informed.wait()
    answer: dict[str, Any] = (await scheduler.call("preempt", body))["NodeNameToMetaVictims"]
    return answer


def urgent(mib: int = FULL_MIB) -> PodBuilder:
    return pod("urgent").asking(mib=mib).of_priority(1000)
