"""Why a component is not ready, as its /readyz reports: one list for all components, with what to do.

docs/reference/readiness.md is this table; a test compares the two. Why a limit is not enforced is another question: `vgpu.api.enforcement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Missing(StrEnum):
    """What a component waits for. The value is the sentence that /readyz returns; `{}` stands for the detail."""

    LIBRARY = "the library is not installed: {}"
    NVML = "NVML does not answer: {}"
    NVML_SOCKET = "the arbiter cannot query NVML: {}"
    PROBE = "NVML was not queried yet"
    PODS = "the pods of this node are not known yet"
    CDI = "containers get no devices: {}"
    OWNERS = "GPUs are not offered: {}"
    INVENTORY = "the inventory is not published: {}"
    KUBELET = "the kubelet does not watch our resources yet"
    CACHE = "cache not synced: {} are still being listed"
    NO_CERTIFICATE = "no serving certificate yet"
    CERTIFICATE_EXPIRED = "the serving certificate expired at {}"
    POOL = "the host pool is not ready: {}"
    PORT = "the port is not open yet"
    STOPPING = "stopping"

    def because(self, detail: object = "") -> str:
        """The sentence."""
        return self.value.format(detail)


@dataclass(frozen=True, slots=True)
class MissingText:
    """Which components report it, and what to do, as a sentence for the operator."""

    components: tuple[str, ...]
    do: str


_PLUGIN, _EXTENDER, _WEBHOOK = ("device plugin",), ("extender",), ("webhook",)
_WAIT: Final = "Nothing: it takes some seconds. If it stays, look at the log."

TABLE: Final[Mapping[Missing, MissingText]] = {
    Missing.LIBRARY: MissingText(
        _PLUGIN, "Free space in the state folder, or make it writable. The plugin tries again every 5 s."
    ),
    Missing.NVML: MissingText(
        _PLUGIN, "Look at `dmesg` and run `nvidia-smi` on the node; check `driver.root` of the chart."
    ),
    Missing.NVML_SOCKET: MissingText(
        _PLUGIN, "Free space in the state folder, or make it writable. The plugin tries again every 5 s."
    ),
    Missing.PROBE: MissingText(_PLUGIN, "Nothing: without persistence mode the driver takes tens of seconds to start."),
    Missing.PODS: MissingText(_PLUGIN, "Check that the node reaches the API server."),
    Missing.CDI: MissingText(
        _PLUGIN, "Switch CDI on in the container runtime, then start a pod with a share: docs/operations/cdi.md."
    ),
    Missing.OWNERS: MissingText(
        _PLUGIN,
        "Check that the kubelet's pod resources socket is there, and that the plugin may list and watch resourceslices: docs/operations/beside-nvidia.md.",
    ),
    Missing.INVENTORY: MissingText(
        _PLUGIN, "Check that the node reaches the API server and that the plugin may patch its node."
    ),
    Missing.KUBELET: MissingText(_PLUGIN, "Check `kubeletDir` of the chart and the kubelet's log."),
    Missing.CACHE: MissingText(
        _EXTENDER, "Check that the pod reaches the API server; a large cluster takes some seconds."
    ),
    Missing.NO_CERTIFICATE: MissingText(_WEBHOOK, "Look at the webhook's log, or at cert-manager's Certificate."),
    Missing.CERTIFICATE_EXPIRED: MissingText(_WEBHOOK, "Look at the webhook's log, or at cert-manager's Certificate."),
    Missing.POOL: MissingText(
        ("host pool",),
        "A large pool takes half a minute. Otherwise do what the reason names: docs/operations/host-pool.md.",
    ),
    Missing.PORT: MissingText(_WEBHOOK, _WAIT),
    Missing.STOPPING: MissingText((*_EXTENDER, *_WEBHOOK), "Nothing: the pod is being replaced."),
}


def page() -> str:
    """The table of docs/reference/readiness.md."""
    rows = [
        f"| {missing.because('...')} | {' and '.join(TABLE[missing].components)} | {TABLE[missing].do} |"
        for missing in Missing
    ]
    return "\n".join(("| `/readyz` returns | component | what to do |", "|---|---|---|", *rows))
