"""Which CDI specification is used, as files of NVIDIA's come, go, get old or lie."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus.cdi_source import CdiSource
from deviceplugin.gpus.driver_paths import DriverRoot
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.inventory import Inventory, MigInstance

DRIVER = "580.65.06"
LIBRARIES = "usr/lib/x86_64-linux-gnu"


class Node:
    """A node with a driver; its / is a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.ours, self.calls = folder / "node", folder / "node/var/run/cdi", folder / "node/calls"
        self.has = replace(inventory(1), driver=DRIVER)
        self.may_open = True
        for name in ("etc/cdi", "var/run/cdi", "dev", "usr/bin"):
            (self.root / name).mkdir(parents=True)
        for name in ("nvidia0", "nvidiactl", "nvidia-uvm"):
            (self.root / "dev" / name).touch()
        (self.root / "usr/bin/nvidia-cdi-hook").touch()
        self.install(DRIVER)
        self.source = CdiSource(
            self.ours,
            lambda: DriverRoot.below(self.root, Path("/")),
            may_open=lambda: self.may_open,
            chroot=str(self.chroot()),
            generate_s=20,
        )

    def install(self, version: str) -> None:
        libraries = self.root / LIBRARIES
        libraries.mkdir(parents=True, exist_ok=True)
        for path in libraries.iterdir():
            path.unlink()
        for name in ("libcuda", "libnvidia-ml"):
            (libraries / f"{name}.so.{version}").touch()
            (libraries / f"{name}.so.1").symlink_to(f"{name}.so.{version}")

    def chroot(self) -> Path:
        """Starts the program in the folder without changing the root, which takes a right."""
        made = self.root / "chroot"
        made.write_text('#!/bin/sh\nroot=$1; program=$2; shift 2; exec "$root$program" "$@"\n')
        made.chmod(0o755)
        return made

    def vendors(self, version: str = DRIVER, **more: Any) -> dict[str, Any]:
        path = f"/{LIBRARIES}/libcuda.so.{version}"
        return {
            "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
            "devices": [{"name": gpu.uuid, "containerEdits": {"deviceNodes": [{"path": f"/dev/nvidia{gpu.minor}"}]}} for gpu in self.has.gpus],
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}],
                "mounts": [{"hostPath": path, "containerPath": path, "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}],
                "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache", "--folder", f"/{LIBRARIES}"]}],
            },
        } | more  # fmt: skip

    def put(self, name: str, spec: dict[str, Any] | str) -> Path:
        path = self.root / name
        path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
        return path

    def tool(self, output: dict[str, Any] | str, more: str = "") -> None:
        self.put("made.json", output)
        tool = self.put(
            "usr/bin/nvidia-ctk", f'#!/bin/sh\necho "$@" >> {self.calls}\n{more}\ncat {self.root / "made.json"}\n'
        )
        tool.chmod(0o755)

    def started(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0

    def uses_vendors(self, has: Inventory | None = None) -> bool:
        made = self.source.document(has or self.has)
        assert [device["name"] for device in made["devices"]]
        assert made["kind"] == "tangram.sh/gpu"
        return "hooks" in made["containerEdits"]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "etc/cdi/nvidia.yaml",
        "var/run/cdi/nvidia.json",
        "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json",
        "var/run/cdi/nvidia-container-toolkit.json",
    ],
)
def test_nvidias_file_is_used_where_tools_write_it(node: Node, name: str) -> None:
    node.put(name, node.vendors())
    assert node.uses_vendors()
    assert node.source.text == str(node.root / name)


def test_without_one_ours_is_used(node: Node) -> None:
    assert not node.uses_vendors()
    assert node.source.text == "our own (there is none of NVIDIA's)"


def test_when_it_vanishes_ours_is_used_and_when_it_comes_back_its_own(node: Node) -> None:
    assert not node.uses_vendors()
    assert not node.source.stale()
    path = node.put("etc/cdi/nvidia.yaml", node.vendors())
    assert node.source.stale()
    assert node.uses_vendors()
    assert not node.source.stale()
    path.unlink()
    assert node.source.stale()
    assert not node.uses_vendors()
    assert not node.source.stale()


def test_after_an_upgrade_of_the_driver_an_old_one_is_left(node: Node) -> None:
    node.put("etc/cdi/nvidia.yaml", node.vendors())
    assert node.uses_vendors()
    node.install("590.44.01")
    newer = replace(node.has, driver="590.44.01")
    assert not node.uses_vendors(newer)
    assert "libcuda.so.580.65.06" in node.source.text or "driver 580.65.06" in node.source.text
    node.put("etc/cdi/nvidia.yaml", node.vendors("590.44.01"))
    assert node.uses_vendors(newer)


