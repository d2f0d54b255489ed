"""`tangramctl cordon --drain`: evict the pods that have one GPU, and wait until nothing has it open.

Evictions go through the eviction API, so a disruption budget that refuses is waited for and named. An interrupt ends the waiting and undoes nothing: the GPU
stays cordoned, and the same command goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tangramctl.cluster import KUBECTL_TIMEOUT_S, complaint, kubectl
from tangramctl.cordon import NodeGpus, described, read
from tangramctl.errors import BadOption, CommandError, NotFound
from vgpu.api.codec import assignment_from_json
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import CORDON_REASONS, NOT_RELEASED, RELEASED, Gpu, Inventory
from vgpu.api.mig_device import slot_of_device
from vgpu.api.names import Names

POLL_S: Final = 2.0
"""Between two rounds. Guessed."""
REPEAT_S: Final = 30.0
"""The same line is printed again after this. Guessed."""


class DrainTimedOut(CommandError):
    """Pods have the GPU still, or a process has it open."""

    code = 75


class NotReleased(CommandError):
    """No pod has the GPU, and its node's plugin can release all GPUs or none."""

    code = 69


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod that has the GPU."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    leaving: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


def holders(pods: Iterable[Mapping[str, Any]], uuid: str, inventory: Inventory, names: Names) -> list[Holder]:
    """Those of these pods that were assigned the GPU, or an instance or slot of it, and have not ended. An assignment that cannot be read counts: it may name any."""
    found = []
    for pod in pods:
        meta = pod["metadata"]
        text = (meta.get("annotations") or {}).get(names.assignment)
        if text is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            continue
        try:
            has = {_carrier(one.uuid, inventory) for one in assignment_from_json(text).held()}
        except BadDocument:
            has = {uuid}
        if uuid in has:
            labels, leaving = meta.get("labels") or {}, "deletionTimestamp" in meta
            found.append(Holder(meta["namespace"], meta["name"], meta["uid"], labels, leaving))
    return found


def _carrier(uuid: str, inventory: Inventory) -> str:
    """UUID of the GPU that a part lies on. A slot names its GPU, also one that the node no longer has."""
    gpu, slot = inventory.gpu(uuid), slot_of_device(uuid)
    return gpu.uuid if gpu is not None else slot[0] if slot is not None else uuid


def _others(gpu: Gpu | None) -> str:
    """What else the GPU is withdrawn for, for the end of a sentence: other plugins may have given it to pods."""
    why = [str(one) for one in gpu.withdrawn if one.reason not in CORDON_REASONS] if gpu is not None else []
    return f". Pods of other plugins are not evicted: {'; '.join(why)}" if why else ""


def selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Does a LabelSelector match? None matches nothing, and an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_matches(one, labels) for one in selector.get("matchExpressions") or ())


