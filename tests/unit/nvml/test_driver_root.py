"""The driver is found where each platform has it, and the reason of the choice is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvml.driver_root import inside, loaded_version, locate, version_in
from vgpu.api.driver_places import PLACES, Found, choose

OLD, NEW = "570.133.20", "580.65.06"
NOWHERE = Path("/nonexistent/tangram-test")


def install(folder: Path, version: str = NEW) -> Path:
    """The management library and its link, as an installer makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"libnvidia-ml.so.{version}").touch()
    (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
    return folder


def debian(node: Path, version: str = NEW) -> Path:
    """Links through /etc/alternatives, absolute as on the node."""
    folder = node / "usr/lib/x86_64-linux-gnu"
    install(folder / "nvidia/current", version)
    (node / "etc/alternatives").mkdir(parents=True)
    (node / "etc/alternatives/nvidia--libnvidia-ml.so.1").symlink_to(
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1"
    )
    (folder / "libnvidia-ml.so.1").symlink_to("/etc/alternatives/nvidia--libnvidia-ml.so.1")
    return folder


def bottlerocket(node: Path, version: str = NEW) -> Path:
    """Its /usr, /lib and /lib64 are links into sys-root (packages/filesystem/filesystem.spec of bottlerocket-core-kit)."""
    sysroot = node / "x86_64-bottlerocket-linux-gnu/sys-root/usr"
    install(sysroot / "lib/nvidia/tesla", version)
    (node / "usr").symlink_to("./x86_64-bottlerocket-linux-gnu/sys-root/usr")
    for name in ("lib", "lib64"):
        (node / name).symlink_to("./x86_64-bottlerocket-linux-gnu/sys-root/usr/lib")
    return node / "usr/lib/nvidia/tesla"


PLATFORMS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "Ubuntu": ("host", lambda node: install(node / "usr/lib/x86_64-linux-gnu")),
    "Debian": ("host", debian),
    "Red Hat": ("host", lambda node: install(node / "usr/lib64")),
    "arm64": ("host", lambda node: install(node / "usr/lib/aarch64-linux-gnu")),
    "EKS AL2023": ("host", lambda node: install(node / "usr/lib64")),
    "k3s on Ubuntu": ("host", lambda node: install(node / "usr/lib/x86_64-linux-gnu")),
    "RKE2 with GPU Operator": ("GPU Operator", lambda node: install(node / "run/nvidia/driver/usr/lib/x86_64-linux-gnu")),
    "OpenShift with GPU Operator": ("GPU Operator", lambda node: install(node / "run/nvidia/driver/usr/lib64")),
    "Bottlerocket": ("Bottlerocket", bottlerocket),
    "Talos": ("Talos", lambda node: install(node / "usr/local/lib")),
    "GKE": ("GKE", lambda node: install(node / "home/kubernetes/bin/nvidia/lib64")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLATFORMS)
def test_each_platforms_driver_is_found(tmp_path: Path, name: str) -> None:
    platform, build = PLATFORMS[name]
    folder = build(tmp_path)
    found = locate(tmp_path, NOWHERE, loaded="")
    assert found is not None
    assert (found.place.platform, found.libraries, found.version) == (platform, folder, NEW)
    assert found.library.is_file()
    assert found.library.is_relative_to(tmp_path)
    assert found.why == "it is the only place with a driver"


def test_where_no_driver_is_none_is_found(tmp_path: Path) -> None:
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.gone")
    assert locate(tmp_path, NOWHERE) is None


def test_a_driver_container_wins_over_leftovers_of_another_version(tmp_path: Path) -> None:
    install(tmp_path / "usr/lib64", OLD)
    install(tmp_path / "run/nvidia/driver/usr/lib64", NEW)
    found = locate(tmp_path, NOWHERE, loaded=NEW)
    assert found is not None
    assert found.place.platform == "GPU Operator"
    assert found.why == f"its version is that of the loaded kernel module, {NEW}; host has {OLD}"


def test_the_hosts_driver_comes_first_where_no_version_decides(tmp_path: Path) -> None:
    for folder in ("run/nvidia/driver/usr/lib64", "usr/lib64"):
        install(tmp_path / folder)
    for loaded in (NEW, "", OLD):
        found = locate(tmp_path, NOWHERE, loaded=loaded)
        assert found is not None
        assert found.place.platform == "host"
        assert f"GPU Operator has {NEW}" in found.why


def test_a_driver_container_that_starts_later_is_found_by_the_mount_of_our_own(tmp_path: Path) -> None:
    node, own = tmp_path / "node", tmp_path / "run/nvidia/driver"
    (node / "run/nvidia").mkdir(parents=True)
    assert locate(node, own, loaded="") is None
    install(own / "usr/lib64")
    found = locate(node, own, loaded="")
    assert found is not None
    assert (found.place.platform, found.root, found.libraries) == ("GPU Operator", own, own / "usr/lib64")


def test_a_root_that_the_operator_named_is_not_left(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "usr-local-nvidia"
    install(own / "usr/lib64")
    root.mkdir()
    assert locate(root, own) is None
    install(root / "lib64")
    found = locate(root, own)
    assert found is not None
    assert found.root == root


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:13:26 UTC 2025\nGCC version: 12.2\n", NEW),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder)\n", "580.159.04"),
        ("", ""), ("NVRM version:", ""),
    ],
)  # fmt: skip
def test_the_kernel_modules_version_is_read(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert loaded_version(tmp_path / "version") == version


def test_no_module_has_no_version(tmp_path: Path) -> None:
    assert loaded_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("name", "version"),
    [("libcuda.so.580.65.06", NEW), ("libcuda.so.1", ""), ("libcuda.so", ""), ("libnvidia-ml.so.570.133.20", OLD), ("x.so.1.2", "")],
)  # fmt: skip
def test_a_librarys_name_has_the_version(name: str, version: str) -> None:
    assert version_in(name) == version


def test_links_lead_nowhere_but_inside(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/../../../etc")
    (tmp_path / "etc").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    assert inside(tmp_path, tmp_path / "a/passwd") == tmp_path / "etc/passwd"
    assert inside(tmp_path, tmp_path / "loop/x") == tmp_path / "loop/x"


FOUND = st.builds(Found, st.sampled_from(PLACES), st.sampled_from(["", OLD, NEW]))


@given(st.lists(FOUND, min_size=1, max_size=5), st.sampled_from(["", OLD, NEW]))
def test_the_choice_is_the_first_that_matches_the_module_else_the_first(found: list[Found], loaded: str) -> None:
    at, why = choose(found, loaded)
    assert why
    assert at == next((number for number, one in enumerate(found) if loaded and one.version == loaded), 0)
