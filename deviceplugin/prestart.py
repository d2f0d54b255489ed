"""Before a container starts: make sure whose devices these are, write its grant, and see that what it mounts is there.

Here the kubelet's own books name the pod for the first time, so this is where guesses end. Whatever is missing or wrong fails the
start with a sentence: a container without its library, its grant or its arbiter does not run at all.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import structlog

from deviceplugin.allocate import Tenant
from deviceplugin.grants import Grants, Record
from deviceplugin.ledger import Ledger
from deviceplugin.pods import NodePods, ask_of, initialized
from kube.errors import ApiError
from kube.objects import Pod
from vgpu.contract import grant_for, grant_key
from vgpu.errors import Refused
from vgpu.inventory import Inventory
from vgpu.names import DEFAULT_GUARD, Guard, Names, stricter

WATCH_WAIT_S: Final = 2.0
"""For the watch to bring the pod before it is asked for by name."""
ARBITER_WAIT_S: Final = 5.0
"""For the arbiter to listen in a new folder. It answers within milliseconds unless it is being restarted."""
ARBITER_POLL_S: Final = 0.01

log = structlog.get_logger("deviceplugin.prestart")


class Books(Protocol):
    """The kubelet's own books."""

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
        """As `podresources.holders` answers."""


@dataclass(frozen=True, slots=True)
class Starting:
    """The container that is about to start."""

    pod: Pod
    tenant: Tenant
    container: str


class Unserved(Refused):
    """The start was refused; `pod` is who it was for, when known."""

    def __init__(self, text: str, pod: Pod | None = None) -> None:
        super().__init__(text)
        self.pod = pod


class PodGone(Unserved):
    """The API server answers, and has no such pod that could start anything. It is final for this pod."""


class ApiAway(Unserved):
    """Nobody knows whether the pod is still there. The kubelet tries the start again by itself."""

    def __init__(self, namespace: str, name: str, error: ApiError) -> None:
        super().__init__(
            f"pod {namespace}/{name} is not known here yet, and the API server does not tell whether it is there ({error}): this start is refused, and the kubelet tries it again"
        )
        self.who = namespace, name


class Swapped(Unserved):
    """The container was given the devices of another pod of the same size: only a new pod can mend that."""


def which_container(
    tenant: Tenant,
    listed: Collection[str],
    quantity: int,
    resource: str,
    names: Names,
    *,
    initialized: bool,
    starts: int,
) -> str | None:
    """The container of the pod that starts with these devices.

    `listed` are those that the kubelet's books name; it leaves out init containers that run to completion, whose devices the app
    containers get again. Several may so have exactly the same devices: they start in order, and `starts` of them did before, until
    the pod is `initialized`.
    """
    in_order = [
        ask.container
        for ask in tenant.asks
        if ask.container in listed or (ask.init and not initialized and ask.resources(names).get(resource) == quantity)
    ]
    return in_order[min(starts, len(in_order) - 1)] if in_order else None


