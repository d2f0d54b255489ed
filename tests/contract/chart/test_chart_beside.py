"""The device plugin reads the ResourceSlices of a cluster, and writes none of them, said by a real API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus.slice_watch import SliceWatch
from kube.client import connect
from kube.paths import resource_slices
from tests.apiserver import ApiServer, Denied
from tests.contract.chart.rendering import EXAMPLES, Helm, Refused, env
from vgpu.health.foreign import DRA_DRIVER, ForeignDevice

SLICES = resource_slices("v1")
WAIT_S = 30.0


def resource_slice(name: str, node: str, uuid: str, driver: str = DRA_DRIVER) -> dict[str, Any]:
    return {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {
            "driver": driver, "nodeName": node, "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": uuid}}}],
        },
    }  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_right_is_to_list_and_watch(helm: Helm, example: str) -> None:
    roles = helm.objects(EXAMPLES[example]).of("ClusterRole")
    (of_plugin,) = (name for name in roles if name.endswith("-node"))
    named = [rule for rule in roles[of_plugin]["rules"] if "resource.k8s.io" in rule.get("apiGroups", ())]
    assert named == [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list", "watch"]}]


def test_the_plugins_token_lists_slices_and_writes_none(policies: ApiServer, token: str) -> None:
    policies("POST", SLICES, resource_slice("there", "node-a", "GPU-1"))
    try:
        found = policies(
            "GET", f"{SLICES}?fieldSelector=spec.nodeName%3Dnode-a,spec.driver%3D{DRA_DRIVER}", token=token
        )
        assert [one["metadata"]["name"] for one in found["items"]] == ["there"]
        there = policies("GET", f"{SLICES}/there")
        for verb, method, path, body in (
            ("create", "POST", SLICES, resource_slice("more", "node-a", "GPU-2")),
            ("update", "PUT", f"{SLICES}/there", there),
            ("patch", "PATCH", f"{SLICES}/there", there),
            ("delete", "DELETE", f"{SLICES}/there", None),
            ("deletecollection", "DELETE", SLICES, None),
        ):
            with pytest.raises(Denied, match=f'cannot {verb} resource "resourceslices" in API group "resource.k8s.io"'):
                policies(method, path, body, token=token)
        assert policies("GET", f"{SLICES}/there") == there
        for other in ("resourceclaims", "deviceclasses"):
            with pytest.raises(Denied, match=f'cannot list resource "{other}"'):
                policies("GET", SLICES.replace("resourceslices", other), token=token)
    finally:
        policies("DELETE", f"{SLICES}/there")


async def test_the_watch_has_the_slices_of_its_own_node_and_driver(
    policies: ApiServer, token: str, tmp_path: Path
) -> None:
    names = {"mine": ("node-a", DRA_DRIVER), "far": ("node-b", DRA_DRIVER), "network": ("node-a", "net.example.com")}
    async with connect(str(kubeconfig(policies, token, tmp_path))) as client:
        watch = SliceWatch(client, "node-a")
        running = asyncio.create_task(watch.run())
        try:
            await asyncio.wait_for(watch.first(), WAIT_S)
            assert watch.devices() == ()
            for name, (node, driver) in names.items():
                await asyncio.to_thread(policies, "POST", SLICES, resource_slice(name, node, f"GPU-{name}", driver))
            await until(watch, (ForeignDevice(DRA_DRIVER, "GPU-mine"),))
            await asyncio.to_thread(policies, "DELETE", f"{SLICES}/mine")
            await until(watch, ())
        finally:
            running.cancel()
            for name in names:
                with contextlib.suppress(Denied):
                    policies("DELETE", f"{SLICES}/{name}")


async def until(watch: SliceWatch, devices: tuple[ForeignDevice, ...]) -> None:
    """The watch has these, and no others."""
    cache = watch._cache
    assert cache is not None
    assert await cache.wait_for(lambda: True if watch.devices() == devices else None, timeout_s=WAIT_S)


def kubeconfig(api: ApiServer, token: str, folder: Path) -> Path:
    """With the plugin's own token."""
    cluster = {"server": str(api.http.base_url), "certificate-authority": str(api.kubeconfig.parent / "pki/ca.crt")}
    path = folder / "kubeconfig"
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )  # fmt: skip
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("selectors", [[], "all", ["all", ""], [1]])
def test_selectors_that_are_no_list_of_texts_are_refused_by_the_chart(helm: Helm, selectors: object) -> None:
    with pytest.raises(Refused, match="gpus"):
        helm.objects({"node": {"gpus": selectors}})


def test_selectors_reach_the_plugin_as_they_are_written(helm: Helm) -> None:
    selectors = ["label=pool=small & index=0-1", "model=*H100*"]
    plugin = helm.objects({"node": {"gpus": selectors}}).container("plugin")
    assert json.loads(env(plugin)["TANGRAM_DEVICEPLUGIN_GPUS"]) == selectors
    assert json.loads(env(helm.objects().container("plugin"))["TANGRAM_DEVICEPLUGIN_GPUS"]) == ["all"]
