"""The steps of a pod's life, and a fault in each: how the subject comes to a step, and when everything runs again."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from hack.kubectl import CommandFailed
from hack.waiting import NotSoon, eventually
from tests.e2e.api import ANYWHERE, NotThere
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import UNITS
from tests.e2e.matrix import node
from tests.e2e.matrix.look import address_of, allocatable, inventory_of, node_of
from tests.e2e.matrix.pods import BUSY, FILLER, REPLICAS, STEADY, SUBJECT, filler, priority_class, residents, subject
from tests.e2e.matrix.table import Step
from vgpu.api.errors import BadDocument

Harm = Callable[[], AbstractContextManager[None]]
RESIDENTS: Final = (STEADY, BUSY)
ALL: Final = {STEADY: 1, BUSY: 1, SUBJECT: REPLICAS}
"""ReplicaSet -> pods that should be ready at the end of a round."""
DECISION_S: Final = 0.1
PREEMPTION_S: Final = 2.5
"""From the pods' creation to their Bindings, about: the fault comes at a random moment of it. A victim takes a second to end."""
EMPTY: Final[frozenset[Step]] = frozenset({"placing", "bound", "allocated"})
"""Steps that begin without the subject's pods."""


class Stage:
    """One namespace with the residents and the subject."""

    def __init__(self, cluster: Cluster, namespace: str, chance: random.Random) -> None:
        self.cluster, self.namespace, self.chance = cluster, namespace, chance
        inventory = inventory_of(cluster.node())
        assert inventory is not None, "the node has no inventory"
        self.inventory = inventory

    def build(self) -> None:
        """The residents run; the subject has no pods."""
        self.cluster.make_namespace(self.namespace)
        self.cluster.kubectl.apply(priority_class())
        gpus = [gpu.uuid for gpu in self.inventory.gpus]
        self.cluster.create(self.namespace, *residents(gpus), subject())
        eventually(lambda: [self._ready(name) for name in RESIDENTS] == [1, 1], "the residents are ready")

    def renew(self) -> None:
        """Replace the residents, and end the subject."""
        self._scale(0)
        old = {pod["metadata"]["name"] for pod in self._residents()}
        self.cluster.delete(self.namespace, *old)
        eventually(lambda: [self._ready(name) for name in RESIDENTS] == [1, 1], "the new residents are ready")

    def undisturbed(self) -> list[tuple[str, str, int]]:
        """UID, start and restarts of each resident: no fault of another may change them."""
        return [
            (pod["metadata"]["uid"], one.get("state", {}).get("running", {}).get("startedAt", ""), one["restartCount"])
            for pod in self._residents()
            for one in pod["status"]["containerStatuses"]
        ]

    def begin(self, step: Step) -> None:
        """Everything is as the step needs it before the fault. Pods that failed in an earlier round go."""
        self.cluster.api.delete_all("pod", self.namespace, fields="status.phase=Failed")
        self._drop_filler()  # a round that failed may have left it
        if step in EMPTY:
            self._scale(0)
            eventually(lambda: not self._subjects(), "the subject's pods are gone", timeout_s=60)
            eventually(lambda: len(node.gpu_processes()) == 2, "their processes are gone", timeout_s=30)
            return
        self._scale(REPLICAS)
        eventually(lambda: self._ready() == REPLICAS and self._at_work(), "the subject runs and works", timeout_s=60)

    def meet(self, step: Step, harm: Harm) -> None:
        """The step, with the fault in it. Returns when the fault is over."""
        getattr(self, f"_{step}")(harm)

    def preempt(self, harm: Harm) -> None:
        """`placing`, where the subject first has to preempt pods that use the capacity."""
        self.cluster.create(self.namespace, filler())
        eventually(lambda: self._ready(FILLER) == REPLICAS, "the filler runs")
        victims = {pod["metadata"]["uid"] for pod in self._of(FILLER)}
        self._placing(harm, within_s=PREEMPTION_S)
        eventually(lambda: victims - {pod["metadata"]["uid"] for pod in self._of(FILLER)}, "one is preempted")
        self._drop_filler()

    def _placing(self, harm: Harm, within_s: float = DECISION_S) -> None:
        scaling = threading.Timer(self.chance.random() * 0.1, self._scale, (REPLICAS,))
        with contextlib.ExitStack() as order:
            if self.chance.random() < 0.5:  # before any scheduler decides; else during a decision
                order.enter_context(harm())
                scaling.start()
            else:
                self._scale(REPLICAS)
                time.sleep(self.chance.random() * within_s)
                order.enter_context(harm())
        scaling.join() if scaling.ident else None

    def _bound(self, harm: Harm) -> None:
        with self.cluster.kubelet_paused():
            self._scale(REPLICAS)
            # one: the extender binds no second pod of this size to another GPU before the first is admitted
            eventually(
                lambda: any(pod["spec"].get("nodeName") for pod in self._subjects()), "one is bound", every_s=0.05
            )
            held = harm()
            held.__enter__()
        held.__exit__(None, None, None)

    def _allocated(self, harm: Harm) -> None:
        before = set(self._folders())
        self._scale(REPLICAS)
        eventually(lambda: set(self._folders()) - before, "a directory for a grant is made", every_s=0.002)
        time.sleep(self.chance.random() * 0.2)
        with harm():
            pass

    def _running(self, harm: Harm) -> None:
        with harm():
            pass

    def _deleting(self, harm: Harm) -> None:
        self.cluster.api.delete_all("pod", self.namespace, f"app={SUBJECT}")
        time.sleep(0.5 + self.chance.random())
        with harm():
            pass

    def _forced(self, harm: Harm) -> None:
        """The kubelet ends the processes only after the fault; their devices belong to no pod meanwhile."""
        with self.cluster.kubelet_paused():
            self.cluster.api.delete_all("pod", self.namespace, f"app={SUBJECT}", by_force=True)
            time.sleep(self.chance.random())
            with harm():
                pass

    def settle(self, within_s: float) -> None:
        """Wait until everything runs. Raises NotSoon, which names what does not."""
        began_s, missing = time.monotonic(), ["not looked at yet"]
        while missing := self.missing():
            if time.monotonic() - began_s > within_s:
                raise NotSoon(f"not within {within_s:g} s of the end of the fault: {'; '.join(missing)}")
            time.sleep(0.25)

    def missing(self) -> list[str]:
        """What does not run or is not ready."""
        try:
            listed = self.cluster.api.listed("node") + self.cluster.api.listed("pod", ANYWHERE)
            ready = {name: (self._ready(name), replicas) for name, replicas in ALL.items()}
        except (CommandFailed, json.JSONDecodeError) as error:
            return [f"the API does not answer: {str(error)[-200:]}"]
        own = node_of(listed)
        wrong = [f"{part} is {text}" for part, text in _pages(listed).items() if text != "ok"]
        offers = allocatable(own)
        if (offers.get("tangram.sh/gpu-mem"), offers.get("tangram.sh/gpu-core")) != (2 * UNITS, 200):
            wrong.append(f"the node offers {offers}")
        inventory = inventory_of(own)
        if inventory is None or inventory.orphans:
            wrong.append(f"the inventory is {inventory and [o.key for o in inventory.orphans]}")
        here = {p["metadata"]["name"]: p for p in listed if p["metadata"].get("namespace") == self.namespace}
        states = [(name, pod["status"].get("phase"), pod["status"].get("message")) for name, pod in here.items()][:8]
        wrong += [f"{n} of {due} pods of {name} are ready: {states}" for name, (n, due) in ready.items() if n != due]
        return wrong or self._not_at_work(here)

    def _not_at_work(self, here: Mapping[str, Any]) -> list[str]:
        alive = {name for name, pod in here.items() if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]}  # fmt: skip
        try:
            containers = {one.pod.partition("/")[2]: one for one in node.status().containers}
        except (OSError, BadDocument) as error:
            return [f"the arbiter's status: {error}"]
        return [
            f"{name} is not at work" for name in sorted(alive) if name not in containers or not containers[name].processes
        ] + [f"{name} has processes left" for name in sorted(containers.keys() - alive) if containers[name].processes]  # fmt: skip

    def _at_work(self) -> bool:
        return len(node.gpu_processes()) == 2 + REPLICAS

    def _scale(self, replicas: int, name: str = SUBJECT) -> None:
        self.cluster.api.patch("replicaset", name, self.namespace, {"spec": {"replicas": replicas}})

    def _drop_filler(self) -> None:
        """Each round has its own: the pods of one ReplicaSet are preempted a few times an hour, then no more."""
        with contextlib.suppress(NotThere):
            self.cluster.api.delete("replicaset", FILLER, self.namespace)

    def _ready(self, name: str = SUBJECT) -> int:
        found = self.cluster.find("replicaset", name, self.namespace)
        return int(found["status"].get("readyReplicas", 0)) if found else 0

    def _subjects(self) -> list[dict[str, Any]]:
        return [pod for pod in self._of(SUBJECT) if pod["status"].get("phase") not in ("Failed", "Succeeded")]

    def _of(self, name: str) -> list[dict[str, Any]]:
        return self.cluster.api.listed("pod", self.namespace, f"app={name}")

    def _residents(self) -> list[dict[str, Any]]:
        return self.cluster.api.listed("pod", self.namespace, f"app in ({','.join(RESIDENTS)})")

    def _folders(self) -> list[str]:
        return [folder.name for folder in (node.STATE / "grants").glob("[!.]*")]


def _pages(listed: list[dict[str, Any]]) -> dict[str, str]:
    """What each part reports of itself."""
    own, scheduler, webhook = (address_of(listed, part) for part in ("node", "scheduler", "webhook"))
    return {
        "device plugin": node.page(own, 9402, "/readyz").strip(),
        "arbiter": node.page(own, 9403, "/healthz").strip(),
        "extender": node.page(scheduler, 8889, "/readyz").strip(),
        "webhook": node.page(webhook, 8080, "/readyz").strip(),
    }