def _matches(one: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(one["key"]), one.get("values") or ()
    match one["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False


def refusing(budgets: Iterable[Mapping[str, Any]], pod: Holder) -> list[str]:
    """Names of the pod's budgets that allow no disruption now."""
    return [
        budget["metadata"]["name"]
        for budget in budgets
        if budget["metadata"]["namespace"] == pod.namespace
        and selects(budget["spec"].get("selector"), pod.labels)
        and budget.get("status", {}).get("disruptionsAllowed", 0) < 1
    ]


class Drain:
    """Of one GPU. `say` prints a line."""

    def __init__(
        self, node: str, uuid: str, names: Names, timeout_s: float, *, say: Callable[[str], None] = lambda text: print(text, flush=True),
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self._node, self._uuid, self._names, self._timeout_s = node, uuid, names, timeout_s
        self._say, self._clock, self._sleep = say, clock, sleep
        self._said: dict[str, float] = {}

    def run(self) -> None:
        """Return when no pod has the GPU and its node's plugin has let go of it. Raises DrainTimedOut, NotReleased, CommandError."""
        until_s = self._clock() + self._timeout_s if self._timeout_s else float("inf")
        while why := self._round():
            if self._clock() >= until_s:
                raise DrainTimedOut(
                    f"after {self._timeout_s:g} s {why}. The GPU stays cordoned: the same command goes on"
                )
            self._sleep(POLL_S)

    def _round(self) -> str:
        """Why it is not done; empty: it is."""
        found = read(self._node, self._names)
        if self._uuid not in found.cordons:
            raise BadOption(f"{described(found, self._uuid)} was uncordoned by someone else: nothing more is evicted")
        pods = kubectl("get", "pods", "--all-namespaces", "--field-selector", f"spec.nodeName={self._node}")["items"]
        left = holders(pods, self._uuid, found.inventory, self._names)
        for pod in left:
            self._evict(pod)
        if left:
            return f"{len(left)} pods have {described(found, self._uuid)}: {', '.join(pod.key for pod in left[:5])}"
        return self._let_go(found)

    def _let_go(self, found: NodeGpus) -> str:
        name, gpu = described(found, self._uuid), found.inventory.gpu(self._uuid)
        orphans = [
            one.key
            for one in found.inventory.orphans
            if gpu and any(found.inventory.gpu(part.uuid) is gpu for part in one.held)
        ]
        if orphans:
            self._tell(f"processes of pods that were deleted by force still use {name}: {', '.join(orphans)}")
            return f"processes of {', '.join(orphans)} use {name}"
        if gpu is None or gpu.cordon == RELEASED:
            self._say(
                f"{name} is released: no pod of Tangram has it, and no process of Tangram has it open{_others(gpu)}"
            )
            return ""
        if gpu.cordon == NOT_RELEASED:
            raise NotReleased(
                f"no pod has {name}, but Tangram cannot release it alone: the node does not show the PCI addresses of its GPUs. The GPU stays cordoned. To reset it, release all GPUs of the node: docs/operations/maintenance.md#reset-a-gpu"
            )
        self._tell(f"no pod has {name}. Waiting until the device plugin of the node has closed it")
        return f"the device plugin of the node has not closed {name}: see its log, and docs/operations/maintenance.md"

    def _evict(self, pod: Holder) -> None:
        if pod.leaving:
            self._tell(f"pod {pod.key} is ending")
            return
        body = {
            "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }  # fmt: skip
        refusal = _post(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/eviction", json.dumps(body))
        if not refusal:
            self._tell(f"pod {pod.key} is evicted")
        elif "(TooManyRequests)" in refusal:
            budgets = refusing(kubectl("get", "poddisruptionbudgets", "--namespace", pod.namespace)["items"], pod)
            names = f"disruption budget {', '.join(budgets)}" if budgets else "the API server"
            self._tell(f"pod {pod.key} is not evicted yet: {names} refuses ({refusal}). It is tried again")
        elif "(NotFound)" not in refusal and "(Conflict)" not in refusal:  # gone, and perhaps another has its name
            raise BadOption(f"pod {pod.key} cannot be evicted: {refusal}. The GPU stays cordoned")

    def _tell(self, text: str) -> None:
        now_s = self._clock()
        if now_s - self._said.get(text, float("-inf")) >= REPEAT_S:
            self._said[text] = now_s
            self._say(text)


def _post(path: str, body: str) -> str:
    """Why the API server refuses; empty: it does not. Raises NotFound, BadOption."""
    try:
        done = subprocess.run(
            ["kubectl", "create", "--raw", path, "-f", "-"],  # noqa: S607 - the caller's own kubectl
            input=body.encode(), capture_output=True, timeout=KUBECTL_TIMEOUT_S, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise NotFound("kubectl is not in PATH: it evicts the pods") from None
    except subprocess.TimeoutExpired:
        raise BadOption(f"kubectl create --raw {path} has not answered for {KUBECTL_TIMEOUT_S:g} s") from None
    return complaint(done.stderr.decode(errors="replace"), done.returncode) if done.returncode else ""
