"""The five programs as the reference sees them: the model of their settings and a registry as they fill it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from arbiter.metrics import ArbiterCollector
from arbiter.server import ArbiterServer
from arbiter.settings import ArbiterSettings
from deviceplugin.metrics import Metrics as DevicePluginMetrics
from deviceplugin.settings import DevicePluginSettings
from extender.metrics import Metrics as ExtenderMetrics
from extender.settings import Settings as ExtenderSettings
from extender.state import State
from hostpool.metrics import Metrics as HostPoolMetrics
from hostpool.settings import HostPoolSettings
from kube.cache import CacheStatistics
from observe.options import ProgramSettings
from vgpu.api.names import DEFAULT
from webhook.metrics import Metrics as WebhookMetrics
from webhook.settings import Settings as WebhookSettings


@dataclass(frozen=True, slots=True)
class Program:
    """One program. `port` is the setting for the port of its metrics."""

    package: str
    runs: str
    settings: type[ProgramSettings]
    port: str
    registry: Callable[[], CollectorRegistry]


def _extender() -> CollectorRegistry:
    seen = CacheStatistics(0, 0, True, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0.0)
    return ExtenderMetrics(State(time.monotonic, names=DEFAULT), lambda: {"pods": seen}).registry


def _arbiter() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    with tempfile.TemporaryDirectory() as folder:
        server = ArbiterServer(Path(folder))
        registry.register(ArbiterCollector(server))
        server.stop()
        server.run()
    return registry


PROGRAMS: Final = (
    Program("webhook", "in each pod of the Deployment `webhook`", WebhookSettings, "metrics_port", lambda: WebhookMetrics().registry),
    Program("extender", "beside kube-scheduler, in each pod of the Deployment `scheduler`", ExtenderSettings, "metrics_port", _extender),
    Program("deviceplugin", "in the DaemonSet on each GPU node", DevicePluginSettings, "metrics_port", lambda: DevicePluginMetrics().registry),
    Program("arbiter", "in the DaemonSet on each GPU node", ArbiterSettings, "metrics_port", _arbiter),
    Program("hostpool", "in the DaemonSet of the host pool, on each GPU node, where `burst.hostPool` is set", HostPoolSettings, "metrics_port", lambda: HostPoolMetrics().registry),
)  # fmt: skip
