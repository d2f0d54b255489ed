"""A cluster whose pods are watched: every change is counted by a ledger, and a kubelet runs what is bound, where a test needs that.

Nothing ever runs: `SimulatedKubelet` reports that pods do, and ends those that are deleted.

kube-apiserver --watch--> Follower --> AssignmentLedger, SimulatedKubelet, other listeners
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import aiohttp
import msgspec

from tests.builders import NodeBuilder
from tests.integration.extender.ledger import AssignmentLedger
from tests.integration.extender.scheduling import (
    AT_ONCE,
    NODES,
    PODS,
    ApiCalls,
    ApiRefused,
    Thing,
    node_object,
    path_of,
)

CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


class Follower:
    """Every change of every pod, in the order in which the API server made them, passed to all in `reported`."""

    def __init__(self, api: ApiCalls) -> None:
        self.reported: list[Callable[[str, Thing], None]] = []
        self._api = api
        self._changed = asyncio.Event()
        self._version = ""
        """Of the last change."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Follower]:
        """From the pods that there are now on; there should be none."""
        listed = await self._api.call("GET", PODS)
        assert not listed["items"], "pods of another test are left"
        self._version = listed["metadata"]["resourceVersion"]
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: self._changed.set())
        try:
            yield self
        finally:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        """The API server ends the watch of a slow client, which then requests what came after the last change."""
        while True:
            path = f"{PODS}?watch=1&resourceVersion={self._version}"
            async with self._api.session.get(path, timeout=aiohttp.ClientTimeout()) as answer:
                answer.raise_for_status()
                await self._read_changes(answer)

    async def _read_changes(self, answer: aiohttp.ClientResponse) -> None:
        rest = b""
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event = msgspec.json.decode(line)
                assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
                self._version = event["object"]["metadata"]["resourceVersion"]
                for report in self.reported:
                    report(event["type"], event["object"])
            self._changed.set()
            self._changed = asyncio.Event()

    async def until(self, true: Callable[[], bool], what: str, *, timeout_s: float = 90) -> None:
        """Return when this is true, checked after each change."""
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    await self._changed.wait()
                    if self._reading.done():
                        self._reading.result()
        except TimeoutError:
            raise AssertionError(f"within {timeout_s:.0f} s it did not come to be that {what}") from None


class SimulatedKubelet:
    """Of all nodes: pods that are bound run, pods that are deleted end."""

    def __init__(self, api: ApiCalls) -> None:
        self._api = api
        self._work: asyncio.Queue[tuple[str, Thing]] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []

    def report(self, kind: str, pod: Thing) -> None:
        """As a Follower does. Raises what ended a worker, also to callers that wait for the follower."""
        for worker in self._workers:
            if worker.done():
                worker.result()
        if kind == "DELETED" or "nodeName" not in pod["spec"]:
            return
        if "deletionTimestamp" in pod["metadata"]:
            self._work.put_nowait(("end", pod))
        elif pod["status"]["phase"] == "Pending" and "startTime" not in pod["status"]:
            self._work.put_nowait(("start", pod))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[SimulatedKubelet]:
        """Until the end of the block."""
        self._workers = [asyncio.create_task(self._run()) for _ in range(AT_ONCE // 4)]
        try:
            yield self
        finally:
            for worker in self._workers:
                worker.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            what, pod = await self._work.get()
            if what == "end":
                await self._api.delete(pod, gracePeriodSeconds=0, preconditions={"uid": pod["metadata"]["uid"]})
                continue
            status = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
            change = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
            with suppress(ApiRefused):  # it is gone, or another has its name
                await self._api.patch(f"{path_of(pod)}/status", change)


@dataclass(frozen=True, slots=True)
class WatchedCluster:
    """What every change is passed to, in this order: `ledger`, and `kubelet` where pods run."""

    api: ApiCalls
    follower: Follower
    ledger: AssignmentLedger
    kubelet: SimulatedKubelet

    async def add(self, *nodes: NodeBuilder, made: Callable[[NodeBuilder], Thing] = node_object) -> None:
        """Nodes, whose GPUs the ledger knows. `made` makes the object of one."""
        self.ledger.gpus |= {one.name: {gpu.uuid: gpu.mib for gpu in one.gpus} for one in nodes}
        await self.api.create(NODES, map(made, nodes))


@asynccontextmanager
async def watched(
    api: ApiCalls, *nodes: NodeBuilder, made: Callable[[NodeBuilder], Thing] = node_object, runs: bool = True
) -> AsyncIterator[WatchedCluster]:
    """A cluster with these nodes and no pods. `runs`: pods that are bound run; else the test may report them to `kubelet`."""
    cluster = WatchedCluster(api, Follower(api), AssignmentLedger({}), SimulatedKubelet(api))
    cluster.follower.reported = [cluster.ledger.report, cluster.kubelet.report] if runs else [cluster.ledger.report]
    async with cluster.kubelet.running(), cluster.follower.running():
        await cluster.add(*nodes, made=made)
        yield cluster


@asynccontextmanager
async def priority_classes(api: ApiCalls, **values: int) -> AsyncIterator[None]:
    """Until the end of the block."""
    for name, value in values.items():
        await api.call("POST", CLASSES, {"metadata": {"name": name}, "value": value})
    try:
        yield
    finally:
        for name in values:
            await api.call("DELETE", f"{CLASSES}/{name}")