def test_when_a_file_that_it_names_is_gone_it_is_left(node: Node) -> None:
    node.put("etc/cdi/nvidia.yaml", node.vendors())
    (node.root / "usr/bin/nvidia-cdi-hook").unlink()
    assert not node.uses_vendors()
    assert "/usr/bin/nvidia-cdi-hook is not there" in node.source.text


def test_of_several_the_first_that_is_true_is_used(node: Node) -> None:
    node.put(
        "var/run/cdi/management.nvidia.com-gpu.yaml",
        node.vendors(kind="management.nvidia.com/gpu", devices=[{"name": "all", "containerEdits": {}}]),
    )
    node.put("var/run/cdi/nvidia.yaml", "no specification: [")
    node.put("etc/cdi/nvidia.yaml", node.vendors())
    assert node.uses_vendors()
    assert "management.nvidia.com-gpu.yaml: it does not name GPU-" in node.source.text


def test_our_own_file_and_others_are_not_taken_for_nvidias(node: Node) -> None:
    for name in ("tangram.sh-gpu.json", "amd.json", "nvidia.txt", "nvidia.json.new"):
        node.put(f"var/run/cdi/{name}", node.vendors())
    assert not node.uses_vendors()


def test_a_file_without_end_is_not_read_to_its_end(node: Node) -> None:
    with (node.root / "etc/cdi/nvidia.yaml").open("wb") as file:
        file.truncate(1 << 40)
    assert not node.uses_vendors()


def test_a_mig_instance_made_on_demand_is_described_by_us_beside_nvidias(node: Node) -> None:
    """It is newer than any specification."""
    made = MigInstance("MIG-00000000-0000-0000-0000-000000000001", "1g.10gb", 9856, 1, 0)
    gpu = replace(node.has.gpus[0], mig=True, instances=(made,), on_demand=True)
    node.put("etc/cdi/nvidia.yaml", node.vendors())
    document = node.source.document(replace(node.has, gpus=(gpu,)), {"alias": made.uuid})
    assert [device["name"] for device in document["devices"]] == [made.uuid, "alias"]
    assert "hooks" in document["containerEdits"]


def test_where_it_is_set_so_ours_is_used_whatever_is_there(node: Node) -> None:
    node.put("etc/cdi/nvidia.yaml", node.vendors())
    source = CdiSource(node.ours, lambda: DriverRoot.below(node.root, Path("/")), vendors=False)
    source.refresh(node.has)
    assert "hooks" not in source.document(node.has)["containerEdits"]
    assert not source.stale()


def test_nvidias_tool_makes_one_where_there_is_no_file(node: Node) -> None:
    node.tool(node.vendors())
    node.source.refresh(node.has)
    assert node.uses_vendors()
    assert node.source.text == "/usr/bin/nvidia-ctk"
    assert (
        node.calls.read_text()
        == "cdi generate --format=json --device-name-strategy=uuid --driver-root=/ --dev-root=/\n"
    )
    node.source.refresh(node.has)
    assert node.started() == 1


def test_the_tool_is_started_anew_for_another_driver_or_gpu_only(node: Node) -> None:
    node.tool("no specification")
    for has, started in (
        (node.has, 1),
        (node.has, 1),
        (replace(node.has, driver="590.1.2"), 2),
        (replace(inventory(2), driver="590.1.2"), 3),
    ):
        node.source.refresh(has)
        assert node.started() == started
    assert not node.uses_vendors()


def test_where_a_file_will_do_or_gpus_may_not_be_opened_the_tool_is_not_started(node: Node) -> None:
    node.tool(node.vendors())
    node.may_open = False
    node.source.refresh(node.has)
    assert node.started() == 0
    node.may_open = True
    path = node.put("etc/cdi/nvidia.yaml", node.vendors())
    node.source.refresh(node.has)
    assert node.started() == 0
    path.unlink()
    node.source.refresh(node.has)
    assert (node.started(), node.uses_vendors()) == (1, True)


@pytest.mark.parametrize("trouble", ["exit 1", "head -c 3000000 /dev/zero", "kill -9 $$"])
def test_a_tool_that_fails_leaves_us_with_our_own(node: Node, trouble: str) -> None:
    node.tool(node.vendors(), trouble)
    node.source.refresh(node.has)
    assert not node.uses_vendors()


def test_what_the_tool_makes_is_checked_as_a_file_is(node: Node) -> None:
    node.tool(node.vendors(kind="evil.com/gpu"))
    node.source.refresh(node.has)
    assert not node.uses_vendors()
    assert "it is of kind 'evil.com/gpu'" in node.source.text
