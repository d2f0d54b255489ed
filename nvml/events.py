"""XID events as the driver reports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nvml import handles
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.messages import Xid
from nvml.naming import naming

MOST: Final = 64
"""Events of one call. More come at the next."""


class Events:
    """XID events of some GPUs."""

    def __init__(self, uuids: Iterable[str]) -> None:
        self.unwatched: dict[str, str] = {}
        """UUID -> why its events cannot be had; queries are all there is for these."""
        with naming("the event set"):
            self._set: Any = nv.nvmlEventSetCreate()
        for uuid in uuids:
            try:
                with naming(f"events of GPU {uuid}"):
                    handle = handles.of_uuid(uuid)
                    nv.nvmlDeviceRegisterEvents(handle, nv.nvmlEventTypeXidCriticalError, self._set)
            except NvmlError as error:
                self.unwatched[uuid] = str(error)

    def wait(self, timeout_ms: int) -> Xid | None:
        """The next XID, or None when none came in time. Raises NvmlError."""
        with naming("waiting for XID events"):
            try:
                event = nv.nvmlEventSetWait_v2(self._set, timeout_ms)
            except nv.NVMLError_Timeout:
                return None
        if event.eventType != nv.nvmlEventTypeXidCriticalError:
            return None
        with naming("the GPU of an XID event"):
            return Xid(str(nv.nvmlDeviceGetUUID(event.device)), int(event.eventData))

    def seen(self) -> tuple[Xid, ...]:
        """Those that came since the last call; never waits. Raises NvmlError."""
        found: list[Xid] = []
        while len(found) < MOST and (event := self.wait(0)) is not None:
            found.append(event)
        return tuple(found)

    def close(self) -> None:
        """Free the set."""
        with naming("the event set"):
            nv.nvmlEventSetFree(self._set)
