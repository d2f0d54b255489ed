"""Where a pod with a share may mount nothing, said by a real API server: the same as the webhook says, of every kind of container."""

from __future__ import annotations

from typing import Any

import pytest

from hack.waiting import eventually
from tests.apiserver import ApiServer, Denied
from tests.contract.chart.policy_kit import (
    PODS,
    POLICIES,
    SHARE,
    container,
    pod,
    refused,
    visible,
    wait_until_in_force,
)
from tests.contract.chart.rendering import Objects
from tests.mount_paths import ALLOWED, REFUSED
from vgpu.api.mount_paths import PATTERN

BINDINGS = POLICIES.replace("policies", "policybindings")
VOLUMES = [{"name": "scratch", "emptyDir": {}}]


def mounting(*paths: str) -> dict[str, Any]:
    return {"volumeMounts": [{"name": "scratch", "mountPath": path} for path in paths]}


def test_the_policy_has_the_pattern_of_the_webhook(local: Objects) -> None:
    variables = local.one("ValidatingAdmissionPolicy", "tangram-pods")["spec"]["variables"]
    expressions = {variable["name"]: variable["expression"] for variable in variables}
    assert f".matches(r'{PATTERN}')" in expressions["covered"]


@pytest.mark.parametrize("path", REFUSED)
def test_a_share_with_a_volume_over_its_library_does_not_come_in(policies: ApiServer, path: str) -> None:
    message = refused(lambda: pod(policies, container(limits=SHARE, **mounting("/data", path)), volumes=VOLUMES))
    assert f"container main mounts volume scratch at {path}, which a pod with a GPU share may not" in message


def test_a_share_with_volumes_elsewhere_comes_in(policies: ApiServer) -> None:
    pod(policies, container(limits=SHARE, **mounting(*ALLOWED)), volumes=VOLUMES)


@pytest.mark.parametrize(
    ("beside", "culprit"),
    [
        ({"initContainers": [container("init", **mounting("/etc"))]}, "init"),
        ({"initContainers": [container("proxy", restartPolicy="Always", **mounting("//.tangram"))]}, "proxy"),
        ({"containers": [container(limits=SHARE), container("beside", **mounting("/"))]}, "beside"),
    ],
    ids=["init", "sidecar", "beside"],
)
def test_no_container_of_the_pod_mounts_there(policies: ApiServer, beside: dict[str, Any], culprit: str) -> None:
    spec = {"containers": [container(limits=SHARE)], "volumes": VOLUMES} | beside
    message = refused(lambda: pod(policies, *spec.pop("containers"), **spec))
    assert f"container {culprit} mounts volume scratch at " in message


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"volumeDevices": [{"name": "scratch", "devicePath": "/etc/ld.so.preload"}]}, "block volume scratch at /etc/ld.so.preload"),
        ({"terminationMessagePath": "/.tangram/libtangram.so"}, "the termination message (terminationMessagePath) at /.tangram/libtangram.so"),
    ],
)  # fmt: skip
def test_what_is_mounted_beside_volumes_counts(policies: ApiServer, more: dict[str, Any], what: str) -> None:
    volumes = [{"name": "scratch", "persistentVolumeClaim": {"claimName": "disk"}}]
    assert f"container main mounts {what}," in refused(
        lambda: pod(policies, container(limits=SHARE, **more), volumes=volumes)
    )


def test_pods_without_a_share_mount_where_they_like(policies: ApiServer) -> None:
    for limits in ({}, {"tangram.sh/gpu": "1"}):
        pod(policies, container(limits=limits, **mounting(*REFUSED)), volumes=VOLUMES)


@pytest.mark.parametrize(("path", "comes_in"), [("/etc/.", False), ("/run", True)])
def test_an_ephemeral_container_covers_nothing(policies: ApiServer, path: str, *, comes_in: bool) -> None:
    name = pod(policies, container(limits=SHARE), volumes=VOLUMES)
    path_of_pod = f"{PODS}/{name}/ephemeralcontainers"
    debug = [{"name": "debug", "image": "none", **mounting(path)}]

    def act(*more: dict[str, Any]) -> None:
        policies.patch(path_of_pod, {"spec": {"ephemeralContainers": [*debug, *more]}}, user="jane")

    void = {"name": "second", "image": "none"}
    if comes_in:
        act()
        act(void)
    else:
        assert f"container debug mounts volume scratch at {path}," in refused(act)


def test_a_pod_that_came_in_before_the_policy_changes_as_it_did(policies: ApiServer) -> None:
    """The release before let volumes at /etc in: such a pod gets its labels, and its ephemeral containers."""
    binding = policies("GET", f"{BINDINGS}/tangram-pods")
    policies("DELETE", f"{BINDINGS}/tangram-pods")

    def admitted() -> str:
        try:
            return pod(policies, container(limits=SHARE, **mounting("/etc")), volumes=VOLUMES)
        except Denied:
            return ""

    try:
        name = eventually(admitted, "the policy is out of force")
    finally:
        again = {key: binding[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "tangram-pods"}}
        policies.apply(again, BINDINGS)
        wait_until_in_force(policies)
    policies.patch(f"{PODS}/{name}", {"metadata": {"labels": {"a": "b"}}})
    debug = {"name": "debug", "image": "none", **visible("void"), **mounting("/data")}
    policies.patch(f"{PODS}/{name}/ephemeralcontainers", {"spec": {"ephemeralContainers": [debug]}}, user="jane")


def test_a_pod_with_very_many_volumes_is_still_judged(policies: ApiServer) -> None:
    """A policy that ran out of the API server's budget would refuse it."""
    paths = [f"/data/of/a/directory/with/a/rather/long/path/{number}" for number in range(60)]
    many = [container(f"c{number}", limits=SHARE, **mounting(*paths)) for number in range(20)]
    pod(policies, *many, volumes=VOLUMES)
    many[-1]["volumeMounts"].append({"name": "scratch", "mountPath": "/etc"})
    assert "container c19 mounts volume scratch at /etc," in refused(lambda: pod(policies, *many, volumes=VOLUMES))
