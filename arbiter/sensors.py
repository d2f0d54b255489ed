"""What the sensors of the GPUs show that containers share, for `tangramctl top`.

A thread of its own reads them: through the device plugin, which answers with its last health query and the heat class, or from the arbiter's own child where
there is no plugin; then the heat class is determined here. Nothing is decided by it. A reading that is older than `STALE_S` is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import structlog

from arbiter.reader_thread import ReaderThread
from nvml.errors import NvmlError
from nvml.messages import HealthReply
from nvml.queries import Nvml
from vgpu.api.inventory import NORMAL
from vgpu.health.conditions import Reading, slowdown_names
from vgpu.health.heat import NodeHeat
from vgpu.health.link_errors import all_errors
from vgpu.protocol.status import SensorStatus

PERIOD_S: Final = 2.0
"""Guessed: `top` shows the last second, and the device plugin reads every 5 s by default."""
STALE_S: Final = 15.0
"""Guessed: three health queries of the device plugin."""
_log = structlog.get_logger()


class GpuSensors:
    """See the module. Only its thread uses `nvml`. `uuids`: the GPUs that containers share now, for any thread."""

    def __init__(
        self, nvml: Nvml, uuids: Callable[[], Collection[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._uuids, self._clock = nvml, uuids, clock
        self._reader = ReaderThread("GPU sensors", self._run)
        self._heat = NodeHeat()
        self._seen: Mapping[str, tuple[SensorStatus, float]] = {}
        """UUID -> what was read last, and when. Replaced as a whole."""
        self._complained = ""

    def start(self) -> None:
        """Begin reading. Raises RuntimeError if no thread can start."""
        self._reader.start()

    def close(self) -> None:
        """End the thread. If it waits for NVML, it ends with the program."""
        self._reader.close()

    def statuses(self) -> tuple[SensorStatus, ...]:
        """By UUID, without what is out of date. For any thread."""
        since_s = self._clock() - STALE_S
        return tuple(one for _, (one, at_s) in sorted(self._seen.items()) if at_s >= since_s)

    def read(self) -> None:
        """Query every GPU once. Raises NvmlAway."""
        uuids = self._uuids()
        replies = self._nvml.health_of(uuids) if uuids else {}
        at_s, seen = self._clock(), {uuid: one for uuid, one in self._seen.items() if uuid in uuids}
        known = {uuid: one for uuid, one in replies.items() if isinstance(one, HealthReply) and one.reading is not None}
        self._heat.keep_only(uuids)
        for uuid, reply in known.items():
            if reply.heat is None and reply.reading is not None:
                self._heat.read(uuid, reply.reading, at_s)
        self._heat.changed(at_s)
        for uuid, reply in known.items():
            heat = self._heat.classes.get(uuid, NORMAL) if reply.heat is None else reply.heat
            seen[uuid] = sensor_status(uuid, reply.reading or Reading(), heat), at_s
        self._seen = seen

    def _run(self) -> None:
        try:
            while not self._reader.pause(PERIOD_S):
                try:
                    self.read()
                    self._complained = ""
                except NvmlError as error:
                    if self._complained != str(error):
                        _log.warning("the GPUs' sensors are not read", reason=str(error))
                    self._complained = str(error)
        except Exception:  # noqa: BLE001 - the arbiter must not end because a display lacks a column
            _log.exception("the GPUs' sensors are not read any more")


def sensor_status(uuid: str, reading: Reading, heat: str) -> SensorStatus:
    """As the status document has it."""
    return SensorStatus(
        uuid, heat, reading.temperature_c, reading.headroom_c, reading.power_mw, reading.power_limit_mw, reading.sm_clock_mhz, reading.sm_clock_max_mhz,
        slowdown_names(reading.slowdowns or 0), all_errors(reading.link_errors),
    )  # fmt: skip
