"""Which rights and folders lead around the limits of a share."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.confinement import CAPABILITIES, HARMLESS, NODE_FOLDERS, Rights, folder_behind, way_out

parts = st.lists(st.sampled_from(["dev", "proc", "var", "lib", "data", "shm", "tangram"]), max_size=4)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_capability_is_known_in_every_spelling(name: str) -> None:
    for spelling in (name, name.lower(), f"CAP_{name}", f"cap_{name.lower()}"):
        assert (
            way_out(Rights(capabilities=("CHOWN", spelling)))
            == f"adds the capability {spelling} ({CAPABILITIES[name]})"
        )


def test_an_ordinary_container_has_no_way_out() -> None:
    assert way_out(Rights(capabilities=("NET_ADMIN", "SYS_PTRACE", "IPC_LOCK", "SYS_ADMINISTRATOR"))) is None


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("/", "/dev"),
        ("/dev", "/dev"),
        ("//dev//dri/", "/dev"),
        ("/dev/shmem", "/dev"),
        ("/dev/shm", None),
        ("/dev/infiniband/uverbs0", None),
        ("/device", None),
        ("/var", "/var/lib/containerd"),
        ("/var/run/crio/crio.sock", "/run/crio"),
        ("/run/containerd-of-ours", None),
        ("/run", "/run/containerd"),
        ("/data/../proc/1", "/proc"),
        ("/data", None),
    ],
)
def test_a_path_shows_a_folder(path: str, folder: str | None) -> None:
    assert folder_behind(path, NODE_FOLDERS) == folder


def test_a_folder_below_var_run_is_met_under_run() -> None:
    assert folder_behind("/run", {"/var/run/cdi": "specs"}) == "/var/run/cdi"
    assert folder_behind("/var/run/cdi/x.yaml", {"/run/cdi": "specs"}) == "/run/cdi"


@given(parts, parts)
def test_one_shows_the_other_exactly_when_one_is_an_ancestor(one: list[str], other: list[str]) -> None:
    path, folder = (PurePosixPath("/", *names) for names in (one, other))
    related = path == folder or path in folder.parents or folder in path.parents
    fine = any(PurePosixPath(h) in (path, *path.parents) for h in HARMLESS)
    assert (folder_behind(str(path), {str(folder): "x"}) is not None) == (related and not fine)
