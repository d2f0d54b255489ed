"""Who was preempted lately, kept in a ConfigMap: an extender that is started again, or takes over from another, spares whom that one spared.

One small write a second at most, and only while pods are preempted. Whatever goes wrong with it is logged and tried again: scheduling
does not wait for it. A write goes by what was last told: when another extender has written since, it is refused, and comes again once
that is known.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import structlog

from extender.preemption.history import PreemptionHistory
from kube import paths
from kube.cache import Cache, Statistics
from kube.client import Client
from kube.errors import ApiError
from kube.objects import ConfigMap
from kube.patch import merge

KEY: Final = "preempted.json"
EACH_S: Final = 1.0
"""Between writes, and looks whether there is something to write."""

log = structlog.get_logger("extender.preemption.history_store")


class HistoryStore:
    """`where` is `NAMESPACE/NAME` of the ConfigMap; with an empty one nothing is kept."""

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
        """Is anything kept?"""
        return bool(self._name)

    def statistics(self) -> Statistics:
        """What its cache has seen."""
        return self._cache.statistics()

    async def read(self) -> None:
        """Return when what was written before is known."""
        if self.enabled:
            await self._cache.has_synced.wait()

    async def run(self) -> None:
        """Until cancelled."""
        if not self.enabled:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._cache.run())
            group.create_task(self._write_down())

    def _reported(self, _: ConfigMap | None, new: ConfigMap | None) -> None:
        text = ((new.data if new is not None else None) or {}).get(KEY)
        if text is None:
            return
        try:
            self._history.remembered(text)
        except msgspec.MsgspecError as error:
            log.warning(
                "who was preempted cannot be read back", config_map=f"{self._namespace}/{self._name}", error=str(error)
            )

    async def _write_down(self) -> None:
        await self.read()
        written = 0
        while True:
            await asyncio.sleep(self._each_s)
            changes = self._history.changes
            if changes == written:
                continue
            try:
                await self._write(self._history.written().decode())
                written = changes
            except ApiError as error:
                if error.conflict or error.not_found:
                    log.info("who was preempted is written down later: the ConfigMap has changed", error=str(error))
                else:
                    log.warning("who was preempted was not written down", error=str(error))

    async def _write(self, text: str) -> None:
        """All that is known: what another extender wrote was told by the watch, and is in it. Raises ApiError."""
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
