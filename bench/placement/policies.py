"""What each policy costs: processor time of `place()` on fleets of 8-GPU nodes, and write `policies.csv`.

Run: python -m bench.placement.policies. The cluster's pods were seen before, as the extender sees them, and nodes have labels, so that
`fragmentation` judges by a mix and a pod's preferences have something to weigh. Between two pods `CHANGED` nodes change, as they do while others
are placed. Pods are of one template, or cyclically of `TEMPLATES`: more than any work is kept for. Processor time, since other processes may use the machine too.
"""

from __future__ import annotations

import csv
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from bench.placement.place import REQUESTS, fleet
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.placement import fitting, place, rate
from vgpu.scheduling.policies.registry import POLICIES
from vgpu.scheduling.preferences import Preferences, Spread

ROUNDS = 100
CHANGED, TEMPLATES = 10, 40
ZONE, DISK = "topology.kubernetes.io/zone", "disk"
REQUEST = REQUESTS["one share"]


def seen(nodes: int) -> Fleet:
    """A fleet that has seen pods, and knows labels and processors."""
    built = fleet(nodes)
    for at in range(300):
        for request in REQUESTS.values():
            built.record(replace(request, cpu_milli=1000 * (at % 8)))
    for at, name in enumerate(built.column):
        built.set_cpu(name, 64_000)
        built.labels.set(name, {ZONE: f"zone-{at % 3}", DISK: ("ssd", "hdd")[at % 2], "kubernetes.io/hostname": name})
    return built


def preferences(nodes: int) -> Preferences:
    """A preferred label, and spreading over zones and nodes with 1,000 pods that count."""
    names = [f"node-{at:05d}" for at in range(min(nodes, 1000))]
    peers = dict.fromkeys(names, 1)
    preferred = (Term((LabelRequirement(DISK, "In", ("ssd",)),), 10),)
    return Preferences(preferred, (Spread(ZONE, peers), Spread("kubernetes.io/hostname", peers)))


def runs(built: Fleet, liked: Preferences) -> dict[tuple[str, str], Callable[[], object]]:
    """(policy, what) -> the work."""
    names = tuple(built.column)
    placing: dict[tuple[str, str], Callable[[], object]] = {
        (policy, what): partial(place, built, replace(REQUEST, policy=policy), names, None, with_)
        for policy in POLICIES
        for what, with_ in (("place", None), ("place with preferences", liked))
        if not POLICIES[policy].lists
    }
    requests = cycle([replace(REQUEST, policy="fragmentation", cpu_milli=1000 + at) for at in range(TEMPLATES)])
    return placing | {
        ("fragmentation", f"place, {TEMPLATES} templates"): lambda: place(built, next(requests), names),
        ("scheduler", "filter"): partial(fitting, built, REQUEST, names),
        ("scheduler", "prioritize"): partial(rate, built, REQUEST, names),
    }


def cpu_ms(work: Callable[[], object], built: Fleet) -> list[float]:
    took, nodes = [], cycle(list(built.column))
    for number in range(ROUNDS):
        for name in islice(nodes, CHANGED):
            built.set_cpu(name, 32_000 + 1000 * (number % 32))
        start = time.process_time()
        work()
        took.append(1000 * (time.process_time() - start))
    return took


def main() -> None:
    rows = []
    for nodes in (1_000, 10_000):
        built = seen(nodes)
        for (policy, what), work in runs(built, preferences(nodes)).items():
            work()
            cuts = statistics.quantiles(cpu_ms(work, built), n=100)
            machine = f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
            rows.append([nodes, 8, policy, what, f"{cuts[49]:.2f}", f"{cuts[98]:.2f}", machine])
            print(*rows[-1], flush=True)
    with Path(__file__).with_name("policies.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["nodes", "gpus", "policy", "what", "cpu_p50_ms", "cpu_p99_ms", "machine"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
