"""Metrics of GPU time: what each container got of it and waited for, and what it cost to arrange that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from arbiter.gputime.counts import Counts
from arbiter.gputime.scheduler import Turns
from arbiter.gputime.timer import now_s
from arbiter.stalls import Stalls
from vgpu.api.grant import Grant
from vgpu.protocol.status import TurnStatus

LABELS: Final = ("namespace", "pod", "container")
MODES: Final = ("suspend", "gate")
_SECONDS: Final = {
    "on": "time the container had work and might run, which is what counts against its cap",
    "off": "time the container had work and waited for others",
    "capped": "time the container had work and waited for its own cap",
    "clearing": "time the container had work and might run, beside one who was being suspended for it",
    "suspended": "time the container was suspended, with work or without",
}
_GAUGES: Final = {
    "working": "1 while the container has work for the GPU, as its processes say",
    "running": "1 while the container may run",
    "trouble": "1 while the container cannot be suspended; the log and the status say why",
    "untold": "1 while NVML sees the container compute while it says it is idle",
    "stopped": "1 while something other than the arbiter seems to stop the container's work again and again",
    "asked_percent": "the cap that the container requested; 0 = none",
    "credit_seconds": "how long the container may still run before its own cap stops it; below 0 it has a debt; 0 without a cap",
}
_GAUGE: Final[Mapping[str, Callable[[TurnStatus], float]]] = {
    "working": lambda turn: turn.working,
    "running": lambda turn: turn.on,
    "trouble": lambda turn: bool(turn.trouble),
    "untold": lambda turn: turn.unreported,
    "stopped": lambda turn: turn.stopped,
    "asked_percent": lambda turn: turn.requested_percent,
    "credit_seconds": lambda turn: turn.credit_s if 0 < turn.requested_percent < 100 else 0.0,
}
_COUNTS: Final = {
    "switches": "suspends and resumes of containers on this node",
    "switch_failures": "suspends that the driver refused",
    "held_back": "times that a container had sent more messages than its budget has, and was read later",
    "turns_bad_packets": "packets that ended a connection for turns",
    "turns_untold_found": "times that a container was found to compute while it said it was idle",
    "turns_decays": "times that a container's reported work ended without a word, as the driver saw nothing of it for a second",
    "stalls": "times that the arbiter, or its thread of a GPU, was not running for a quarter of a second or more",
    "stalled_seconds": "time that the arbiter, or its thread of a GPU, was not running: nobody enforced GPU time meanwhile",
}


def families(turns: Turns | None, grants: Mapping[str, Grant]) -> Iterable[Metric]:
    """Of one moment. `grants`: by the name of their directory."""
    statuses = turns.statuses() if turns is not None else {}
    reported = [((g.namespace, g.pod, g.container), statuses[key]) for key, g in grants.items() if key in statuses]
    yield from _of_containers(reported)
    counts = turns.counts if turns is not None else Counts()
    stalls = turns.stalls if turns is not None else Stalls()
    numbers = (
        counts.switches, counts.failures, counts.held_back, counts.bad_packets, counts.unreported, counts.decays,
        stalls.count, stalls.seconds,
    )  # fmt: skip
    for (name, text), number in zip(_COUNTS.items(), numbers, strict=True):
        family = CounterMetricFamily(f"tangram_arbiter_{name}", text)
        family.add_metric([], number)
        yield family
    checks = GaugeMetricFamily(
        "tangram_arbiter_checks",
        "1 while what containers say of their work is compared with NVML's count; 0 = nothing speaks against anybody",
    )
    checks.add_metric([], int(turns is not None and turns.checks(now_s())))
    yield checks


def _of_containers(reported: list[tuple[tuple[str, str, str], TurnStatus]]) -> Iterable[Metric]:
    for name, text in _SECONDS.items():
        seconds = CounterMetricFamily(f"tangram_arbiter_turns_{name}_seconds", text, labels=LABELS)
        for place, turn in reported:
            seconds.add_metric(place, getattr(turn, f"{name}_s"))
        yield seconds
    seen = CounterMetricFamily(
        "tangram_arbiter_turns_seen_seconds",
        "GPU time that NVML counted of the container's processes; coarse: right on average",
        labels=LABELS,
    )
    arrivals = CounterMetricFamily(
        "tangram_arbiter_turns_arrivals",
        "times that work came after idleness; (off + clearing) / arrivals is what a request waits",
        labels=LABELS,
    )
    suspends = CounterMetricFamily("tangram_arbiter_suspends", "times the container was suspended", labels=LABELS)
    watchdog_resumes = CounterMetricFamily(
        "tangram_arbiter_watchdog_resumes",
        "times the container was enabled for having worked on without a word, should somebody else have stopped it",
        labels=LABELS,
    )
    resumes = CounterMetricFamily(
        "tangram_arbiter_self_resumes",
        "times the container's processes resumed themselves, as the arbiter gave no sign of life",
        labels=LABELS,
    )
    mode = GaugeMetricFamily(
        "tangram_arbiter_turns_mode",
        "1 for how the container is kept off: suspend, or gate where that does not work and its new work is held back",
        labels=(*LABELS, "mode"),
    )
    for place, turn in reported:
        seen.add_metric(place, turn.seen_s or 0.0)
        arrivals.add_metric(place, turn.arrivals)
        suspends.add_metric(place, turn.suspends)
        watchdog_resumes.add_metric(place, turn.watchdog_resumes)
        resumes.add_metric(place, turn.resumes)
        for name in MODES:
            mode.add_metric((*place, name), int(turn.mode == name))
    yield from (seen, arrivals, suspends, watchdog_resumes, resumes, mode)
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"tangram_arbiter_turns_{name}", text, labels=LABELS)
        for place, turn in reported:
            gauge.add_metric(place, _GAUGE[name](turn))
        yield gauge
