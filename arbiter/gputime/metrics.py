"""Metrics of GPU time: what each container got and waited for, and what the switches between containers cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from arbiter.gputime.counters import GpuTimeCounters
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.gputime.timer import now_s
from arbiter.stalls import Stalls
from vgpu.api.grant import Grant
from vgpu.protocol.status import GpuTimeStatus

LABELS: Final = ("namespace", "pod", "container")
MODES: Final = ("suspend", "gate")

Read = Callable[[GpuTimeStatus], float]

_COUNTERS: Final[Mapping[str, tuple[str, Read]]] = {
    "gpu_time_running_seconds": (
        "time the container had work and was allowed to run; this counts against its compute limit",
        lambda status: status.on_s,
    ),
    "gpu_time_burst_seconds": (
        "the part of the running time above the container's guarantee, in time that no other container needed",
        lambda status: status.burst_s,
    ),
    "gpu_time_waiting_seconds": ("time the container had work and waited for other containers", lambda status: status.off_s),
    "gpu_time_throttled_seconds": (
        "time the container had work and waited because of its own compute limit",
        lambda status: status.capped_s,
    ),
    "gpu_time_preempting_seconds": (
        "time the container had work and was allowed to run, while another container was being suspended for it",
        lambda status: status.clearing_s,
    ),
    "gpu_time_suspended_seconds": ("time the container was suspended, with or without work", lambda status: status.suspended_s),
    "gpu_time_observed_seconds": (
        "GPU time that NVML counted for the container's processes; coarse: right on average",
        lambda status: status.seen_s or 0.0,
    ),
    "gpu_work_arrivals": (
        "times that work arrived after idleness; (waiting + preempting) / arrivals is the mean wait of a request",
        lambda status: status.arrivals,
    ),
    "suspends": ("times the container was suspended", lambda status: status.suspends),
    "watchdog_resumes": (
        "times the watchdog resumed a container that was allowed to run and whose work did not end, in case another process had stopped it",
        lambda status: status.watchdog_resumes,
    ),
    "self_resumes": (
        "times the container's processes resumed themselves because the arbiter gave no sign of life",
        lambda status: status.resumes,
    ),
}  # fmt: skip
_GAUGES: Final[Mapping[str, tuple[str, Read]]] = {
    "gpu_work_queued": ("1 while the container's processes report work for the GPU", lambda status: status.working),
    "gpu_time_allowed": ("1 while the container is allowed to run", lambda status: status.on),
    "suspend_blocked": (
        "1 while the container cannot be suspended; the log and the status name the reason",
        lambda status: bool(status.trouble),
    ),
    "unreported_work": (
        "1 while NVML sees the container compute and its processes report no work",
        lambda status: status.unreported,
    ),
    "stopped_by_another": (
        "1 while something other than the arbiter seems to stop the container's work again and again",
        lambda status: status.stopped,
    ),
    "gpu_time_limit_ratio": (
        "the compute limit of the container with its burst, as a part of one GPU's time; 0 = none",
        lambda status: status.limit_percent / 100,
    ),
    "gpu_time_guarantee_ratio": (
        "the part of one GPU's time that the container is guaranteed; below the limit where it may burst; 0 = none was requested",
        lambda status: status.requested_percent / 100,
    ),
    "gpu_time_credit_seconds": (
        "how long the container may still run before its compute limit stops it; below 0 it has a debt; 0 without a limit",
        lambda status: status.credit_s if 0 < status.limit_percent < 100 else 0.0,
    ),
}
_OF_ALL: Final[Mapping[str, tuple[str, Callable[[GpuTimeCounters, Stalls], float]]]] = {
    "switches": ("suspends and resumes of containers on this node", lambda counters, _: counters.switches),
    "suspend_failures": ("suspends that the driver refused", lambda counters, _: counters.failures),
    "delayed_reads": (
        "times that a container had sent more messages than its budget allows, and was read later",
        lambda counters, _: counters.delayed_reads,
    ),
    "gpu_time_bad_packets": ("packets that ended a connection for GPU time", lambda counters, _: counters.bad_packets),
    "unreported_work_found": (
        "times that a container was found to compute while it reported no work",
        lambda counters, _: counters.unreported_work,
    ),
    "unreported_ends": (
        "times that a container's reported work was taken for ended without a report, as the driver saw none of it for a second",
        lambda counters, _: counters.unreported_ends,
    ),
    "stalls": (
        "times that the arbiter, or its thread of a GPU, did not run for a quarter of a second or more",
        lambda _, stalls: stalls.count,
    ),
    "stalled_seconds": (
        "time that the arbiter, or its thread of a GPU, did not run and enforced no GPU time",
        lambda _, stalls: stalls.seconds,
    ),
}


def families(scheduler: NodeScheduler | None, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    """Of one moment. `grants`: by the name of their directory. None = this arbiter schedules no GPU time: every count is 0."""
    statuses = scheduler.statuses() if scheduler is not None else {}
    yield from _of_containers(
        [((g.namespace, g.pod, g.container), statuses[key]) for key, g in grants.items() if key in statuses]
    )
    counters = scheduler.counters if scheduler is not None else GpuTimeCounters()
    stalls = scheduler.stalls if scheduler is not None else Stalls()
    for name, (text, count) in _OF_ALL.items():
        family = CounterMetricFamily(f"tangram_arbiter_{name}", text)
        family.add_metric([], count(counters, stalls))
        yield family
    checks = GaugeMetricFamily(
        "tangram_arbiter_usage_check_up",
        "1 while the work that containers report is compared with NVML's count; 0 = unreported work is not found",
    )
    checks.add_metric([], int(scheduler is not None and scheduler.verdicts.checks(now_s())))
    yield checks


def _of_containers(statuses: list[tuple[tuple[str, str, str], GpuTimeStatus]]) -> Iterable[Metric]:
    kinds: tuple[tuple[type[CounterMetricFamily | GaugeMetricFamily], Mapping[str, tuple[str, Read]]], ...] = (
        (CounterMetricFamily, _COUNTERS),
        (GaugeMetricFamily, _GAUGES),
    )
    for kind, metrics in kinds:
        for name, (text, read) in metrics.items():
            family = kind(f"tangram_container_{name}", text, labels=LABELS)
            for labels, status in statuses:
                family.add_metric(labels, read(status))
            yield family
    mode = GaugeMetricFamily(
        "tangram_container_suspend_mode",
        "1 for the way in which the container is kept from running: suspend, or gate, which delays its launches where a suspend does not work",
        labels=(*LABELS, "mode"),
    )
    for labels, status in statuses:
        for name in MODES:
            mode.add_metric((*labels, name), int(status.mode == name))
    yield mode
