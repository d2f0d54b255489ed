"""Where the arbiter has NVML from: the device plugin's child, or one of its own where there is no plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from nvml.client import Client
from nvml.local import Local
from nvml.messages import AnyReply, AnyRequest
from nvml.queries import Nvml
from nvml.replacing import End
from nvml.supervisor import Limits, Supervisor
from vgpu.api.enforcement import STALE_S

READ_S: Final = STALE_S
"""For one answer: a later one is of no use."""
_log = structlog.get_logger()


@contextmanager
def nvml_source(socket: Path | None, driver_root: Path, limits: Limits) -> Iterator[Callable[[], Nvml]]:
    """Makes an `Nvml` for each thread. `socket`: of the device plugin; None = a child of our own."""
    if socket is not None:
        yield lambda: Client(socket, READ_S).nvml
        return
    supervisor = Supervisor(driver_root, limits, report=_report)
    supervisor.start()
    try:
        local = Local()
        yield lambda: Nvml(_Own(supervisor, local))
    finally:
        supervisor.close()


@dataclass(frozen=True, slots=True)
class _Own:
    """What a plugin's server answers, in this process."""

    supervisor: Supervisor
    local: Local

    def call_all(self, requests: Sequence[AnyRequest]) -> Sequence[AnyReply]:
        return self.local.answer_all(requests, lambda for_child: self.supervisor.call_all(for_child, READ_S))


def _report(end: End | None, text: str) -> None:
    if end is not None:
        _log.warning("an NVML process was ended", reason=end, why=text)
