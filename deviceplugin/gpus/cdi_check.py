"""Does this node's container runtime carry out CDI devices? If not, the operator is told on the node, in /readyz, and the user on the pod.

A runtime with CDI switched off starts a container without its devices and reports nothing: the program in it finds no GPU. Two things show it. The runtime's
version, on the node object, says it for old runtimes and says that a setting decides for containerd 1.7 (`vgpu.api.runtime`). And a container that was started
and has its grant, but no device node, proves it; one that has both proves the opposite. What was proved stands until another container or another version shows otherwise.

Used from the event loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Literal, Protocol

import structlog

from kube.objects import Pod
from vgpu.api.runtime import SETTING_TEXT, CdiSupport, cdi_support, shown

CDI_IGNORED: Final = "CdiIgnored"
"""An Event's reason: the runtime starts containers without their CDI devices, or has no CDI."""
CDI_SETTING: Final = "CdiNeedsSetting"
"""An Event's reason: whether containers get their devices depends on a setting of the runtime."""
DEVICE: Final = "nvidiactl"
"""The device node that every container with a GPU has, whoever wrote the CDI specification."""

log = structlog.get_logger("deviceplugin.gpus.cdi_check")


class CdiReports(Protocol):
    """Whom it is reported to, as `deviceplugin.reports.Reports`."""

    def cdi_on_node(self, reason: str, note: str, level: Literal["Normal", "Warning"]) -> None: ...

    def cdi_ignored(self, pod: Pod, container: str, note: str) -> None: ...


class CdiCheck:
    """Of one node. `used` says whether containers get their GPUs as CDI devices now; `changed_since` as `offer.Offer.changed_since`."""

    def __init__(
        self, reports: CdiReports, used: Callable[[], bool], changed_since: Callable[[int], Awaitable[int]]
    ) -> None:
        self._reports, self._used, self._changed_since = reports, used, changed_since
        self._version = ""
        self._proved: bool | None = None
        """Did the last container that was looked at have its devices? None: none was."""
        self._told: set[str] = set()
        """Versions of which the node's Events tell already."""

    @property
    def failing(self) -> str:
        """Why containers get no devices; empty where they do, or where nothing shows that they do not."""
        if not self._used():
            return ""
        support, name = cdi_support(self._version), shown(self._version)
        if self._proved is False:
            return f"a container was started without its devices by {name}; {_advice(support)}"
        if support is CdiSupport.NONE and self._proved is None:
            return f"{name} does not know CDI; {_advice(support)}"
        return ""

    async def run(self) -> None:
        """Until cancelled. Which access mode is used is known after NVML has answered."""
        version = 0
        while True:
            version = await self._changed_since(version)
            self.described()

    def runtime(self, version: str) -> None:
        """As the node object reports it; empty: it does not."""
        if version and version != self._version:
            if self._version:
                log.info("the container runtime has another version", version=version, was=self._version)
                self._proved = None  # it was restarted: its setting may have changed with it
            self._version = version
            self.described()

    def described(self) -> None:
        """Report what the version alone shows, once for each."""
        support = cdi_support(self._version)
        if not self._version or self._version in self._told or self._proved is not None or not self._used():
            return
        self._told.add(self._version)
        if support is CdiSupport.SETTING:
            note = f"access mode cdi: {shown(self._version)} starts containers without their GPUs unless CDI is switched on: {SETTING_TEXT}"
            self._reports.cdi_on_node(CDI_SETTING, note, "Normal")
        elif support is CdiSupport.NONE:
            self._reports.cdi_on_node(CDI_IGNORED, f"access mode cdi: {self.failing}", "Warning")

    def started(self, pod: Pod | None, container: str, *, has_devices: bool) -> None:
        """A container that has its grant was looked at."""
        if not self._used():
            return
        was, self._proved = self._proved, has_devices
        if has_devices:
            if was is False:
                log.info("containers get their CDI devices", runtime=self._version)
            return
        why = self.failing
        log.error("a container was started without its CDI devices", container=container, why=why)
        if pod is not None:
            self._reports.cdi_ignored(
                pod,
                container,
                f"container {container} finds no GPU: the container runtime ignored its CDI devices. {why}",
            )
        if was is not False:
            self._reports.cdi_on_node(CDI_IGNORED, f"access mode cdi: {why}", "Warning")


def _advice(support: CdiSupport) -> str:
    return SETTING_TEXT if support is CdiSupport.SETTING else "see docs/operations/cdi.md, or use `accessMode=nvidia`"
