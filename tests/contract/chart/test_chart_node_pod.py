"""The pod of each node: what plugin and arbiter may reach, where they meet, and how the driver gets there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import annotated_types
import pytest
import yaml

from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.settings import DevicePluginSettings
from tests.contract.chart.rendering import CHART, Helm, Objects, Refused, env
from tests.contract.chart.rights import assert_confined
from vgpu.api.driver_places import OPERATOR_ROOT
from vgpu.gputime.trial_verdict import FILE


def test_the_node_pod_is_root_without_a_capability_but_that_to_kill_processes_over_a_limit(
    local: Objects, nvidia: Objects
) -> None:
    for objects in (local, nvidia):
        spec = objects.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
        assert spec["securityContext"] == {
            "runAsUser": 0,
            "runAsGroup": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert spec["hostPID"] is True
        assert "hostNetwork" not in spec
        for container in spec["containers"]:
            assert_confined(container, *(["KILL"] if container["name"] == "arbiter" else []))


@pytest.mark.parametrize(
    ("values", "privileged", "mode"),
    [
        ({}, True, "cdi"),
        ({"runtimeClassName": "nvidia"}, False, "nvidia"),
        ({"accessMode": "nvidia"}, False, "nvidia"),
        ({"accessMode": "cdi"}, True, "cdi"),
        ({"accessMode": "cdi", "runtimeClassName": "nvidia"}, False, "cdi"),
        ({"node": {"privileged": "false"}}, False, "cdi"),
        ({"node": {"privileged": False}}, False, "cdi"),
        ({"accessMode": "nvidia", "node": {"privileged": "true"}}, True, "nvidia"),
    ],
)
def test_the_plugin_is_privileged_only_where_nothing_else_opens_device_nodes(
    helm: Helm, values: dict[str, Any], *, privileged: bool, mode: str
) -> None:
    objects = helm.objects(values)
    plugin = objects.container("plugin")
    assert bool(plugin["securityContext"].get("privileged")) == privileged
    assert env(plugin)["TANGRAM_DEVICEPLUGIN_ACCESS"] == mode
    assert_confined(objects.container("arbiter"), "KILL")
    given = env(objects.container("webhook"))["TANGRAM_WEBHOOK_RUNTIME_CLASS"]
    assert given == ("nvidia" if mode == "nvidia" else "")


def test_in_mode_cdi_the_plugin_sees_the_driver_root_and_writes_specs(local: Objects) -> None:
    spec = local.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    mounts = {mount["mountPath"]: mount for mount in local.container("plugin")["volumeMounts"]}
    assert {path: (host.get(mount["name"]), bool(mount.get("readOnly"))) for path, mount in mounts.items()} == {
        "/var/lib/tangram": ("/var/lib/tangram", False),
        "/var/lib/kubelet/device-plugins": ("/var/lib/kubelet/device-plugins", False),
        "/var/lib/kubelet/pod-resources": ("/var/lib/kubelet/pod-resources", True),
        "/var/run/cdi": ("/var/run/cdi", False),
        "/driver-root": ("/var/lib/tangram-fake-driver", True),
        "/var/run/secrets/kubernetes.io/serviceaccount": (None, True),
    }
    assert env(local.container("plugin"))["TANGRAM_DEVICEPLUGIN_HOST_DRIVER_ROOT"] == "/var/lib/tangram-fake-driver"


def test_the_arbiter_reaches_grants_and_sockets_and_neither_driver_nor_library(rendered: Objects) -> None:
    arbiter = rendered.container("arbiter")
    pool = "tangram-pool" in rendered.of("DaemonSet")
    assert {mount["mountPath"]: bool(mount.get("readOnly")) for mount in arbiter["volumeMounts"]} == {
        "/var/lib/tangram/grants": True,
        "/var/lib/tangram/sockets": False,
        "/var/lib/tangram/arbiter": False,
        "/var/lib/tangram/plugin": True,
        **({"/var/lib/tangram/copiers": True} if pool else {}),
    }
    given = env(arbiter)
    assert given["TANGRAM_ARBITER_STATUS_SOCKET"] == "/var/lib/tangram/arbiter/status.sock"
    assert given["TANGRAM_ARBITER_NVML_SOCKET"] == "/var/lib/tangram/plugin/nvml.sock"
    assert given["TANGRAM_ARBITER_TRIALS_FILE"] == "/var/lib/tangram/plugin/trials.json"
    assert given.get("NVIDIA_VISIBLE_DEVICES", "void") == "void"
    assert "NVIDIA_DRIVER_CAPABILITIES" not in given


def test_nothing_that_the_arbiter_may_write_contains_the_library(rendered: Objects, tmp_path: Path) -> None:
    """Neither a file of it nor a hard link: in a state folder as the device plugin leaves it, with a container of each layout."""
    settings = env(rendered.container("plugin"))
    root = str(settings["TANGRAM_DEVICEPLUGIN_STATE_ROOT"])
    state, image = tmp_path / "state", tmp_path / "image.so"
    image.write_bytes(b"library")
    grants = GrantDirectories(state, image)
    library = grants.install()
    grants.prepare(Record(("GPU-0-1",), "uid", "default", "a", "main", ("GPU-0",), 0.0, 0))
    earlier = state / "grants" / "0123456789abcdef0123456789abcdef"
    earlier.mkdir()
    (earlier / "libtangram.so").hardlink_to(library)
    ready = list((state / "grants").glob(".spare-*"))
    assert library.stat().st_nlink == 3 + len(ready)
    (spec,) = [
        one["spec"]["template"]["spec"]
        for name, one in rendered.of("DaemonSet").items()
        if name.endswith("-node") and not name.endswith("-cleanup-node")
    ]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    writable = [host[m["name"]] for m in rendered.container("arbiter")["volumeMounts"] if not m.get("readOnly")]
    assert writable
    for path in writable:
        assert not Path(root).is_relative_to(path), f"{path} contains the whole state folder"
        assert Path(path).is_relative_to(root)
        folder = state / Path(path).relative_to(root)
        inodes = {one.stat().st_ino for one in folder.rglob("*") if one.is_file()}
        assert library.stat().st_ino not in inodes, f"{path} is writable to the arbiter and contains the library"
        assert not list(folder.rglob("libtangram.so"))


def test_plugin_and_arbiter_use_the_same_paths(rendered: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    arbiter = env(rendered.container("arbiter"))
    for name, value in env(rendered.container("plugin")).items():
        if name.startswith("TANGRAM_"):
            monkeypatch.setenv(name, value if isinstance(value, str) else "from-the-api")
    plugin = DevicePluginSettings()
    sockets = GrantDirectories(plugin.state_root, plugin.library).sockets
    assert str(sockets.path("k").parents[1]) == arbiter["TANGRAM_ARBITER_SOCKETS_DIR"]
    assert str(plugin.nvml_socket) == arbiter["TANGRAM_ARBITER_NVML_SOCKET"]
    assert plugin.metrics_access == "review"
    assert str(plugin.access_socket) == arbiter["TANGRAM_ARBITER_METRICS_ACCESS_SOCKET"]
    assert str(plugin.plugin_folder / FILE) == arbiter["TANGRAM_ARBITER_TRIALS_FILE"]
    assert str(plugin.status) == arbiter["TANGRAM_ARBITER_STATUS_SOCKET"]
    assert (plugin.nvml_start_s, plugin.nvml_call_s) == (120, 10)


def test_the_root_of_the_host_is_a_driver_root_too(helm: Helm) -> None:
    spec = helm.objects({"driver": {"root": "/"}}).one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    host = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    assert host["driver-root"] == "/"


def test_a_driver_container_that_mounts_its_root_later_is_seen_where_the_root_is_the_hosts(helm: Helm) -> None:
    for name, of in (("plugin", "tangram-node"), ("pool", "tangram-pool")):
        for root, seen in (("/", True), ("/run/nvidia/driver", False), ("/usr/local/nvidia", False)):
            objects = helm.objects({"driver": {"root": root}, "burst": {"enabled": True, "hostPool": "64Gi"}})
            spec = objects.one("DaemonSet", of)["spec"]["template"]["spec"]
            host = {volume["name"]: volume["hostPath"] for volume in spec["volumes"] if "hostPath" in volume}
            found = [one for one in objects.container(name)["volumeMounts"] if one["name"] == "driver-run"]
            assert ("driver-run" in host, bool(found)) == (seen, seen)
            if seen:
                assert host["driver-run"] == {
                    "path": f"/{OPERATOR_ROOT.rpartition('/')[0]}",
                    "type": "DirectoryOrCreate",
                }
                assert found[0] == {
                    "name": "driver-run", "mountPath": "/run/nvidia", "readOnly": True, "mountPropagation": "HostToContainer",
                }  # fmt: skip


def test_in_mode_nvidia_the_runtime_brings_the_driver(nvidia: Objects) -> None:
    spec = nvidia.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert {volume["name"] for volume in spec["volumes"]} == {
        "state",
        "grants",
        "sockets",
        "arbiter",
        "plugin",
        "device-plugins",
        "pod-resources",
        "token",
    }
    assert env(nvidia.container("plugin"))["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env(nvidia.container("plugin"))["NVIDIA_DRIVER_CAPABILITIES"] == "utility,compute"
    assert env(nvidia.container("arbiter"))["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_kubelets_configuration_is_mounted_only_where_it_is_read(helm: Helm) -> None:
    """Its folder has what pods are given, secrets too: the file alone is mounted."""
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, set()),
        ({"enabled": True}, {"/sys/devices/system/node", "/var/lib/kubelet/config.yaml"}),
        ({"enabled": True, "kubelet": {"topologyManagerPolicy": "restricted"}}, {"/sys/devices/system/node"}),
    ]
    for numa, mounted in cases:
        rendered = helm.objects({"node": {"numa": numa}})
        pod = rendered.one("DaemonSet", "tangram-node")["spec"]["template"]["spec"]
        paths = {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
        assert {path for path in paths if "/sys/" in path or "config" in path} == mounted
        plugin, arbiter = pod["containers"]
        names = {mount["name"] for mount in plugin["volumeMounts"]} & {"numa-nodes", "kubelet-config"}
        assert len(names) == len(mounted)
        assert names.isdisjoint(mount["name"] for mount in arbiter["volumeMounts"])
        variables = {one["name"]: one.get("value") for one in plugin["env"]}
        assert variables.get("TANGRAM_DEVICEPLUGIN_KUBELET_TOPOLOGY") == (
            '{"topologyManagerPolicy":"restricted"}' if "kubelet" in numa else None
        )


def test_mig_on_demand_is_off_unless_set_and_then_the_plugin_may_change_instances(helm: Helm) -> None:
    off = helm.objects({"accessMode": "nvidia"}).container("plugin")
    assert env(off)["TANGRAM_DEVICEPLUGIN_MIG_ON_DEMAND"] == "false"
    assert env(helm.objects({}).container("webhook"))["TANGRAM_WEBHOOK_MIG_ON_DEMAND"] == "false"
    values = {"accessMode": "nvidia", "node": {"migOnDemand": True, "migIdleSeconds": 5}}
    objects = helm.objects(values)
    on = objects.container("plugin")
    assert env(objects.container("webhook"))["TANGRAM_WEBHOOK_MIG_ON_DEMAND"] == "true"
    given = env(on)
    assert (given["TANGRAM_DEVICEPLUGIN_MIG_ON_DEMAND"], given["TANGRAM_DEVICEPLUGIN_MIG_IDLE_S"]) == ("true", "5")
    assert on["securityContext"]["privileged"]
    with pytest.raises(Refused, match=r"node\.privileged is false with node\.migOnDemand=true"):
        helm.objects({"node": {"migOnDemand": True, "privileged": False}})
    with pytest.raises(Refused, match="migIdleSeconds"):
        helm.objects({"node": {"migIdleSeconds": -1}})


def test_the_values_of_mig_on_demand_are_those_of_the_plugin() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["node"]
    ranges = json.loads((CHART / "values.schema.json").read_text())["properties"]["node"]["properties"][
        "migIdleSeconds"
    ]
    fields = DevicePluginSettings.model_fields
    assert (values["migOnDemand"], values["migIdleSeconds"]) == (
        fields["mig_on_demand"].default,
        fields["mig_idle_s"].default,
    )
    bounds = {type(one): one for one in fields["mig_idle_s"].metadata}
    assert (ranges["minimum"], ranges["maximum"]) == (bounds[annotated_types.Ge].ge, bounds[annotated_types.Le].le)


def test_a_declared_mig_layout_is_read_from_a_config_map_only_where_it_is_named(helm: Helm) -> None:
    off = helm.objects({"accessMode": "nvidia"})
    assert not [key for key in env(off.container("plugin")) if "MIG_CONFIG" in key or "MIG_MODE" in key]
    assert "mig-config" not in {one["name"] for one in off.container("plugin")["volumeMounts"]}
    node = {"migConfigMap": "layouts", "migModeIdleSeconds": 600}
    on = helm.objects({"accessMode": "nvidia", "node": node})
    plugin = on.container("plugin")
    given = env(plugin)
    assert given["TANGRAM_DEVICEPLUGIN_MIG_MODE_IDLE_S"] == "600"
    (mount,) = [one for one in plugin["volumeMounts"] if one["name"] == "mig-config"]
    assert given["TANGRAM_DEVICEPLUGIN_MIG_CONFIG_FILE"] == f"{mount['mountPath']}/config.yaml"
    assert mount["readOnly"]
    assert plugin["securityContext"]["privileged"]
    with pytest.raises(Refused, match=r"node\.privileged is false with node\.migConfigMap=layouts"):
        helm.objects({"node": {"migConfigMap": "layouts", "privileged": False}})
    with pytest.raises(Refused, match=r"migModeIdleSeconds is 5 without node\.migConfigMap"):
        helm.objects({"node": {"migModeIdleSeconds": 5}})
    with pytest.raises(Refused, match="migConfigMap"):
        helm.objects({"node": {"migConfigMap": "Not A Name"}})


def test_the_values_of_a_declared_mig_layout_are_those_of_the_plugin() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["node"]
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["node"]["properties"]
    fields = DevicePluginSettings.model_fields
    assert values["migConfigMap"] == (fields["mig_config_file"].default or "")
    assert values["migModeIdleSeconds"] == fields["mig_mode_idle_s"].default
    bounds = {type(one): one for one in fields["mig_mode_idle_s"].metadata}
    ranges = schema["migModeIdleSeconds"]
    assert (ranges["minimum"], ranges["maximum"]) == (bounds[annotated_types.Ge].ge, bounds[annotated_types.Le].le)
