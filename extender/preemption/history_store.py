"""Store the preemption history in a ConfigMap, so that an extender that restarts, or takes over, protects the same pods.

At most one small write a second, and only while pods are preempted. Errors are logged and retried: scheduling does not wait for the store. A
write names the version that the watch showed last. If another extender has written since, the API server refuses it, and it is retried once
the watch shows the new version.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog

from extender.preemption.history import PreemptionHistory
from kube import paths
from kube.cache import Cache, CacheStatistics
from kube.client import Client
from kube.errors import ApiError
from kube.objects import ConfigMap
from kube.patch import merge

KEY: Final = "preempted.json"
EACH_S: Final = 1.0
"""Between writes, and checks whether there is something to write."""

log = structlog.get_logger("extender.preemption.history_store")


class HistoryStore:
    """`where` is `NAMESPACE/NAME` of the ConfigMap; if empty, nothing is stored."""

    def __init__(self, client: Client, history: PreemptionHistory, where: str, *, each_s: float = EACH_S) -> None:
        self._client, self._history, self._each_s = client, history, each_s
        self._namespace, _, self._name = where.partition("/")
        self._cache = Cache(
            client,
            paths.config_map(self._namespace),
            ConfigMap,
            on_change=self._reported,
            field_selector=f"metadata.name={self._name}",
        )

    @property
    def enabled(self) -> bool:
        """Is anything stored?"""
        return bool(self._name)

    def statistics(self) -> CacheStatistics:
        """What its cache has seen."""
        return self._cache.statistics()

    async def read(self) -> None:
        """Return when the stored history is known."""
        if self.enabled:
            await self._cache.has_synced.wait()

    async def run(self) -> None:
        """Until cancelled."""
        if not self.enabled:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run())
            group.create_task(self._write_changes())

    def _reported(self, _: ConfigMap | None, new: ConfigMap | None) -> None:
        text = ((new.data if new is not None else None) or {}).get(KEY)
        if text is None:
            return
        try:
            self._history.read_back(text)
        except msgspec.MsgspecError as error:
            log.warning(
                "the preemption history cannot be read back",
                config_map=f"{self._namespace}/{self._name}",
                error=str(error),
            )

    async def _write_changes(self) -> None:
        await self.read()
        written = 0
        while True:
            await asyncio.sleep(self._each_s)
            changes = self._history.changes
            if changes == written:
                continue
            try:
                await self._write(self._history.to_json().decode())
                written = changes
            except ApiError as error:
                if error.conflict or error.not_found:
                    log.info("the preemption history is written later: the ConfigMap has changed", error=str(error))
                else:
                    log.warning("the preemption history was not written", error=str(error))

    async def _write(self, text: str) -> None:
        """Write all that is known, with what the watch has shown of other extenders. Raises ApiError."""
        known = self._cache.get(f"{self._namespace}/{self._name}")
        if known is None:
            body = {
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": self._name, "namespace": self._namespace}, "data": {KEY: text},
            }  # fmt: skip
            await self._client.send("POST", paths.config_map(self._namespace), body)
            return
        change = {"metadata": {"resourceVersion": known.metadata.resource_version}, "data": {KEY: text}}
        await merge(self._client, paths.config_map(self._namespace, self._name), change)
