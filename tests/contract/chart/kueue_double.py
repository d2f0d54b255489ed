"""What Kueue does with a job, as far as Tangram depends on it: it suspends and gates, adds up templates, and resumes what fits a quota.

Written from the source of Kueue 0.19.1 (commit df3d365), which docs/development/kueue.md names by file and line. It knows one flavor and no cohort: which
quota of several is taken is nothing that a template decides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kube.objects import PodSpec
from kube.pod_requests import pending_pod_requests
from tests.apiserver import ApiServer
from tests.contract.chart.templates_kit import QUEUE

GATE: Final = "kueue.x-k8s.io/admission"
Template = Mapping[str, Any]


def suspended(job: Mapping[str, Any]) -> dict[str, Any]:
    """What its webhook makes of a Job that is created in a queue."""
    made = copy.deepcopy(dict(job))
    if made["metadata"].get("labels", {}).get(QUEUE):
        made["spec"]["suspend"] = True
    return made


def gated(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a pod that no counted object owns."""
    made = copy.deepcopy(dict(pod))
    made["spec"].setdefault("schedulingGates", []).append({"name": GATE})
    return made


def pod_sets(thing: Mapping[str, Any]) -> Iterator[tuple[int, Template]]:
    """(number of pods, template) of each set of pods that it counts for an object."""
    spec = thing["spec"]
    match thing["kind"]:
        case "Job":
            yield _job_pods(spec), spec["template"]
        case "JobSet":
            for job in spec["replicatedJobs"]:
                yield job.get("replicas", 1) * _job_pods(job["template"]["spec"]), job["template"]["spec"]["template"]
        case "RayCluster":
            yield from _ray(spec)
        case "RayService":
            yield from _ray(spec["rayClusterConfig"])
        case "RayJob":
            yield from _ray(spec["rayClusterSpec"])
            yield 1, spec["submitterPodTemplate"]
        case "StatefulSet":
            yield spec.get("replicas", 1), spec["template"]
        case "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            yield 1, group["leaderTemplate"]
            yield group.get("size", 1) - 1, group["workerTemplate"]
        case _:
            (replicas,) = (value for key, value in spec.items() if key.endswith("ReplicaSpecs"))
            for one in replicas.values():
                yield one.get("replicas", 1), one["template"]


def _job_pods(spec: Mapping[str, Any]) -> int:
    parallel: int = spec.get("parallelism", 1)
    return min(parallel, spec.get("completions") or parallel)


def _ray(spec: Mapping[str, Any]) -> Iterator[tuple[int, Template]]:
    yield 1, spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs", []):
        yield group.get("replicas", 1) * max(1, group.get("numOfHosts", 1)), group["template"]


def pod_total(template: Template) -> dict[str, int]:
    """Requests of one pod of a template; where a container has only a limit, that is its request."""
    spec = copy.deepcopy(template["spec"])
    for one in [*spec.get("initContainers", []), *spec.get("containers", [])]:
        resources = one.setdefault("resources", {})
        resources["requests"] = resources.get("limits", {}) | resources.get("requests", {})
    return pending_pod_requests(msgspec.convert(spec, PodSpec, strict=False))


def total(thing: Mapping[str, Any]) -> dict[str, int]:
    """All that an object needs of its queue's quota."""
    added: dict[str, int] = {}
    for count, template in pod_sets(thing):
        for resource, amount in pod_total(template).items():
            added[resource] = added.get(resource, 0) + count * amount
    return added


@dataclass
class Kueue:
    """A queue with a quota, and the Jobs in it."""

    api: ApiServer
    quota: Mapping[str, int]
    node_labels: Mapping[str, str]
    """Of its flavor."""
    admitted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Path of a Job -> what it was admitted with."""

    def reconcile(self, path: str) -> str:
        """Admit a suspended Job that fits, and stop a running one that is no longer what was admitted. What it says then; empty: nothing."""
        job = self.api("GET", path)
        needs = {resource: amount for resource, amount in total(job).items() if resource in self.quota}
        if not job["spec"].get("suspend"):
            if self.admitted.get(path) == needs:
                return ""
            self._stop(path)
            return "No matching Workload"
        for resource, amount in needs.items():
            used = sum(of.get(resource, 0) for of in self.admitted.values())
            if used + amount > self.quota[resource]:
                return f"insufficient quota for {resource}: {used} + {amount} > {self.quota[resource]}"
        self.admitted[path] = needs
        start = {"suspend": False, "template": {"spec": {"nodeSelector": dict(self.node_labels)}}}
        self.api.patch(path, {"spec": start})
        return ""

    def scale(self, path: str, pods: int) -> None:
        """A person changes an elastic Job, and the slice that replaces its Workload is admitted."""
        self.api.patch(path, {"spec": {"parallelism": pods}})
        job = self.api("GET", path)
        self.admitted[path] = {resource: amount for resource, amount in total(job).items() if resource in self.quota}

    def preempt(self, path: str) -> None:
        """Stop a Job: it is suspended, and then has the template that it had before."""
        self._stop(path)

    def _stop(self, path: str) -> None:
        self.admitted.pop(path, None)
        self.api.patch(path, {"spec": {"suspend": True}})
        self.api.patch(path, {"spec": {"template": {"spec": {"nodeSelector": None}}}})
