"""A label of the node declares its MIG layout: instances in use stay, a wrong label changes nothing, and MIG mode is switched on a GPU that was idle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hack.kubectl import CommandFailed
from hack.stack import NAMESPACE, install_fake_driver
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.gpus import GPUS
from tests.e2e.objects import container, pod, share
from tests.mig_layouts import LAYOUTS
from vgpu.api.names import DEFAULT

BARE = "gpu a100-80 count=2\n"
"""Both without MIG mode."""
WITH_OFF = (
    LAYOUTS
    + """\
  off:
    - devices: all
      mig-enabled: false
"""
)
MAP, LABEL, STATE = "mig-layouts", DEFAULT.mig_config, DEFAULT.mig_config_state
IDLE_S = 3


@pytest.fixture(scope="module")
def declared(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with these GPUs and layouts; afterwards as the other tests need it."""
    meta = {"name": MAP, "namespace": NAMESPACE}
    layouts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"config.yaml": WITH_OFF}}
    install_fake_driver(cluster.kubectl, BARE)
    try:
        cluster.kubectl.apply(layouts)
        cluster.upgrade({"node": {"migConfigMap": MAP, "migModeIdleSeconds": IDLE_S}})
        yield cluster
    finally:
        with contextlib.suppress(CommandFailed):
            label(cluster, "")
        install_fake_driver(cluster.kubectl, GPUS)
        cluster.upgrade({})
        cluster.kubectl("-n", NAMESPACE, "delete", "configmap", MAP, "--ignore-not-found")
        cluster.wait_for_gpus("tangram.sh/mig-1g.10gb")


def label(cluster: Cluster, name: str) -> None:
    """Empty: it is removed."""
    change = f"{LABEL}={name}" if name else f"{LABEL}-"
    cluster.kubectl("label", "node", cluster.node()["metadata"]["name"], change, "--overwrite")


def is_so(cluster: Cluster, state: str, **offered: int) -> None:
    """The label of the state, and what the node offers by MIG profile."""

    def now() -> bool:
        node = cluster.node()
        found = {key: int(value) for key, value in node["status"]["allocatable"].items() if "/mig-" in key}
        has = {DEFAULT.mig(key.replace("_", ".")): count for key, count in offered.items()}
        same_state: bool = node["metadata"]["labels"].get(STATE) == state
        return same_state and {key: count for key, count in found.items() if count} == has

    eventually(now, f"the node is {state} and offers {offered}", timeout_s=120)


def test_a_label_switches_the_mode_of_an_idle_gpu_and_makes_the_layout(declared: Cluster, namespace: str) -> None:
    label(declared, "halves")
    is_so(declared, "success", **{"3g_40gb": 2})
    declared.run(namespace, pod("half", container(mig="3g.40gb")), share("part", "8Gi"))
    assert declared.sees(namespace, "half") == declared.assigned(namespace, "half")
    label(declared, "mixed")
    is_so(declared, "success", **{"3g_40gb": 1, "1g_10gb": 2})
    assert declared.sees(namespace, "half") == declared.assigned(namespace, "half")
    declared.run(namespace, pod("small", container(mig="1g.10gb")))
    label(declared, "none-such")
    is_so(declared, "failed", **{"3g_40gb": 1, "1g_10gb": 2})
    notes = [
        one.get("note") or "" for one in declared.api.listed("event", "default") if one["reason"] == "MigConfigFailed"
    ]
    assert any(f"{LABEL}=none-such" in note and "halves, mixed, off" in note for note in notes), notes