class PreStart:
    """Serves PreStartContainer for all resources."""

    def __init__(
        self,
        names: Names,
        unit_mib: int,
        *,
        pods: NodePods,
        books: Books,
        ledger: Ledger,
        grants: Grants,
        inventory: Callable[[], Inventory],
        fetch: Callable[[str, str], Awaitable[Pod | None]],
        guard: Guard = DEFAULT_GUARD,
        clear: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._names, self._unit_mib = names, unit_mib
        self._pods, self._books, self._ledger, self._grants = pods, books, ledger, grants
        self._inventory, self._fetch, self._now = inventory, fetch, now
        self._guard, self._clear = guard, clear
        self._starts: dict[tuple[str, frozenset[str]], int] = {}

    async def __call__(self, resource: str, ids: Sequence[str]) -> None:
        """Make a container with these devices ready to start. Raises Refused, KubeletSilent, OSError."""
        if resource == self._names.gpu_core:
            return  # its container has gpu-mem too, and that call does the work
        try:
            starting = await self._who(resource, ids)
        except ApiAway as away:
            if not self._granted_before(ids, away.who):
                raise
            log.warning("the API server is away: the container starts with the grant it has", error=str(away))
            await self._arbiter_listens(grant_key(ids))
            return
        if resource == self._names.gpu_mem:
            await self._grant(starting, ids)
        else:
            self._verify_devices(starting, self._given(starting, resource, ids))

    def forget_the_gone(self) -> None:
        """Drop what is remembered of pods that are no longer there."""
        alive = self._pods.pods().keys()
        self._starts = {key: count for key, count in self._starts.items() if key[0] in alive}

    async def _who(self, resource: str, ids: Sequence[str]) -> Starting:
        pod_name, listed = await self._books.holders(resource, ids)
        if pod_name is None:
            pod_name = self._guessed(resource, ids)
        if pod_name is None:
            raise Unserved(f"the kubelet's books name no container with these {len(ids)} devices of {resource}")
        pod, tenant = await self._tenant(*pod_name)
        key = (pod.uid, frozenset(ids))
        starts = self._starts.get(key, 0)
        container = which_container(
            tenant, listed, len(ids), resource, self._names, initialized=initialized(pod), starts=starts
        )
        if container is None:
            raise Unserved(f"{tenant} has no container that asks for {len(ids)} {resource}", pod)
        self._starts[key] = starts + 1
        return Starting(pod, tenant, container)

    def _guessed(self, resource: str, ids: Sequence[str]) -> tuple[str, str] | None:
        """Only an init container has these devices: whom we gave them to is all that is known."""
        for uid, _ in self._ledger.holders(resource, ids):
            if pod := self._pods.pod(uid):
                return pod.metadata.namespace, pod.metadata.name
        written = self._grants.record(grant_key(ids)) or self._grants.read(grant_key(ids))
        return (written.namespace, written.pod) if written else None

    async def _tenant(self, namespace: str, name: str) -> tuple[Pod, Tenant]:
        """The pod and its assignment: from the watch if that has it within `WATCH_WAIT_S`, else asked of the API server."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WATCH_WAIT_S):
                while True:
                    pod = self._pods.find(namespace, name)
                    tenant = self._pods.tenant(pod.uid) if pod else None
                    if (
                        pod and tenant and not tenant.leaving
                    ):  # a leaving pod starts nothing: its successor has the name
                        return pod, tenant
                    await self._pods.changed()
        try:
            pod = await self._fetch(namespace, name)
        except ApiError as error:
            raise ApiAway(namespace, name, error) from None
        if found := self._readable(pod):
            return found
        if pod is None:
            raise PodGone(f"pod {namespace}/{name} is gone: the API server has none of that name")
        if pod.finished:
            raise PodGone(f"pod {pod.key} is gone: it ended in phase {pod.status.phase}", pod)
        known = self._pods.read(pod)
        why = "it asks for nothing of Tangram's" if known is None or isinstance(known, Tenant) else known.why
        raise Unserved(f"pod {pod.key} cannot be granted anything: {why}", pod)

    def _readable(self, pod: Pod | None) -> tuple[Pod, Tenant] | None:
        tenant = self._pods.read(pod) if pod else None
        return (pod, tenant) if pod and isinstance(tenant, Tenant) else None

    async def _grant(self, starting: Starting, ids: Sequence[str]) -> None:
        key, tenant, container = grant_key(ids), starting.tenant, starting.container
        ask = ask_of(tenant.asks, container)
        if ask is None or ask.units != len(ids):
            raise Unserved(
                f"{tenant}: container {container} has {len(ids)} devices of {self._names.gpu_mem} and asks for {ask.units if ask else 0}",
                starting.pod,
            )
        missing = self._grants.restore(key)
        if missing:
            log.warning("what a container mounts was missing and is restored", pod=str(tenant), missing=missing)
        record = self._grants.record(key)
        given = record.cards if record else tenant.assignment.uuids(container)
        self._verify_devices(starting, frozenset(given))
        grant = grant_for(
            tenant.assignment, container, namespace=tenant.namespace, pod=tenant.name, uid=tenant.uid,
            guard=stricter(tenant.guard, self._guard), clear=self._clear,
        )  # fmt: skip
        self._own(starting, ids, record)
        self._grants.write(key, grant)
        await self._arbiter_listens(key, starting.pod)

    def _own(self, starting: Starting, ids: Sequence[str], record: Record | None) -> None:
        """Correct the record where the guess at Allocate was wrong."""
        tenant = starting.tenant
        if record is None or (record.uid, record.container) != (tenant.uid, starting.container):
            cards = record.cards if record else tenant.assignment.uuids(starting.container)
            at = record.at if record else self._now()
            self._grants.update(
                Record(tuple(ids), tenant.uid, tenant.namespace, tenant.name, starting.container, cards, at)
            )

    def _given(self, starting: Starting, resource: str, ids: Sequence[str]) -> frozenset[str]:
        """UUIDs of the cards whose devices Allocate gave out with these IDs."""
        tenant = starting.tenant
        for uid, container in self._ledger.holders(resource, ids):
            if (uid, container) == (tenant.uid, starting.container):
                return frozenset(tenant.assignment.uuids(container))
        return frozenset(ids)

    def _verify_devices(self, starting: Starting, given: frozenset[str]) -> None:
        """With CDI the devices came from Allocate's guess: they must be the assigned ones (invariant I2)."""
        assigned = frozenset(starting.tenant.assignment.uuids(starting.container))
        if self._inventory().access == "cdi" and given != assigned:
            raise Swapped(
                f"{starting.tenant}: container {starting.container} was given {', '.join(sorted(given))} and is assigned {', '.join(sorted(assigned))}: the kubelet mixed up two pods of the same size, so this one has to be replaced",
                starting.pod,
            )

    def _granted_before(self, ids: Sequence[str], who: tuple[str, str]) -> bool:
        grant = self._grants.read(grant_key(ids))
        return grant is not None and (grant.namespace, grant.pod) == who

    async def _arbiter_listens(self, key: str, pod: Pod | None = None) -> None:
        path = self._grants.socket(key)
        with suppress(TimeoutError):
            async with asyncio.timeout(ARBITER_WAIT_S):
                while not listens(path):  # noqa: ASYNC110 (another process makes it: there is no event to wait for)
                    await asyncio.sleep(ARBITER_POLL_S)
                return
        raise Unserved(
            f"the arbiter does not listen on {path} after {ARBITER_WAIT_S:g} s: no memory could be leased, so the container is not started",
            pod,
        )


def listens(path: Path) -> bool:
    """Does anybody accept connections there?"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full: it is there
        except OSError:
            return False
    return True
