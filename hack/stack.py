"""Tangram on a cluster, as the demo and the end-to-end tests put it there: the fake driver, then the chart.

Everything goes through what a user has too: `kubectl apply` and `helm upgrade --install`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hack.cluster.layout import current_images
from hack.kubectl import CommandFailed, Kubectl, set_values

ROOT: Final = Path(__file__).resolve().parent.parent
NAMESPACE: Final = "tangram-system"
RELEASE: Final = "tangram"
FAKE_DRIVER_ROOT: Final = "/var/lib/tangram-fake-driver"

VALUES: Final[Mapping[str, Any]] = {
    "image": {"registry": "localhost", "repository": "tangram", "tag": "dev", "pullPolicy": "IfNotPresent"},
    "driver": {"root": FAKE_DRIVER_ROOT},
    "accessMode": "cdi",
    "node": {
        "privileged": "false",
        "requireGpuLabel": False,
        # the fake driver shows a process the cards whose device nodes it has; the plugin has none and sees them all
        "plugin": {
            "extraEnv": [{"name": "TANGRAM_FAKE_DRIVER", "value": "/driver-root/run/nvidia-persistenced/socket"}]
        },
    },
    "scheduler": {"replicas": 1},
    "webhook": {"replicas": 1},
    "test": {"image": "localhost/tangram-workload:dev"},
}
"""Chart values for a one-node cluster with images built here and the fake driver."""


def install_fake_driver(kubectl: Kubectl, cards: str) -> None:
    """The fake driver on every node, with the cards that the description names. Restarts it when they changed."""
    kubectl("apply", "-f", str(ROOT / "deploy/fake-driver/daemonset.yaml"))
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "fake-driver-cards", "namespace": "fake-gpu"},
        "data": {"cards.conf": cards},
    }
    if "unchanged" not in kubectl.apply(config):
        kubectl("-n", "fake-gpu", "rollout", "restart", "daemonset/fake-driver")
    kubectl("-n", "fake-gpu", "rollout", "status", "daemonset/fake-driver", "--timeout=120s")


def remove_fake_driver(kubectl: Kubectl) -> None:
    """Take the fake driver away; its files on the nodes stay."""
    kubectl("delete", "-f", str(ROOT / "deploy/fake-driver/daemonset.yaml"), "--ignore-not-found", "--wait")


def install_chart(kubectl: Kubectl, values: Mapping[str, Any] | None = None) -> None:
    """`helm upgrade --install` and wait until every part is ready and the nodes offer their GPUs."""
    kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
        }
    )
    chart = str(ROOT / "deploy/helm/tangram")
    merged = merge(merge(VALUES, {"podAnnotations": image_build()}), values or {})
    kubectl.helm(
        "upgrade", "--install", RELEASE, chart, "-n", NAMESPACE, "--wait", "--timeout", "3m", *set_values(merged)
    )


def image_build() -> dict[str, str]:
    """A pod annotation that changes with the image built here, whose tag stays the same: an upgrade then restarts the pods."""
    current = current_images() / "tangram.tar"
    return {"image-build": current.readlink().stem} if current.is_symlink() else {}


def uninstall_chart(kubectl: Kubectl) -> None:
    """`helm uninstall`; fine when it is not installed."""
    try:
        kubectl.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "2m")
    except CommandFailed as error:
        if "not found" not in str(error):
            raise


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, the second on top of the first."""
    both = dict(base)
    for key, value in over.items():
        mine = both.get(key)
        both[key] = merge(mine, value) if isinstance(mine, Mapping) and isinstance(value, Mapping) else value
    return both
