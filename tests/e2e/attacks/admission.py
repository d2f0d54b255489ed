"""Pods that admission must refuse: by the webhook, by the policy where the webhook is not asked, or by Pod Security."""

from __future__ import annotations

from typing import Any, Final

from tests.e2e.attacks.attack import PRIVILEGED_ONLY, Attack, Level, Outcome
from tests.e2e.objects import container, pod, share

BASELINE_AND_ABOVE: Final = (Level.BASELINE, Level.PRIVILEGED)


def _refused(name: str, does: str, prints: str, thing: dict[str, Any], **more: Any) -> Attack:
    thing["metadata"]["name"] = name
    return Attack(
        name=name,
        does=does,
        outcome=Outcome.REFUSED,
        prints=prints,
        pod=thing,
        **({"levels": (Level.BASELINE,)} | more),
    )


def _node_folder(name: str, path: str, what: str) -> Attack:
    """Read-only, as a socket can be connected to and a device opened through such a mount, too."""
    mount = {"name": "node", "mountPath": "/node", "readOnly": True}
    thing = pod(name, container(mem=2, volumeMounts=[mount]), volumes=[{"name": "node", "hostPath": {"path": path}}])
    return _refused(
        name,
        f"A pod with a share mounts the node's {path}, {what}.",
        f"is the node's {path}",
        thing,
        levels=PRIVILEGED_ONLY,
    )


def _security(name: str, does: str, prints: str, **context: Any) -> Attack:
    return _refused(name, does, prints, pod(name, container(mem=2, securityContext=context)), levels=PRIVILEGED_ONLY)


ATTACKS: Final = (
    _refused(
        "visible-devices", "A container sets NVIDIA_VISIBLE_DEVICES to all.", "NVIDIA_VISIBLE_DEVICES",
        share("x", 2, env={"NVIDIA_VISIBLE_DEVICES": "all"}),
    ),
    _refused(
        "visible-devices-beside", "A container without a share, in a pod that has one, sets NVIDIA_VISIBLE_DEVICES to all.", "NVIDIA_VISIBLE_DEVICES",
        pod("x", container(mem=2), container("beside", env={"NVIDIA_VISIBLE_DEVICES": "all"})),
    ),
    _refused(
        "forged-assignment", "A pod brings an assignment of its own.", "tangram.sh/assignment",
        share("x", 2, annotations={"tangram.sh/assignment": "{}"}),
    ),
    _refused(
        "forged-gpus", "A pod brings the annotation that its environment's GPUs come from.", "tangram.sh/gpus.main",
        share("x", 2, annotations={"tangram.sh/gpus.main": "all"}),
    ),
    _refused(
        "forged-gpus-variable", "A container sets TANGRAM_GPUS.", "TANGRAM_GPUS", share("x", 2, env={"TANGRAM_GPUS": "all"})
    ),
    _refused("own-node", "A pod names its node itself (nodeName).", "spec.nodeName is", share("x", 2, nodeName="node-1")),
    _refused(
        "other-scheduler", "A pod names another scheduler.", "does not place GPU shares", share("x", 2, schedulerName="somebodys")
    ),
    _node_folder("node-grants", "/var/lib/tangram/grants", "where the grants and the library are"),
    _node_folder("node-state", "/var/lib", "a parent of Tangram's state folder"),
    _node_folder("node-device", "/dev/nvidia1", "a GPU that it was not given"),
    _node_folder("node-devices", "/dev", "with the nodes of every GPU"),
    _node_folder("node-cdi", "/var/run/cdi", "where a CDI specification gives devices to containers"),
    _node_folder("node-kubelet", "/var/lib/kubelet", "with the records of devices and other pods' volumes"),
    _node_folder("node-runtime", "/run/containerd/containerd.sock", "which starts any container"),
    _node_folder("node-root", "/", "with all of these"),
    _security("privileged", "A container with a share is privileged.", "is privileged", privileged=True),
    _security(
        "sys-admin", "A container with a share adds SYS_ADMIN.", "SYS_ADMIN", capabilities={"add": ["SYS_ADMIN"]}
    ),
    _refused(
        "node-processes", "A pod with a share sees the node's processes (hostPID).", "hostPID: true",
        share("x", 2, hostPID=True), levels=PRIVILEGED_ONLY,
    ),
    _refused(
        "privileged-beside", "An init container beside a share is privileged.", "is privileged",
        pod("x", container(mem=2), init=[container("first", securityContext={"privileged": True})]), levels=PRIVILEGED_ONLY,
    ),
    _refused(
        "pod-security", "A pod without a share mounts the node's device folder where the namespace enforces Pod Security.", "violates PodSecurity",
        pod("x", container(), volumes=[{"name": "node", "hostPath": {"path": "/dev"}}]), levels=(Level.RESTRICTED, Level.BASELINE),
    ),
)  # fmt: skip
