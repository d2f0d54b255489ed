"""The host pool: a DaemonSet of its own, charged for its memory, with the settings of the programs that use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml

from arbiter.settings import ArbiterSettings
from deviceplugin.settings import DevicePluginSettings
from hostpool.settings import HostPoolSettings
from tests.apiserver import ApiServer
from tests.contract.chart.rendering import CHART, Helm, Objects, Refused, env
from tests.contract.chart.rights import assert_confined

ON = {"enabled": True, "hostPool": "64Gi"}
HUGE = ON | {"hugepages": True}


def spec_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects.one("DaemonSet", "tangram-pool")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("burst", [{}, {"enabled": True}, {"hostPool": "64Gi"}])
def test_without_burst_or_a_size_there_is_no_pool_and_nothing_is_taken_off(helm: Helm, burst: dict[str, Any]) -> None:
    objects = helm.objects({"burst": burst, "serviceMonitor": {"enabled": True}})
    assert not [thing for thing in objects.items if "pool" in thing["metadata"]["name"]]
    for name in ("plugin", "arbiter"):
        assert not [key for key in env(objects.container(name)) if "HOST_POOL" in key or "ARBITER_BURST" in key]
    assert "copiers" not in {mount["name"] for mount in objects.container("arbiter")["volumeMounts"]}


@pytest.mark.parametrize(
    ("burst", "resources"),
    [
        (ON, {"memory": "66560Mi"}),
        (HUGE, {"hugepages-2Mi": "65536Mi", "memory": "1024Mi"}),
        (ON | {"hostPool": "1Ti", "pool": {"overhead": "512Mi"}}, {"memory": "1049088Mi"}),
    ],
)
def test_the_pool_is_requested_whole_and_the_plugin_knows_what_is_requested(
    helm: Helm, burst: dict[str, Any], resources: dict[str, str]
) -> None:
    objects = helm.objects({"burst": burst})
    pool = objects.container("pool")
    assert pool["resources"] == {"requests": {"cpu": "50m"} | resources, "limits": resources}
    assert json.loads(env(objects.container("plugin"))["TANGRAM_DEVICEPLUGIN_HOST_POOL_REQUEST"]) == resources


@pytest.mark.parametrize(
    ("values", "privileged"),
    [({}, True), ({"accessMode": "nvidia"}, False), ({"accessMode": "cdi", "runtimeClassName": "nvidia"}, False)],
)
def test_the_pod_is_privileged_only_where_nothing_else_opens_device_nodes(
    helm: Helm, values: dict[str, Any], *, privileged: bool
) -> None:
    objects = helm.objects(values | {"burst": ON})
    spec, pool = spec_of(objects), objects.container("pool")
    if privileged:
        assert pool["securityContext"] == {"privileged": True, "readOnlyRootFilesystem": True}
    else:
        assert_confined(pool)
        assert spec["runtimeClassName"] == "nvidia"
        assert env(pool)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert spec["securityContext"]["runAsUser"] == 0
    assert not {"hostPID", "hostIPC", "hostNetwork"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    assert not any("projected" in volume for volume in spec["volumes"])


def test_the_file_system_is_mounted_by_an_init_container_unless_the_node_has_one(helm: Helm) -> None:
    (mount,) = spec_of(helm.objects({"burst": HUGE, "accessMode": "nvidia"}))["initContainers"]
    assert mount["command"][-2:] == ["/var/lib/tangram/pool", "--hugetlbfs"]
    assert mount["volumeMounts"][0]["mountPropagation"] == "Bidirectional"
    own = helm.objects({"burst": ON | {"poolFolder": "/mnt/pool"}, "accessMode": "nvidia"})
    assert "initContainers" not in spec_of(own)
    assert not any(container["securityContext"].get("privileged") for container in spec_of(own)["containers"])
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec_of(own)["volumes"]}
    assert host["pool"] == "/mnt/pool"
    assert env(own.container("pool"))["TANGRAM_HOSTPOOL_POOL_DIRS"] == '["/pool"]'


def test_a_change_of_pages_keeps_the_pool_that_exists(helm: Helm) -> None:
    """Both folders are named: the copier uses a file that exists before the first folder that has room."""
    for burst, folders in ((ON, ["/pool/tmpfs", "/pool/hugetlbfs"]), (HUGE, ["/pool/hugetlbfs", "/pool/tmpfs"])):
        given = env(helm.objects({"burst": burst}).container("pool"))["TANGRAM_HOSTPOOL_POOL_DIRS"]
        assert json.loads(given) == folders


def test_the_pods_run_where_the_device_plugin_runs(helm: Helm) -> None:
    values: dict[str, Any] = {"node": {"nodeSelector": {"a": "b"}, "priorityClassName": "p"}, "burst": ON}
    objects = helm.objects(values)
    node = objects.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    for key in ("nodeSelector", "affinity", "tolerations", "priorityClassName"):
        assert spec_of(objects)[key] == node[key], key
    assert "nodeAffinity" in node["affinity"]


def test_no_other_pod_mounts_the_pool_and_the_arbiter_reads_the_sockets_folder_alone(helm: Helm) -> None:
    objects = helm.objects({"burst": HUGE})
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec_of(objects)["volumes"]}
    assert host["pool"] == "/var/lib/tangram/pool", "a hostPath that no pod with a share may have"
    node = objects.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    seen = {
        volume["name"] for volume in node["volumes"] if volume.get("hostPath", {}).get("path") == "/var/lib/tangram"
    }
    assert seen.isdisjoint(mount["name"] for mount in objects.container("arbiter")["volumeMounts"])
    mounts = {mount["mountPath"]: mount for mount in objects.container("arbiter")["volumeMounts"]}
    assert mounts["/var/lib/tangram/copiers"]["readOnly"] is True
    mine = {mount["mountPath"]: bool(mount.get("readOnly")) for mount in objects.container("pool")["volumeMounts"]}
    assert mine == {
        "/var/lib/tangram/copiers": False,
        "/var/lib/tangram/plugin": True,
        "/pool": False,
        "/driver-root": True,
        "/run/nvidia": True,
    }


def test_the_three_programs_meet_at_the_same_paths(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = helm.objects({"burst": HUGE, "stateRoot": "/var/state"})
    for name in ("plugin", "arbiter", "pool"):
        for key, value in env(objects.container(name)).items():
            if key.startswith("TANGRAM_"):
                monkeypatch.setenv(key, value if isinstance(value, str) else "from-the-api")
    plugin, pool, arbiter = DevicePluginSettings(), HostPoolSettings(), ArbiterSettings()  # type: ignore[call-arg]
    assert pool.shared_gpus == plugin.shared_gpus
    assert pool.status_file == plugin.host_pool_status
    assert pool.copiers_dir == arbiter.copiers_dir == Path("/var/state/copiers")
    assert pool.metrics_access_socket == plugin.access_socket
    assert arbiter.swap_dir == Path("/var/state/arbiter/swap")
    assert [str(folder) for folder in pool.pool_dirs] == ["/pool/hugetlbfs", "/pool/tmpfs"]
    assert (pool.pool_bytes, pool.reserve_bytes) == (64 * 2**30, 4 * 2**30)
    assert (plugin.host_pool, plugin.copier_context_mib) == ("64Gi", 520)


def test_the_settings_of_swapping_reach_the_arbiter_and_the_defaults_are_its_own(helm: Helm) -> None:
    def given(**burst: Any) -> dict[str, Any]:
        rendered = env(helm.objects({"burst": ON | burst}).container("arbiter"))
        prefix = "TANGRAM_ARBITER_BURST_"
        return {key.removeprefix(prefix): value for key, value in rendered.items() if key.startswith(prefix)}

    for key, value in given().items():
        assert str(ArbiterSettings.model_fields[f"burst_{key.lower()}"].default).removesuffix(".0") == value
    assert given(reclaimTimeout="2m", overLimit="report", stranded="keep", strandedAfter="1h", poolFull="refuse") == {
        "RECLAIM_TIMEOUT_S": "120",
        "OVER_LIMIT": "report",
        "STRANDED": "keep",
        "STRANDED_AFTER_S": "3600",
        "POOL_FULL": "refuse",
    }


def test_the_context_that_the_schema_takes_is_one_that_the_plugin_takes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["burst"]["properties"]["contextMiB"]
    limits = {type(limit): limit for limit in DevicePluginSettings.model_fields["copier_context_mib"].metadata}
    assert schema["minimum"] == limits[annotated_types.Ge].ge  # type: ignore[attr-defined]
    assert schema["maximum"] == limits[annotated_types.Le].le  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("burst", "named"),
    [
        ({"hostPool": "64GB"}, "hostPool"),
        ({"hostPool": 64}, "hostPool"),
        ({"hostPool": "0Gi"}, "hostPool"),
        ({"hostReserve": ""}, "hostReserve"),
        ({"reclaimTimeout": "10"}, "reclaimTimeout"),
        ({"strandedAfter": "0s"}, "strandedAfter"),
        ({"overLimit": "evict"}, "overLimit"),
        ({"stranded": "kill"}, "stranded"),
        ({"poolFull": "wait"}, "poolFull"),
        ({"poolFolder": "shm"}, "poolFolder"),
        ({"poolFolder": "/mnt/pool/"}, "poolFolder"),
        ({"contextMiB": -1}, "contextMiB"),
        ({"pool": {"overhead": "1"}}, "overhead"),
        (HUGE | {"hostPool": "5Mi"}, "it must be a multiple of 2Mi"),
    ],
)
def test_values_that_are_none_are_refused_by_name(helm: Helm, burst: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        helm.objects({"burst": burst})


def test_the_notes_say_that_burst_without_a_pool_has_no_effect(helm: Helm, api: ApiServer) -> None:
    assert "burst.hostPool is empty" in helm.notes({"burst": {"enabled": True}}, api.kubeconfig)
    with_pool = helm.notes({"burst": ON}, api.kubeconfig)
    assert "burst.hostPool is empty" not in with_pool
    assert "keeps 64Gi of its memory as host pool" in with_pool


def test_burst_is_off_by_default() -> None:
    burst = yaml.safe_load((CHART / "values.yaml").read_text())["burst"]
    assert (burst["enabled"], burst["hostPool"]) == (False, "")
