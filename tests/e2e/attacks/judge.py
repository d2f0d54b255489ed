"""How the outcome of an attack is seen: in the fake driver's records, the arbiter's status, metrics, Events, and the neighbours' own words. `verdict` judges."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from hack.stack import NAMESPACE
from hack.waiting import eventually
from tests.e2e.attacks import verdict
from tests.e2e.attacks.verdict import Reported
from tests.e2e.cluster import Cluster
from tests.e2e.matrix import node
from tests.e2e.matrix.look import address_of
from vgpu.protocol.status import ContainerStatus

TIMEOUT_S: Final = 150.0
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
        """Wait until it has allocated its memory, or was refused: when, and MiB."""
        seen = eventually(
            lambda: verdict.acted(self.log()) if self.began() else None,
            f"{self.namespace}/{self.pod}/{self.container} attacks",
            timeout_s=TIMEOUT_S,
        )
        assert seen
        return seen

    def printed(self, text: str) -> None:
        verdict.happened(text, self.log())

    def booked_mib(self) -> int:
        """What its processes have on all GPUs, by the fake driver."""
        inside = self.state()["containerID"].rpartition("/")[2]
        return sum(sum(mib.values()) for pid, mib in node.records().items() if inside in _cgroup(pid))

    def status(self) -> ContainerStatus | None:
        """Its container in the arbiter's status."""
        where = f"{self.namespace}/{self.pod}"
        containers = node.status().containers
        return next((one for one in containers if (one.pod, one.container) == (where, self.container)), None)

    def events(self, *reasons: str) -> list[Reported]:
        """Those of this container that have one of these reasons."""
        items = self.cluster.api.listed("event", self.namespace)
        return [
            Reported(_seconds(one["eventTime"]), one["reason"], one.get("note", ""))
            for one in items
            if one.get("reason") in reasons
            and (one.get("regarding") or {}).get("name") == self.pod
            and re.search(rf"container {self.container}\b", one.get("note", ""))
        ]

    def has_event(self, reason: str) -> None:
        eventually(lambda: self.events(reason), f"an Event {reason} of {self.container}", timeout_s=TIMEOUT_S / 2)

    def harmless(self) -> None:
        """It uses no more than its limit."""
        _, claimed = self.acts()
        verdict.harmless(self.booked_mib(), claimed)

    def reported(self, reason: str) -> None:
        """Status, metric and an Event, within 5 s."""
        since, _ = self.acts()
        status = eventually(
            lambda: (s := self.status()) is not None and reason in [one.reason for one in s.unenforced] and s,
            f"the status has reason {reason} for {self.container}: {self.status()}",
            timeout_s=TIMEOUT_S / 4,
        )
        assert status
        labels = {"container": self.container, "namespace": self.namespace, "pod": self.pod, "reason": reason}
        address = address_of(self.cluster.api.listed("pod", NAMESPACE), "node")
        metrics = node.page(address, ARBITER_PORT, "/metrics", self.cluster.metrics_token())
        verdict.metric_row(metrics, labels)
        event = eventually(
            lambda: verdict.report_of(reason, self.events(verdict.UNENFORCED, verdict.BY_GUARD)),
            f"an Event of {self.container}",
            timeout_s=TIMEOUT_S / 4,
        )
        assert event
        verdict.reported(since, event)

    def killed(self) -> None:
        """By SIGKILL within 10 s, with an Event."""
        since, _ = self.acts()
        ended = eventually(
            lambda: self.state().get("state", {}).get("terminated"),
            f"{self.container} is killed: {self.status()}",
            timeout_s=TIMEOUT_S / 2,
        )
        verdict.killed(since, ended, _seconds(ended["finishedAt"]))
        eventually(
            lambda: verdict.kill_reported(self.events(verdict.BY_BYPASS)),
            f"an Event of {self.container}",
            timeout_s=TIMEOUT_S / 4,
        )


def undisturbed(cluster: Cluster, namespace: str, names: tuple[str, ...], kept_mib: int, since: float) -> None:
    """These neighbours have the memory that they had, and no call of theirs failed or took long since then."""
    for name in names:
        pod = Attacker(cluster, namespace, name, "main")
        now_s, log = time.time(), pod.log()
        seen = verdict.Neighbour(name, log, pod.state()["restartCount"], pod.booked_mib(), now_s)
        verdict.undisturbed(seen, kept_mib, since)


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
