"""The CDI specification, from driver roots of several shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deviceplugin.gpus import driver_files
from deviceplugin.gpus.cdi import SPEC_FILE, capability_minor, mig_minors, spec, write
from deviceplugin.gpus.driver_files import loader_folders
from deviceplugin.gpus.driver_paths import DriverRoot
from tests.unit.deviceplugin.builders import inventory, uuid
from vgpu.api.inventory import Gpu, Inventory, MigInstance

HOST = Path("/opt/driver")


def driver_root(folder: Path, *, libraries: str = "lib", nodes: bool = True) -> DriverRoot:
    where = folder / libraries
    where.mkdir(parents=True)
    for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"):
        (where / f"{name}.so.580.65.06").write_text(name)
        (where / f"{name}.so.1").symlink_to(f"{name}.so.580.65.06")
    (where / "libnvidia-nvvm.so.580.65.06").write_text("nvvm")
    (where / "libnvidia-nvvm.so.4").symlink_to("libnvidia-nvvm.so.580.65.06")
    (where / "libnvidia-gpucomp.so.580.65.06").write_text("has no short name")
    (where / "libc.so.6").write_text("none of ours")
    if nodes:
        (folder / "dev").mkdir()
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (folder / "dev" / name).touch()
    return DriverRoot(folder, HOST)


def mounts(made: dict[str, Any]) -> dict[str, str]:
    return {m["containerPath"]: m["hostPath"] for m in made["containerEdits"]["mounts"]}


def test_libraries_are_mounted_under_the_names_that_programs_load(tmp_path: Path) -> None:
    found = mounts(spec(inventory(), driver_root(tmp_path)))
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        assert found[f"{folder}/libcuda.so.1"] == "/opt/driver/lib/libcuda.so.580.65.06"
        assert found[f"{folder}/libcuda.so"] == "/opt/driver/lib/libcuda.so.580.65.06"
        assert found[f"{folder}/libnvidia-nvvm.so.4"] == "/opt/driver/lib/libnvidia-nvvm.so.580.65.06"
        assert found[f"{folder}/libnvidia-gpucomp.so.580.65.06"] == "/opt/driver/lib/libnvidia-gpucomp.so.580.65.06"
        assert f"{folder}/libc.so.6" not in found


def test_libraries_are_where_the_loader_of_the_nodes_architecture_looks() -> None:
    assert loader_folders("x86_64") == ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
    assert loader_folders("aarch64") == ("/usr/lib/aarch64-linux-gnu", "/usr/lib64")


@pytest.mark.parametrize("libraries", ["usr/lib/x86_64-linux-gnu", "usr/lib64", "lib64"])
def test_libraries_are_found_where_installers_put_them(tmp_path: Path, libraries: str) -> None:
    found = mounts(spec(inventory(), driver_root(tmp_path, libraries=libraries)))
    assert found["/usr/lib64/libcuda.so.1"] == f"/opt/driver/{libraries}/libcuda.so.580.65.06"


def test_each_gpu_has_its_own_node_and_all_share_the_control_nodes(tmp_path: Path) -> None:
    made = spec(inventory(), driver_root(tmp_path))
    nodes = {d["name"]: [n["hostPath"] for n in d["containerEdits"]["deviceNodes"]] for d in made["devices"]}
    assert nodes == {uuid(0): ["/opt/driver/dev/nvidia0"], uuid(1): ["/opt/driver/dev/nvidia1"]}
    control = [n["path"] for n in made["containerEdits"]["deviceNodes"]]
    assert control == ["/dev/nvidiactl", "/dev/nvidia-uvm"]


def test_a_root_without_device_nodes_takes_the_hosts(tmp_path: Path) -> None:
    made = spec(inventory(1), driver_root(tmp_path, nodes=False))
    (node,) = made["devices"][0]["containerEdits"]["deviceNodes"]
    assert (node["path"], node["hostPath"]) == ("/dev/nvidia0", "/dev/nvidia0")


def test_a_mig_gpu_is_offered_as_its_instances_with_their_capabilities(tmp_path: Path) -> None:
    instance = MigInstance("MIG-00000000-0000-0000-0000-000000000001", "2g.10gb", 9856, 5, 0)
    has = Inventory((Gpu(uuid(1), 1, "A100", 40_000, minor=1, mig=True, instances=(instance,)),))
    (device,) = spec(has, driver_root(tmp_path))["devices"]
    assert device["name"] == instance.uuid
    assert [n["path"] for n in device["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap183", "/dev/nvidia-caps/nvidia-cap184",
    ]  # fmt: skip


def test_capabilities_of_an_instance_made_just_now_need_no_file_on_the_host(tmp_path: Path) -> None:
    """A container runtime that is given the numbers does not look at the host's node, which nothing may have made yet."""
    instance = MigInstance("MIG-00000000-0000-0000-0000-000000000001", "2g.10gb", 9856, 5, 0)
    has = Inventory((Gpu(uuid(1), 1, "A100", 40_000, minor=1, mig=True, instances=(instance,)),))
    root = driver_root(tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/devices").write_text("Character devices:\n195 nvidia\n510 nvidia-caps\n511 nvidia-uvm\n")
    (device,) = spec(has, root)["devices"]
    assert [(n.get("type"), n.get("major"), n.get("minor")) for n in device["containerEdits"]["deviceNodes"]] == [
        (None, None, None), ("c", 510, 183), ("c", 510, 184),
    ]  # fmt: skip


def test_the_drivers_own_list_of_capabilities_is_believed_before_the_formula(tmp_path: Path) -> None:
    listed = tmp_path / "proc/driver/nvidia-caps"
    listed.mkdir(parents=True)
    (listed / "mig-minors").write_text(
        "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu1/gi5/access 777\n"
    )
    found = mig_minors(tmp_path)
    assert found == {(0, 0, None): 3, (0, 0, 0): 4, (1, 5, None): 777}
    assert capability_minor(0, 0, None) == 3
    assert capability_minor(0, 0, 0) == 4


def test_nvidia_smi_and_the_persistence_daemons_socket_come_along_where_they_are(tmp_path: Path) -> None:
    root = driver_root(tmp_path)
    for name in ("bin/nvidia-smi", "run/nvidia-persistenced/socket"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = mounts(spec(inventory(), root))
    assert found["/usr/bin/nvidia-smi"] == "/opt/driver/bin/nvidia-smi"
    assert found["/run/nvidia-persistenced/socket"] == "/opt/driver/run/nvidia-persistenced/socket"


def test_an_empty_root_makes_a_specification_with_devices_only(tmp_path: Path) -> None:
    made = spec(inventory(1), DriverRoot(tmp_path, Path("/")))
    assert made["containerEdits"]["mounts"] == []
    assert [d["name"] for d in made["devices"]] == [uuid(0)]


def test_the_specification_is_written_when_it_changed_and_only_then(tmp_path: Path) -> None:
    root, folder = driver_root(tmp_path / "root"), tmp_path / "cdi"
    assert write(folder, spec(inventory(1), root))
    assert not write(folder, spec(inventory(1), root))
    assert write(folder, spec(inventory(2), root))
    assert len(json.loads((folder / SPEC_FILE).read_text())["devices"]) == 2
    assert [path.name for path in folder.iterdir()] == [SPEC_FILE]


def test_a_driver_below_the_hosts_root_is_described_with_the_hosts_paths(tmp_path: Path) -> None:
    """As on GKE: the plugin sees the node's / at a folder of its own."""
    libraries = tmp_path / "home/kubernetes/bin/nvidia/lib64"
    libraries.mkdir(parents=True)
    for name in ("libnvidia-ml", "libcuda"):
        (libraries / f"{name}.so.580.65.06").touch()
        (libraries / f"{name}.so.1").symlink_to(f"{name}.so.580.65.06")
    (libraries.parent / "bin").mkdir()
    (libraries.parent / "bin/nvidia-smi").touch()
    root = DriverRoot.below(tmp_path, Path("/"))
    assert root.host == Path("/home/kubernetes/bin/nvidia")
    found = mounts(spec(inventory(1), root))
    assert found["/usr/lib64/libcuda.so.1"] == "/home/kubernetes/bin/nvidia/lib64/libcuda.so.580.65.06"
    assert found["/usr/bin/nvidia-smi"] == "/home/kubernetes/bin/nvidia/bin/nvidia-smi"


def test_a_folder_without_a_driver_is_its_own_root(tmp_path: Path) -> None:
    assert DriverRoot.below(tmp_path, Path("/opt")) == DriverRoot(tmp_path, Path("/opt"))


def a_whole_driver(node: Path) -> DriverRoot:
    """What a driver has beside compute, and devices of storage and of a second kind of link between nodes."""
    libraries = node / "usr/lib/x86_64-linux-gnu"
    (libraries / "vdpau").mkdir(parents=True)
    versioned = (
        "libnvidia-ml",
        "libcuda",
        "libGLX_nvidia",
        "libEGL_nvidia",
        "libnvoptix",
        "libnvidia-rtcore",
        "libnvidia-glcore",
    )
    for name in versioned:
        (libraries / f"{name}.so.580.65.06").touch()
    for name, link in (
        ("libnvidia-ml", "1"),
        ("libcuda", "1"),
        ("libGLX_nvidia", "0"),
        ("libEGL_nvidia", "0"),
        ("libnvoptix", "1"),
    ):
        (libraries / f"{name}.so.{link}").symlink_to(f"{name}.so.580.65.06")
    (libraries / "vdpau/libvdpau_nvidia.so.580.65.06").touch()
    (libraries / "libnvidia-egl-gbm.so.1.1.2").touch()
    (libraries / "libnvidia-egl-gbm.so.1").symlink_to("libnvidia-egl-gbm.so.1.1.2")
    (libraries / "libnvidia-container.so.1.17.8").touch()
    (libraries / "libnvidia-glcore.so.570.1.2").touch()
    files = ("usr/share/glvnd/egl_vendor.d/10_nvidia.json", "usr/share/nvidia/nvoptix.bin", "etc/vulkan/icd.d/nvidia_icd.json", "etc/OpenCL/vendors/nvidia.icd",
             "usr/bin/nvidia-smi", "run/nvidia-fabricmanager/socket", "etc/cufile.json", "run/udev/data")  # fmt: skip
    for name in files:
        (node / name).parent.mkdir(parents=True, exist_ok=True)
        (node / name).touch()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia0", "nvidia-fs0", "nvidia-fs1", "nvidia-fsx", "dri/renderD128", "nvidia-caps-imex-channels/channel0",
                 "nvidia-caps-imex-channels/channel7"):  # fmt: skip
        (node / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (node / "dev" / name).touch()
    return DriverRoot.below(node, Path("/"))


def test_graphics_optix_storage_and_imex_come_along_where_they_are(tmp_path: Path) -> None:
    made = spec(inventory(1), a_whole_driver(tmp_path))
    assert [node["path"] for node in made["containerEdits"]["deviceNodes"]] == [
        "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/nvidia-caps-imex-channels/channel0", "/dev/nvidia-fs0", "/dev/nvidia-fs1",
    ]  # fmt: skip
    found = mounts(made)
    host = "/usr/lib/x86_64-linux-gnu"
    assert {at.removeprefix("/usr/lib64/"): of for at, of in found.items() if at.startswith("/usr/lib64/")} == {
        "libcuda.so": f"{host}/libcuda.so.580.65.06", "libcuda.so.1": f"{host}/libcuda.so.580.65.06",
        "libnvidia-ml.so": f"{host}/libnvidia-ml.so.580.65.06", "libnvidia-ml.so.1": f"{host}/libnvidia-ml.so.580.65.06",
        "libGLX_nvidia.so.0": f"{host}/libGLX_nvidia.so.580.65.06", "libGLX_indirect.so.0": f"{host}/libGLX_nvidia.so.580.65.06",
        "libEGL_nvidia.so.0": f"{host}/libEGL_nvidia.so.580.65.06", "libnvoptix.so.1": f"{host}/libnvoptix.so.580.65.06",
        "libnvidia-rtcore.so.580.65.06": f"{host}/libnvidia-rtcore.so.580.65.06", "libnvidia-glcore.so.580.65.06": f"{host}/libnvidia-glcore.so.580.65.06",
        "libvdpau_nvidia.so.580.65.06": f"{host}/vdpau/libvdpau_nvidia.so.580.65.06", "libnvidia-egl-gbm.so.1": f"{host}/libnvidia-egl-gbm.so.1.1.2",
    }  # fmt: skip
    assert {at: of for at, of in found.items() if "/lib" not in at} == {
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/nvidia/nvoptix.bin": "/usr/share/nvidia/nvoptix.bin", "/etc/vulkan/icd.d/nvidia_icd.json": "/etc/vulkan/icd.d/nvidia_icd.json",
        "/etc/OpenCL/vendors/nvidia.icd": "/etc/OpenCL/vendors/nvidia.icd", "/usr/bin/nvidia-smi": "/usr/bin/nvidia-smi", "/run/udev": "/run/udev",
        "/etc/cufile.json": "/etc/cufile.json", "/run/nvidia-fabricmanager/socket": "/run/nvidia-fabricmanager/socket",
    }  # fmt: skip


def test_without_devices_of_storage_its_files_stay_away(tmp_path: Path) -> None:
    root = a_whole_driver(tmp_path)
    for name in ("nvidia-fs0", "nvidia-fs1"):
        (tmp_path / "dev" / name).unlink()
    assert {"/run/udev", "/etc/cufile.json"}.isdisjoint(mounts(spec(inventory(1), root)))


def test_a_gpu_has_its_own_node_for_rendering_and_no_other(tmp_path: Path) -> None:
    root = a_whole_driver(tmp_path)
    for address, names in (("0000:17:00.0", ("card1", "renderD128", "renderD129")), ("0000:18:00.0", ("renderD130",))):
        for name in names:
            (tmp_path / "pci" / address / "drm" / name).mkdir(parents=True)
    assert driver_files.render_nodes(root, "0000:17:00.0", tmp_path / "pci") == ["dri/renderD128"]
    assert driver_files.drm_nodes("0000:17:00.0", tmp_path / "pci") == ["dri/card1", "dri/renderD128", "dri/renderD129"]
    assert driver_files.render_nodes(root, "", tmp_path / "pci") == []
    assert driver_files.render_nodes(root, "0000:19:00.0", tmp_path / "pci") == []
