"""The annotation of a node about bursts, as it should be now. `vgpu.api.burst_summary` has what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from deviceplugin.gpus.host_pool import HostPoolWatch
from deviceplugin.gpus.offer import Offer
from deviceplugin.pods.burst import BurstUpdater
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.settings import DevicePluginSettings
from vgpu.api.burst_summary import PoolState, summary_of, text_of

NO_POOL_SET: Final = "burst.hostPool is not set"


class BurstAnnotation:
    """See the module."""

    def __init__(
        self, settings: DevicePluginSettings, offer: Offer, pods: NodePods, bursts: BurstUpdater, pool: HostPoolWatch
    ) -> None:
        self._settings, self._offer, self._pods, self._bursts, self._pool = settings, offer, pods, bursts, pool

    def __call__(self) -> Mapping[str, str | None]:
        """Key -> value; None = it should not be there. As long as the pods are not known, it stays as it is."""
        key, size = self._settings.names.bursts, self._settings.host_pool
        if not self._settings.burst_enabled:
            return {key: None}
        if not self._pods.synced:
            return {}
        pool = PoolState(size, self._pool.missing) if size else PoolState("0", NO_POOL_SET)
        return {key: text_of(summary_of(self._offer.inventory(), self._bursts.limits_of_all(), pool))}
