"""The arbiter's access to NVML: through the device plugin's child, or its own child if there is no plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from nvml.client import NvmlClient
from nvml.local import LocalAnswers
from nvml.messages import AnyReply, AnyRequest
from nvml.queries import Nvml
from nvml.replacing import EndReason
from nvml.supervisor import NvmlSupervisor, TimeLimits
from vgpu.api.enforcement import STALE_S

READ_S: Final = STALE_S
"""Time-out of one answer: a later one would be out of date."""
_log = structlog.get_logger()


@contextmanager
def nvml_source(socket: Path | None, driver_root: Path, limits: TimeLimits) -> Iterator[Callable[[], Nvml]]:
    """Makes an `Nvml` for each thread. `socket`: the device plugin's; None = the arbiter's own child."""
    if socket is not None:
        yield lambda: NvmlClient(socket, READ_S).nvml
        return
    supervisor = NvmlSupervisor(driver_root, limits, report=_report)
    supervisor.start()
    try:
        local = LocalAnswers()
        yield lambda: Nvml(_Own(supervisor, local))
    finally:
        supervisor.close()


@dataclass(frozen=True, slots=True)
class _Own:
    """Answers in this process as the plugin's server does."""

    supervisor: NvmlSupervisor
    local: LocalAnswers

    def call_all(self, requests: Sequence[AnyRequest]) -> Sequence[AnyReply]:
        return self.local.answer_all(requests, lambda for_child: self.supervisor.call_all(for_child, READ_S))


def _report(end: EndReason | None, text: str) -> None:
    if end is not None:
        _log.warning("an NVML process was ended", reason=end, why=text)
