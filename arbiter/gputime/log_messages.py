"""Log messages about the GPU time of containers. Decides nothing."""

from __future__ import annotations

from typing import Final

import structlog

from arbiter.gputime.container import GpuTimeContainer
from arbiter.gputime.obstacles import PARTIAL

COMPLAIN_S: Final = 10.0
"""A container that cannot be suspended is logged this often, however often it reports other channels."""
_log = structlog.get_logger()


def report_of_doubt(container: GpuTimeContainer) -> None:
    """The verdict on a container's usage reports has changed."""
    if not container.reports.unreported_work.proven:
        _log.info("the usage reports of a container count again", grant=container.name)
    elif container.distrusted:
        _log.warning(
            "a container does work that it does not report: it counts as working best-effort", grant=container.name
        )
    else:
        _log.warning(
            "a container does work that it does not report: without cap-unreported this has no effect",
            grant=container.name,
        )


def report_of_trouble(container: GpuTimeContainer, why: str, at_s: float) -> None:
    """A container cannot be suspended."""
    if at_s - container.obstacles.complained_at_s >= COMPLAIN_S:
        container.obstacles.complained_at_s = at_s
        _log.error(
            "a container cannot be suspended", grant=container.name, reason=why, times=container.obstacles.failures
        )


def report_of_no_trial(container: GpuTimeContainer) -> None:
    """Once for a container that is suspended though no trial has shown that suspends work."""
    if not container.obstacles.reported_no_trial:
        _log.warning(
            "suspending was not tried on this GPU", grant=container.name, reason=container.obstacles.suspending.why
        )
        container.obstacles.reported_no_trial = True


def report_of_partial(container: GpuTimeContainer) -> None:
    """Once for a container with more channels than fit one list."""
    if container.obstacles.unlisted and not container.obstacles.reported_partial:
        _log.error(
            "a container cannot be suspended: its launches are delayed instead", grant=container.name, reason=PARTIAL
        )
        container.obstacles.reported_partial = True


def report_of_no_effect(container: GpuTimeContainer) -> None:
    """A container's work ends while it is suspended."""
    _log.error("suspends have no effect: launches are delayed too", grant=container.name)


def report_of_try(container: GpuTimeContainer) -> None:
    """Suspends are tried again on a container for which they did not work."""
    _log.info("tries again to suspend", grant=container.name)


def report_of_hung(container: GpuTimeContainer, seconds: float) -> None:
    """A GPU of a suspended container with several does not answer."""
    _log.warning(
        "a GPU of a container with several does not answer: until it does, the arbiter does not resume the container",
        grant=container.name,
        seconds=round(seconds, 3),
    )


def report_of_answer(container: GpuTimeContainer) -> None:
    """All of its GPUs answer again, or it left."""
    _log.info("all GPUs of a container with several answer again", grant=container.name)


def report_of_stall(gpu: str, seconds: float) -> None:
    """The arbiter, or its thread of a GPU, did not run."""
    _log.warning("the arbiter was stalled: GPU time was not enforced", gpu=gpu, seconds=round(seconds, 3))
