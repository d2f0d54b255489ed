"""Tangram on a cluster, as the demo and the end-to-end tests put it there: the fake driver, then the chart.

Everything goes through what a user has too: `kubectl apply` and `helm upgrade --install`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from hack.cluster.layout import current_images
from hack.kubectl import CommandFailed, Kubectl, set_values

NAMESPACE: Final = "tangram-system"
RELEASE: Final = "tangram"
FAKE_DRIVER_ROOT: Final = "/var/lib/tangram-fake-driver"

CHART: Final = "deploy/helm/tangram"
FAKE_DRIVER: Final = "deploy/fake-driver/daemonset.yaml"
VALUES: Final = "hack/local-values.yaml"
"""Paths from the root of the tree, where these commands run."""

NO_FAKE_DRIVER: Final[Mapping[str, Any]] = {
    "extraVolumes": [],
    "plugin": {"extraEnv": []},
    "arbiter": {"extraEnv": [], "extraVolumeMounts": []},
}
"""Values under `node`, where a driver is found as everywhere else."""


def install_fake_driver(kubectl: Kubectl, gpus: str) -> None:
    """The fake driver on every node, with the GPUs that the description names. Restarts it when they changed, and the programs that read them."""
    kubectl("apply", "-f", FAKE_DRIVER)
    described = f"--from-literal=gpus.conf={shlex.quote(gpus)}"
    changed = kubectl.shell(
        f"kubectl -n fake-gpu create configmap fake-driver-gpus {described} --dry-run=client -o yaml | kubectl apply -f -"
    )
    if "configured" in changed:
        kubectl("-n", "fake-gpu", "rollout", "restart", "daemonset/fake-driver")
    kubectl("-n", "fake-gpu", "rollout", "status", "daemonset/fake-driver", "--timeout=120s")
    if "configured" in changed:
        kubectl("-n", NAMESPACE, "delete", "pod", "-l", "app.kubernetes.io/component=node", "--wait", "--timeout=60s")


def remove_fake_driver(kubectl: Kubectl) -> None:
    """Take the fake driver away; its files on the nodes stay."""
    kubectl("delete", "-f", FAKE_DRIVER, "--ignore-not-found", "--wait")


def install_chart(kubectl: Kubectl, values: Mapping[str, Any] | None = None, tree: str = ".") -> None:
    """`helm upgrade --install` and wait until every part is ready and the nodes offer their GPUs. `tree`: of another release than this, with its values for us."""
    kubectl("apply", "-f", "deploy/namespace.yaml")
    more = set_values(merge({"podAnnotations": image_build()} if tree == "." else {}, values or {}))
    kubectl.helm(
        "upgrade", "--install", RELEASE, f"{tree}/{CHART}", "-n", NAMESPACE, "-f", f"{tree}/{VALUES}", "--wait", "--timeout", "3m",
        *more,
    )  # fmt: skip
    kubectl("-n", NAMESPACE, "rollout", "status", f"daemonset/{RELEASE}-node", "--timeout=120s")


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
