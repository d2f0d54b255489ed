"""`tangramctl cordon`, `uncordon` and `gpus` with kubectl before a real kube-apiserver. The test is the node: its device plugin and its kubelet."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import ETCD, KUBERNETES
from tests.apiserver import ApiServer, running
from tests.builders import cordoned, gpu, mig_gpu, pod, share
from tests.ports import free_port
from vgpu.api.codec import inventory_to_json
from vgpu.api.cordon import Cordon, cordons_from_json
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu, GpuCondition, Inventory, Orphan
from vgpu.api.names import DEFAULT

NODES, PODS = "/api/v1/nodes", "/api/v1/namespaces/default/pods"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
NOW = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Desk:
    """A person with kubectl and a kubeconfig, and a node of the cluster."""

    api: ApiServer
    folder: Path
    node: str

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command as a process."""
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            [sys.executable, "-m", "tangramctl", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "PATH": path, "KUBECONFIG": str(self.api.kubeconfig)},
        )  # fmt: skip

    def call(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def publish(self, *gpus: Gpu, orphans: tuple[Orphan, ...] = ()) -> None:
        """As the device plugin does."""
        text = inventory_to_json(Inventory(gpus, orphans=orphans))
        self.api.patch(f"{NODES}/{self.node}", {"metadata": {"annotations": {DEFAULT.inventory: text}}})

    def annotations(self) -> dict[str, str]:
        found: dict[str, str] = self.api("GET", f"{NODES}/{self.node}")["metadata"].get("annotations") or {}
        return found

    def cordons(self) -> dict[str, Cordon]:
        return cordons_from_json(self.annotations().get(DEFAULT.cordoned_gpus))

    def run_pod(self, name: str, *assigned: AssignedGpu) -> str:
        """A bound, running pod with a share."""
        thing = pod(name).asking(mib=8192).on(self.node).assigned(*assigned).plain()
        meta = {"name": name, "labels": {"app": name}, "annotations": thing["metadata"]["annotations"]}
        spec = {"nodeName": self.node, "containers": [{"name": "main", "image": "none"}]}
        self.api("POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.api.patch(f"{PODS}/{name}/status", {"status": status})
        return name

    def budget(self, name: str, allowed: int) -> None:
        """As the disruption controller, which does not run here, would write it."""
        if name not in {one["metadata"]["name"] for one in self.api("GET", BUDGETS)["items"]}:
            spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": name}}}
            meta = {"name": name}
            self.api(
                "POST",
                BUDGETS,
                {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec},
            )
        status = {
            "observedGeneration": 1, "disruptionsAllowed": allowed, "currentHealthy": 1 + allowed, "desiredHealthy": 1,
            "expectedPods": 1 + allowed,
        }  # fmt: skip
        self.api.patch(f"{BUDGETS}/{name}/status", {"status": status})

    def pod(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api("GET", f"{PODS}/{name}")
        return found

    def end(self, name: str) -> None:
        """As the kubelet does when the last container has ended."""
        self.api("DELETE", f"{PODS}/{name}", NOW)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ApiServer, Path]]:
    """kube-apiserver and etcd, and a folder with kubectl. Built when the cache lacks them."""
    programs = build(cache_folder(), [KUBERNETES, ETCD], Steps())
    folder = tmp_path_factory.mktemp("bin")
    (folder / "kubectl").symlink_to(programs["kubectl"])
    with running(programs, tmp_path_factory.mktemp("apiserver")) as api:
        yield api, folder


@pytest.fixture
def desk(server: tuple[ApiServer, Path]) -> Iterator[Desk]:
    """With a node of its own, whose plugin published two GPUs."""
    api, folder = server
    made = Desk(api, folder, f"node-{next(_numbers)}")
    api("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": made.node}})
    made.publish(gpu(0), gpu(1))
    yield made
    for budget in api("GET", BUDGETS)["items"]:
        api("DELETE", f"{BUDGETS}/{budget['metadata']['name']}")
    for one in api("GET", PODS)["items"]:
        made.end(one["metadata"]["name"])


