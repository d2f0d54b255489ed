"""How the outcome of an attack is seen: in the fake driver's books, the arbiter's status, metrics, Events, and the neighbours' own words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.attacks.attack import LIMIT_MIB
from tests.e2e.cluster import Cluster
from tests.e2e.matrix import node
from tests.e2e.matrix.look import address_of
from vgpu.status import ContainerStatus

REPORTED_S, KILLED_S = 5.0, 10.0
"""Specified."""
ROUNDED_S: Final = 1.0
"""The API server keeps the end of a container in whole seconds."""
PATIENCE_S: Final = 150.0
HOLDS: Final = re.compile(r"^([0-9.]+) (?:holds (\d+) MiB|refused: .*)$", re.MULTILINE)
CALLS: Final = re.compile(r"^([0-9.]+) calls (\d+) slowest_ms ([0-9.]+)$", re.MULTILINE)
SLOWEST_MS: Final = 1000.0
"""Of a neighbour's allocation, beside fifty attackers on two processors that are the cluster's, too. Guessed."""
ARBITER_PORT: Final = 9403


@dataclass(frozen=True, slots=True)
class Attacker:
    """A container that attacks."""

    cluster: Cluster
    namespace: str
    pod: str
    container: str

    def log(self) -> str:
        return self.cluster.api.log(self.namespace, self.pod, self.container)

    def state(self) -> dict[str, Any]:
        """Of its containerStatuses."""
        found = self.cluster.pod(self.namespace, self.pod)["status"].get("containerStatuses", [])
        return next((one for one in found if one["name"] == self.container), {})

    def began(self) -> bool:
        """Has its container a log?"""
        state = self.state().get("state", {})
        return "running" in state or "terminated" in state

    def acts(self) -> tuple[float, int]:
        """Wait until it holds what it came for, or was refused: when, and MiB."""
        seen = eventually(
            lambda: self.began() and list(HOLDS.finditer(self.log())),
            f"{self.namespace}/{self.pod}/{self.container} attacks",
            timeout_s=PATIENCE_S,
        )[-1]
        return float(seen[1]), int(seen[2] or 0)

    def said(self, text: str) -> None:
        assert text in self.log(), f"the attack did not happen: {text!r} is not in\n{self.log()}"

    def booked_mib(self) -> int:
        """What its processes have on all GPUs, by the fake driver."""
        inside = self.state()["containerID"].rpartition("/")[2]
        return sum(sum(mib.values()) for pid, mib in node.books().items() if inside in _cgroup(pid))

    def status(self) -> ContainerStatus | None:
        """What the arbiter says of it."""
        where = f"{self.namespace}/{self.pod}"
        containers = node.status().containers
        return next((one for one in containers if (one.pod, one.container) == (where, self.container)), None)

    def events(self, *reasons: str) -> list[tuple[float, str]]:
        """When, and what they say of this container."""
        items = self.cluster.api.listed("event", self.namespace)
        return [
            (_seconds(one["eventTime"]), one.get("note", ""))
            for one in items
            if one.get("reason") in reasons
            and (one.get("regarding") or {}).get("name") == self.pod
            and re.search(rf"container {self.container}\b", one.get("note", ""))
        ]

    def has_event(self, reason: str) -> None:
        eventually(lambda: self.events(reason), f"an Event {reason} of {self.container}", timeout_s=PATIENCE_S / 2)

    def harmless(self) -> None:
        """It holds no more than its limit."""
        _, claimed = self.acts()
        booked = self.booked_mib()
        assert booked <= LIMIT_MIB, (
            f"{booked} MiB by the driver's books, {claimed} by its own words: at most {LIMIT_MIB}"
        )

    def reported(self, reason: str) -> None:
        """Status, metric and an Event, within 5 s."""
        since, _ = self.acts()
        status = eventually(
            lambda: (s := self.status()) is not None and reason in [one.reason for one in s.unenforced] and s,
            f"the status says {reason} of {self.container}: {self.status()}",
            timeout_s=PATIENCE_S / 4,
        )
        assert status
        row = f'container="{self.container}",namespace="{self.namespace}",pod="{self.pod}",reason="{reason}"'
        address = address_of(self.cluster.api.listed("pod", NAMESPACE), "node")
        metrics = node.page(address, ARBITER_PORT, "/metrics", self.cluster.metrics_token())
        rows = [line for line in metrics.splitlines() if line.startswith("tangram_arbiter_unenforced{")]
        assert any(all(part in line for part in row.split(",")) for line in rows), "\n".join(rows)
        at, note = eventually(
            lambda: [
                one
                for one in self.events("LimitNotEnforced", "OverMemoryLimit")
                if reason in one[1] or "granted" in one[1]
            ],
            f"an Event of {self.container}",
            timeout_s=PATIENCE_S / 4,
        )[0]
        assert at - since <= REPORTED_S, f"{at - since:.1f} s after it held memory: {note}"

    def killed(self) -> None:
        """By SIGKILL within 10 s, with an Event."""
        since, _ = self.acts()
        ended = eventually(
            lambda: self.state().get("state", {}).get("terminated"),
            f"{self.container} is killed: {self.status()}",
            timeout_s=PATIENCE_S / 2,
        )
        assert ended["exitCode"] == 137, ended
        assert ended["reason"] != "OOMKilled", ended
        took = _seconds(ended["finishedAt"]) - since
        assert took <= KILLED_S + ROUNDED_S, f"killed {took:.1f} s after it held memory"
        eventually(
            lambda: any("was killed" in note for _, note in self.events("LimitBypassed")),
            f"an Event of {self.container}",
            timeout_s=PATIENCE_S / 4,
        )


def undisturbed(cluster: Cluster, namespace: str, names: tuple[str, ...], kept_mib: int, since: float) -> None:
    """These neighbours hold what they held, and no call of theirs failed or took long since then."""
    for name in names:
        pod = Attacker(cluster, namespace, name, "main")
        log = pod.log()
        assert "refused" not in log, log[-2000:]
        assert pod.state()["restartCount"] == 0
        assert kept_mib <= pod.booked_mib()
        lines = [(int(calls), float(ms)) for at, calls, ms in CALLS.findall(log) if float(at) >= since]
        assert not lines or max(ms for _, ms in lines) <= SLOWEST_MS, f"{name}: {max(lines, key=lambda one: one[1])}"


def arbiter_runs_since(cluster: Cluster) -> float:
    """The start of its container, in seconds since the epoch."""
    (name,) = cluster.own_pods("node")
    statuses = cluster.pod(NAMESPACE, name)["status"]["containerStatuses"]
    return next(_seconds(one["state"]["running"]["startedAt"]) for one in statuses if one["name"] == "arbiter")


def _cgroup(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:  # it ended meanwhile
        return ""


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
