"""The GPU time of one container as the status document and the metrics show it."""

from __future__ import annotations

from arbiter.gputime.container import GpuTimeContainer
from vgpu.api.burst import core_limit_percent
from vgpu.gputime.usage import GpuTimeUsage
from vgpu.protocol.status import GpuTimeStatus


def status_of(container: GpuTimeContainer, usage: GpuTimeUsage, credit_s: float, at_s: float) -> GpuTimeStatus:
    """For the status document and metrics. `usage` and `credit_s` are the policy's."""
    return GpuTimeStatus(
        on=container.shown_on is not False,
        working=container.has_reported_work(),
        processes=sum(1 for process in container.processes.values() if process.channel_groups),
        requested_percent=max(gpu.core_percent for gpu in container.grant.gpus),
        limit_percent=max(core_limit_percent(gpu, container.burst) for gpu in container.grant.gpus),
        on_s=usage.on_s,
        burst_s=usage.burst_s,
        off_s=usage.off_s,
        capped_s=usage.capped_s,
        suspends=usage.suspends,
        trouble=container.obstacles.why,
        mode="gate" if container.gates or container.evidence.effect.doubted else "suspend",
        watchdog_resumes=container.watchdog_resumes,
        clearing_s=usage.clearing_s,
        suspended_s=usage.suspended_s,
        arrivals=usage.arrivals,
        credit_s=credit_s,
        unreported=container.reports.unreported_work.proven,
        stopped=container.watchdog.stopped(at_s),
        seen_s=container.reports.seen_s,
        resumes=container.evidence.resumes,
    )