def line_with(process: subprocess.Popen[str], part: str) -> str:
    """The first line of its output that has this part. A command that ends or says nothing for long ends the test."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if part in line:
            return line
    raise AssertionError(f"{part!r} is not in {seen}: {process.stderr.read() if process.stderr else ''}")


@pytest.mark.parametrize("named", ["1", gpu(1).uuid, gpu(1).uuid[:14], gpu(1).uuid[4:14].upper()])
def test_a_gpu_is_cordoned_by_index_uuid_or_the_beginning_of_one(desk: Desk, named: str) -> None:
    code, out, err = desk.call("cordon", desk.node, named, "--reason", "fan replaced")
    assert (code, err) == (0, "")
    assert out == f"GPU 1 of node {desk.node} ({gpu(1).uuid}) is cordoned\n"
    ((uuid, found),) = desk.cordons().items()
    assert (uuid, found.reason) == (gpu(1).uuid, "fan replaced")
    described = subprocess.run(
        [str(desk.folder / "kubectl"), "describe", "node", desk.node], capture_output=True, text=True, check=True,
        env={**os.environ, "KUBECONFIG": str(desk.api.kubeconfig)},
    ).stdout  # fmt: skip
    assert "tangram.sh/cordoned-gpus" in described
    assert "fan replaced" in described


def test_a_second_cordon_keeps_the_time_and_an_uncordon_leaves_no_annotation(desk: Desk) -> None:
    desk.call("cordon", desk.node, "0", "--reason", "first")
    (first,) = desk.cordons().values()
    assert "was cordoned before" in desk.call("cordon", desk.node, "0")[1]
    assert list(desk.cordons().values()) == [first]
    desk.call("cordon", desk.node, "0", "--reason", "second")
    assert list(desk.cordons().values()) == [Cordon("second", first.since_s)]
    desk.call("cordon", desk.node, "1")
    assert "is no longer cordoned" in desk.call("uncordon", desk.node, "0")[1]
    assert list(desk.cordons()) == [gpu(1).uuid]
    assert "was not cordoned" in desk.call("uncordon", desk.node, "0")[1]
    desk.call("uncordon", desk.node, "1")
    assert DEFAULT.cordoned_gpus not in desk.annotations()
    assert DEFAULT.inventory in desk.annotations()


@pytest.mark.parametrize("command", ["cordon", "uncordon"])
@pytest.mark.parametrize(
    ("named", "why"), [("2", "there is no such GPU"), ("GPU-", "there is no such GPU"), ("x", "no such")]
)
def test_an_unknown_gpu_is_refused_with_those_that_exist(desk: Desk, command: str, named: str, why: str) -> None:
    code, out, err = desk.call(command, desk.node, named)
    assert (code, out) == (2, "")
    assert why in err
    assert f"it has 0 ({gpu(0).uuid}), 1 ({gpu(1).uuid})" in err
    assert not desk.cordons()


def test_two_who_cordon_at_once_do_not_overrun_each_other(desk: Desk) -> None:
    for _ in range(2):
        both = [desk.start("cordon", desk.node, str(index)) for index in range(2)]
        for process in both:
            process.communicate(timeout=100)
        assert [process.returncode for process in both] == [0, 0]
        assert desk.cordons().keys() == {gpu(0).uuid, gpu(1).uuid}
        desk.api.patch(f"{NODES}/{desk.node}", {"metadata": {"annotations": {DEFAULT.cordoned_gpus: None}}})


def test_an_unknown_node_is_refused_with_those_that_have_gpus(desk: Desk) -> None:
    code, _, err = desk.call("cordon", "nowhere", "0")
    assert code == 2
    assert "nowhere" in err
    assert "not found" in err
    assert desk.node in err, "it names the nodes that have GPUs"


def test_a_node_without_gpus_and_a_reason_of_two_lines_are_refused(desk: Desk) -> None:
    bare = f"bare-{next(_numbers)}"
    desk.api("POST", NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": bare}})
    code, _, err = desk.call("gpus", bare)
    assert (code, "has published no GPUs of it" in err) == (2, True)
    code, _, err = desk.call("cordon", desk.node, "0", "--reason", "a\nb")
    assert (code, "one line" in err) == (2, True)
    assert not desk.cordons()


def test_a_list_that_somebody_else_broke_is_not_overwritten(desk: Desk) -> None:
    broken = {"metadata": {"annotations": {DEFAULT.cordoned_gpus: "all"}}}
    desk.api.patch(f"{NODES}/{desk.node}", broken)
    code, _, err = desk.call("cordon", desk.node, "0")
    assert code == 2
    assert "list of cordoned GPUs" in err
    assert desk.annotations()[DEFAULT.cordoned_gpus] == "all"


def test_gpus_shows_health_cordon_and_conditions(desk: Desk) -> None:
    hot = GpuCondition("ThermalSlowdown", "degraded", 0, "too hot")
    desk.publish(gpu(0, conditions=(hot,)), cordoned(gpu(1, healthy=False), "released"))
    desk.call("cordon", desk.node, "1", "--reason", "fan")
    code, out, _ = desk.call("gpus", desk.node)
    first, second = out.splitlines()
    assert code == 0
    assert first.split()[:2] == ["0", gpu(0).uuid]
    assert "degraded" in first
    assert "ThermalSlowdown since 1970-01-01T00:00:00Z: too hot" in first
    assert "unmonitored  released since 2" in second
    assert second.endswith("(fan)")
    desk.publish(gpu(0))
    assert f"-  {gpu(1).uuid}  not in the node  cordoned since" in desk.call("gpus", desk.node)[1]
    assert desk.call("uncordon", desk.node, gpu(1).uuid)[0] == 0, "a GPU that was taken out can be uncordoned"


def test_a_drain_evicts_the_pods_of_this_gpu_waits_for_a_budget_and_for_the_plugin(desk: Desk) -> None:
    kept, other = desk.run_pod(f"kept-{desk.node}", share(gpu(0), 8192)), desk.run_pod("other", share(gpu(1), 8192))
    desk.budget(kept, 0)
    with desk.start("cordon", desk.node, "0", "--drain") as process:
        line_with(process, "is cordoned")
        assert f"disruption budget {kept} refuses" in line_with(process, "not evicted yet")
        assert "deletionTimestamp" not in desk.pod(kept)["metadata"]
        desk.budget(kept, 1)
        line_with(process, f"pod default/{kept} is evicted")
        assert any(one.get("reason") == "EvictionByEvictionAPI" for one in desk.pod(kept)["status"]["conditions"])
        desk.end(kept)
        line_with(process, "Waiting until the device plugin of the node has closed it")
        desk.publish(cordoned(gpu(0, healthy=False), "released"), gpu(1))
        line_with(process, "is released: no pod of Tangram has it")
        assert process.wait(60) == 0
    assert "deletionTimestamp" not in desk.pod(other)["metadata"]


def test_an_interrupted_drain_leaves_the_gpu_cordoned(desk: Desk) -> None:
    desk.run_pod("stays", share(gpu(0), 8192))
    desk.budget("stays", 0)
    with desk.start("cordon", desk.node, "0", "--drain") as process:
        line_with(process, "not evicted yet")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert list(desk.cordons()) == [gpu(0).uuid]
    assert "deletionTimestamp" not in desk.pod("stays")["metadata"]


def test_a_drain_ends_when_its_time_is_over_and_names_the_pods(desk: Desk) -> None:
    desk.run_pod("slow", share(gpu(0), 8192))
    desk.budget("slow", 0)
    code, _, err = desk.call("cordon", desk.node, "0", "--drain", "--timeout-s", "1")
    assert code == 75
    assert "1 pods have GPU 0" in err
    assert "default/slow" in err
    assert list(desk.cordons()) == [gpu(0).uuid]


def test_a_drain_ends_when_somebody_uncordons_the_gpu(desk: Desk) -> None:
    desk.run_pod("spared", share(gpu(0), 8192))
    desk.budget("spared", 0)
    with desk.start("cordon", desk.node, "0", "--drain") as process:
        line_with(process, "not evicted yet")
        desk.call("uncordon", desk.node, "0")
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert "uncordoned by someone else: nothing more is evicted" in process.stderr.read()
    assert "deletionTimestamp" not in desk.pod("spared")["metadata"]


def test_a_gpu_that_cannot_be_released_alone_ends_the_drain_with_the_reason(desk: Desk) -> None:
    desk.publish(cordoned(gpu(0), "not-released"), gpu(1))
    code, out, err = desk.call("cordon", desk.node, "0", "--drain")
    assert code == 69
    assert "cannot release it alone: the node does not show the PCI addresses" in err
    assert "is released" not in out


def test_a_drain_evicts_pods_on_instances_and_waits_for_orphans(desk: Desk) -> None:
    cut = mig_gpu(0, "1g.10gb")
    part = AssignedGpu(cut.instances[0].uuid, 0, 9728, 0, "mig", "1g.10gb")
    desk.publish(cut, orphans=(Orphan("gone", "default", "by-force", (part,)),))
    desk.run_pod("on-instance", part)
    with desk.start("cordon", desk.node, "0", "--drain") as process:
        line_with(process, "pod default/on-instance is evicted")
        desk.end("on-instance")
        assert "default/by-force" in line_with(process, "deleted by force still use")
        desk.publish(cordoned(replace(cut, healthy=False), "released"))
        line_with(process, "is released: no pod of Tangram has it")
        assert process.wait(60) == 0


def test_an_api_server_that_is_away_is_named(desk: Desk, tmp_path: Path) -> None:
    nobody = tmp_path / "kubeconfig"
    nobody.write_text(
        re.sub(r"https://127.0.0.1:[0-9]+", f"https://127.0.0.1:{free_port()}", desk.api.kubeconfig.read_text())
    )
    away = replace(desk, api=replace(desk.api, kubeconfig=nobody))
    code, out, err = away.call("cordon", desk.node, "0", "--drain")
    assert (code, out) == (2, "")
    assert "refused" in err
    assert not desk.cordons()
