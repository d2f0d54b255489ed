"""The owners of Kueue's Workloads: by namespace, the UIDs that their ownerReferences name.

One watch, of metadata alone. Kueue serves the resource as v1beta2, or as v1beta1 before its release 0.15. The API server is queried for the
version at the start, and again whenever the watch falls silent, as it does when a version is no longer served. While a namespace is `unsure`
its pods count as part of Workloads: the list is not complete yet, the watch is silent, or a Workload cannot be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Set
from types import MappingProxyType
from typing import Final

import msgspec
import structlog

from kube.cache import Cache, CacheStatistics
from kube.client import Client
from kube.errors import ApiError
from kube.events import ObjectReference
from kube.objects import Metadata, MetadataOnly, OwnerReference
from kube.paths import KUEUE, KUEUE_GROUP, of_kind, workloads

VERSIONS: Final = ("v1beta2", "v1beta1")
"""In which the resource may be served, the preferred one first. Each has the same metadata."""

SILENT_S: Final = 180.0
"""A watch that has received nothing for so long may have missed a Workload. The API server sends a bookmark about every minute."""

CHECK_S: Final = 10.0
"""Between checks whether the watch is silent for half of that, and between tries to find out which version is served. Guessed."""

NO_OWNERS: Final[Mapping[str, Set[str]]] = MappingProxyType({})

log = structlog.get_logger("extender.preemption.kueue_workloads")


class _ServedVersion(msgspec.Struct, frozen=True):
    version: str = ""


class _Group(msgspec.Struct, frozen=True):
    """APIGroup."""

    versions: tuple[_ServedVersion, ...] = ()


class KueueWorkloads:
    """`on_change` is called with each namespace in which a Workload was added, removed or changed its owners."""

    def __init__(
        self,
        client: Client,
        clock: Callable[[], float],
        on_change: Callable[[str], object],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client, self._clock, self._on_change, self._sleep = client, clock, on_change, sleep
        self._owners: dict[str, dict[str, set[str]]] = {}
        """Namespace -> UID of an owner -> names of its Workloads."""
        self._version, self._cache = VERSIONS[0], self._cache_of(VERSIONS[0])

    @property
    def has_synced(self) -> bool:
        """Was the list ever complete?"""
        return self._cache.has_synced.is_set()

    def statistics(self) -> CacheStatistics:
        """What the cache has seen, since the version that is served now is watched."""
        return self._cache.statistics()

    def owners(self, namespace: str) -> Mapping[str, Set[str]]:
        """UIDs that Workloads of a namespace name as their owners -> names of these Workloads."""
        return self._owners.get(namespace, NO_OWNERS)

    def find(self, key: str) -> Metadata | None:
        """Of the Workload `namespace/name`; None when it is not known."""
        found = self._cache.get(key)
        return found.metadata if found is not None else None

    def reference(self, one: Metadata) -> ObjectReference:
        """What an Event about a Workload names."""
        return ObjectReference(f"{KUEUE_GROUP}/{self._version}", "Workload", one.namespace, one.name, one.uid)

    def path(self, one: Metadata) -> str:
        """Of a Workload, in the version that is served."""
        return of_kind(f"{KUEUE_GROUP}/{self._version}", "workloads", one.namespace, one.name)

    def unsure(self, namespace: str) -> bool:
        """Might there be a Workload in this namespace that is not known?"""
        if self._is_silent():
            return True
        return any(key in ("", namespace) or key.startswith(f"{namespace}/") for key in self._cache.unknown)

    def doubts(self) -> frozenset[str]:
        """Namespaces in which there might be a Workload that is not known; an empty name stands for all."""
        return frozenset(key.partition("/")[0] for key in self._cache.unknown) | ({""} if self._is_silent() else set())

    def _is_silent(self) -> bool:
        return not self.has_synced or self._clock() - self._cache.heard_s > SILENT_S

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._version = await self._served()
            self._begin_anew()
            watching = asyncio.create_task(self._cache.run())
            try:
                await self._until_another_is_served(watching)
            finally:
                watching.cancel()
                await asyncio.wait([watching])

    def _begin_anew(self) -> None:
        """Nothing is known until the new watch's list is complete."""
        self._cache = self._cache_of(self._version)
        known = list(self._owners)
        self._owners.clear()
        for namespace in known:
            self._on_change(namespace)

    async def _until_another_is_served(self, watching: asyncio.Task[None]) -> None:
        began_s = self._clock()
        while not watching.done():
            await self._sleep(CHECK_S)
            silent_s = self._clock() - max(self._cache.heard_s, began_s)
            if silent_s > SILENT_S / 2 and not await self._is_still_served():
                return
        watching.result()

    async def _is_still_served(self) -> bool:
        """Is the version that is watched still the one to watch?"""
        try:
            return self._chosen(await self._client.get(KUEUE)) in (None, self._version)
        except (ApiError, msgspec.MsgspecError, UnicodeDecodeError):
            return True  # as far as is known

    async def _served(self) -> str:
        """The version to watch, once the API server names one."""
        while True:
            try:
                version = self._chosen(await self._client.get(KUEUE))
                why = f"none of the versions {', '.join(VERSIONS)} is served"
            except (ApiError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                version, why = None, str(error)[:300]
            if version is not None:
                return version
            log.warning("Kueue's Workloads cannot be read: no pod is evicted", error=why)
            await self._sleep(CHECK_S)

    def _chosen(self, body: bytes) -> str | None:
        served = {one.version for one in msgspec.json.decode(body, type=_Group).versions}
        return next((one for one in VERSIONS if one in served), None)

    def _cache_of(self, version: str) -> Cache[MetadataOnly]:
        return Cache(
            self._client,
            workloads(version),
            MetadataOnly,
            on_change=self._changed,
            shrink=_small,
            metadata_only=True,
            clock=self._clock,
        )

    def _changed(self, old: MetadataOnly | None, new: MetadataOnly | None) -> None:
        if old is not None and new is not None and old.metadata.owner_references == new.metadata.owner_references:
            return
        for one, is_there in ((old, False), (new, True)):
            if one is not None:
                self._note(one.metadata, is_there=is_there)
                self._on_change(one.metadata.namespace)

    def _note(self, one: Metadata, *, is_there: bool) -> None:
        owners = self._owners.setdefault(one.namespace, {})
        for owner in one.owner_references:
            names = owners.setdefault(owner.uid, set())
            if is_there:
                names.add(one.name)
            else:
                names.discard(one.name)
            if not names:
                del owners[owner.uid]
        if not owners:
            del self._owners[one.namespace]


def _small(one: MetadataOnly) -> MetadataOnly:
    meta = one.metadata
    owners = tuple(OwnerReference(uid=owner.uid) for owner in meta.owner_references)
    return MetadataOnly(Metadata(meta.name, meta.namespace, meta.uid, meta.resource_version, owner_references=owners))
