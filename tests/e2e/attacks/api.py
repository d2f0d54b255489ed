"""What a user may try with the API server on a pod that runs, on a node, and with devices named past Tangram."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.e2e.attacks.attack import Attack, Level, Outcome
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod

JANE: Final = ("--as", "jane", "--as-group", "system:masters")
"""Any right of the API server's, and none of Tangram's."""
REFUSED: Final = Outcome.REFUSED
ONCE: Final = (Level.BASELINE,)


def annotate(*what: str) -> Any:
    def act(cluster: Cluster, namespace: str, name: str) -> None:
        cluster.kubectl("-n", namespace, "annotate", "pod", name, *what, "--overwrite", *JANE)

    return act


def annotate_node(cluster: Cluster, _namespace: str, _name: str) -> None:
    cluster.kubectl(
        "annotate", "node", cluster.node()["metadata"]["name"], "tangram.sh/inventory={}", "--overwrite", *JANE
    )


def own_binding(cluster: Cluster, namespace: str, _name: str) -> None:
    """Of a pod that no scheduler takes."""
    cluster.create(namespace, pod("unbound", container(), schedulerName="nobody"))
    target = {"apiVersion": "v1", "kind": "Node", "name": cluster.node()["metadata"]["name"]}
    metadata = {"name": "unbound", "annotations": {"tangram.sh/assignment": "{}"}}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
    path = f"/api/v1/namespaces/{namespace}/pods/unbound/binding"
    cluster.kubectl("create", "--raw", path, "-f", "-", *JANE, stdin=json.dumps(binding))


def ephemeral(**more: Any) -> Any:
    def act(cluster: Cluster, namespace: str, name: str) -> None:
        debug = {key: value for key, value in container("debug", **more).items() if key != "resources"}
        patch = json.dumps({"spec": {"ephemeralContainers": [debug]}})
        cluster.kubectl("-n", namespace, "patch", "pod", name, "--subresource=ephemeralcontainers", "-p", patch, *JANE)

    return act


def ephemeral_over_etc(cluster: Cluster, namespace: str, name: str) -> None:
    """By a volume that every pod has: the token of its account."""
    (volume, *_) = cluster.pod(namespace, name)["spec"]["volumes"]
    mounts = [{"name": volume["name"], "mountPath": "/etc/."}]
    ephemeral(volumeMounts=mounts)(cluster, namespace, name)


def resize(cluster: Cluster, namespace: str, name: str) -> None:
    """The running pod's share, from 8 GiB to 64."""
    (main, *_) = cluster.pod(namespace, name)["spec"]["containers"]
    more = {"tangram.sh/gpu-mem": "64"}
    patch = json.dumps(
        {"spec": {"containers": [{"name": main["name"], "resources": {"limits": more, "requests": more}}]}}
    )
    cluster.kubectl("-n", namespace, "patch", "pod", name, "--subresource=resize", "-p", patch, *JANE)


def _act(name: str, does: str, prints: str, act: Any) -> Attack:
    return Attack(name=name, does=does, outcome=REFUSED, levels=ONCE, prints=prints, act=act)


NO_DEVICE: Final = 'log("tried: devices " + " ".join(n for n in os.listdir("/dev") if "nvidia" in n)); take()'

ATTACKS: Final = (
    _act("edited-assignment", "A user changes the assignment of a running pod.", "tangram.sh/assignment", annotate("tangram.sh/assignment={}")),
    _act("edited-gpus", "A user changes the GPUs of a running pod's container.", "tangram.sh/gpus.main", annotate("tangram.sh/gpus.main=GPU-other")),
    _act("removed-assignment", "A user removes the assignment of a running pod.", "tangram.sh/assignment", annotate("tangram.sh/assignment-")),
    _act("forged-inventory", "A user changes the node's inventory annotation.", "tangram.sh/inventory", annotate_node),
    _act("own-binding", "A user binds a pod with an assignment of the user's own.", "tangram.sh/assignment", own_binding),
    _act(
        "ephemeral-privileged", "A user adds a privileged ephemeral container to a pod with a share.", "is privileged",
        ephemeral(securityContext={"privileged": True}),
    ),
    _act(
        "ephemeral-devices", "A user adds an ephemeral container with NVIDIA_VISIBLE_DEVICES=all.", "NVIDIA_VISIBLE_DEVICES",
        ephemeral(env={"NVIDIA_VISIBLE_DEVICES": "all"}),
    ),
    _act(
        "ephemeral-mount", "A user adds an ephemeral container with a volume over /etc.", "container debug mounts volume",
        ephemeral_over_etc,
    ),
    _act("resized", "A user raises the share of a running pod.", "only cpu and memory resources are mutable", resize),
    Attack(
        name="cdi-annotations",
        does="A pod without a share names every CDI device of Tangram's in its annotations.",
        outcome=REFUSED,
        prints="refused: no driver",
        pod=pod("cdi", container(), annotations={"cdi.k8s.io/tangram": "tangram.sh/gpu=all", "cdi.k8s.io/nvidia": "nvidia.com/gpu=all"}),
        script="take()",
    ),
    Attack(
        name="cdi-annotations-with-a-share",
        does="A pod with a share names every CDI device in its annotations.",
        outcome=Outcome.HARMLESS,
        pod=pod("cdi", container(mem=1), annotations={"cdi.k8s.io/tangram": "tangram.sh/gpu=all"}),
        script=NO_DEVICE,
        prints="tried: devices",
    ),
    Attack(
        name="unscheduled",
        does="A pod in a namespace that the webhook leaves out names its node itself, past the scheduler.",
        outcome=REFUSED,
        levels=ONCE,
        test="tests/e2e/test_denials.py::test_a_pod_past_our_scheduler_is_refused_by_the_device_plugin",
    ),
    Attack(
        name="force-deleted",
        does="A pod is deleted by force while its process lives on, so that its memory would be given to another.",
        outcome=Outcome.HARMLESS,
        levels=ONCE,
        test="tests/e2e/test_faults.py::test_a_pod_deleted_by_force_keeps_its_capacity_while_its_processes_run",
    ),
)  # fmt: skip
