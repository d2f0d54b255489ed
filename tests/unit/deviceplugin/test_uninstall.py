"""What an uninstallation removes from a node, on folders that look like one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from deviceplugin.uninstall import Node, clean
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu

GRANT = Grant("team", "trains", "uid", "main", (GrantGpu("GPU-00000000-0000-0000-0000-000000000001", 1024),))
DEVICE = "8:1"
POD = "0::/../../kubepods.slice/kubepods-pod{}.slice/cri-containerd-" + 64 * "a" + ".scope"


class Stand:
    """A node with a state root, and processes with their mounts."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "host/tangram", folder / "proc"
        self._pids = itertools.count(100)
        self.unmounted: list[str] = []
        self.waited: list[float] = []
        for name in ("grants/k1", "sockets/k1", "plugin"):
            (self.root / name).mkdir(parents=True)
        (self.root / "grants/k1/grant").write_text(grant_to_text(GRANT))
        (self.root / "libtangram.so").write_bytes(b"library")
        self.process("self", "0::/", f"1 0 {DEVICE} /var/lib {folder}/host rw")
        self.process("1", "0::/init.scope", f"1 0 {DEVICE} / / rw")

    def process(self, pid: str, cgroup: str, *mounts: str) -> None:
        (self.proc / pid).mkdir(parents=True)
        (self.proc / pid / "cgroup").write_text(cgroup + "\n")
        (self.proc / pid / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))

    def container(self, *mounts: str, device: str = DEVICE, root: str = "/var/lib/tangram") -> Path:
        """With these folders of the state root. Its process."""
        number = next(self._pids)
        lines = [f"{n} 0 {device} {root}{where} /in/{n} ro" for n, where in enumerate(mounts)]
        self.process(str(number), POD.format(UUID(int=number)), f"{number} 0 0:99 / / rw - overlay", *lines)
        return self.proc / str(number)

    def clean(self, *files: Path) -> dict[str, object]:
        node = Node(
            self.root, self.proc, self.unmounted.append, self.waited.append, lambda: sum(self.waited), self.proc / "self"
        )  # fmt: skip
        return dict(clean(node, files))


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


def test_without_a_container_that_has_a_grant_all_of_it_goes(stand: Stand, tmp_path: Path) -> None:
    stand.container()
    stand.process("2", "0::/system.slice/other.service", f"1 0 {DEVICE} /var/lib/tangram/grants/k1 /x ro")
    (tmp_path / "cdi").mkdir()
    spec, missing = tmp_path / "cdi/tangram.json", tmp_path / "cdi/missing.json"
    spec.write_text("{}")
    (tmp_path / "cdi/other.json").write_text("{}")
    assert stand.clean(spec, missing) == {"removed": [str(stand.root), str(spec)]}
    assert not stand.root.exists()
    assert [one.name for one in (tmp_path / "cdi").iterdir()] == ["other.json"]
    assert stand.clean(spec) == {"removed": []}, "again"


@pytest.mark.parametrize("directory", ["/grants/k1", "/grants/k1//deleted"])
def test_where_a_container_has_a_grant_nothing_goes_and_its_pod_is_named(stand: Stand, directory: str) -> None:
    stand.container(directory, "/sockets/k1", "/ld.so.preload")
    assert stand.clean() == {"kept": ["team/trains"]}
    assert (stand.root / "libtangram.so").exists()
    assert stand.waited == []


@pytest.mark.parametrize("text", [None, b"no grant", b"\xff", b"x" * 100_000])
def test_a_pod_whose_grant_cannot_be_read_is_named_by_the_grant(stand: Stand, text: bytes | None) -> None:
    stand.container("/grants/k1")
    (stand.root / "grants/k1/grant").unlink()
    if text is not None:
        (stand.root / "grants/k1/grant").write_bytes(text)
    assert stand.clean() == {"kept": ["grant k1"]}


def test_another_file_system_with_such_a_path_is_no_grant(stand: Stand) -> None:
    stand.process(
        "7",
        "mnt:[7]",
        "1 0 8:2 /var/lib/tangram/grants/k1 /.tangram ro",
        "2 0 8:1 /var/lib/tangramx/grants/k1 /.tangram ro",
    )
    assert stand.clean() == {"removed": [str(stand.root)]}


def test_it_waits_for_the_end_of_tangrams_own_containers(stand: Stand) -> None:
    process = stand.container("/plugin", "/grants")
    whole = stand.container("")

    def end(seconds: float) -> None:
        stand.waited.append(seconds)
        if len(stand.waited) == 3:
            for gone in (process, whole):
                (gone / "mountinfo").unlink()

    node = Node(stand.root, stand.proc, stand.unmounted.append, end, lambda: sum(stand.waited), stand.proc / "self")
    assert clean(node, ()) == {"removed": [str(stand.root)]}
    assert len(stand.waited) == 3


def test_where_they_do_not_end_nothing_goes_and_the_error_names_their_folders(stand: Stand) -> None:
    stand.container("/plugin", "/grants")
    answer = stand.clean()
    assert str(answer["error"]).startswith("containers of Tangram have grants, plugin of ")
    assert sum(stand.waited) >= 60
    assert (stand.root / "libtangram.so").exists()


def test_mounts_that_a_host_pool_left_go_first_the_deepest_before_the_others(stand: Stand, tmp_path: Path) -> None:
    lines = [f"1 0 {DEVICE} /var/lib {tmp_path}/host rw"]
    lines += [f"{n} 0 0:{n} / {stand.root}{at} rw" for n, at in enumerate(("/pool", "/pool/tmpfs", "x/pool"), 50)]
    (stand.proc / "self/mountinfo").write_text("\n".join(lines))
    assert stand.clean() == {"removed": [str(stand.root)]}
    assert stand.unmounted == [f"{stand.root}/pool/tmpfs", f"{stand.root}/pool"]


def test_a_state_root_that_is_a_file_system_of_its_own_is_found_by_that(stand: Stand, tmp_path: Path) -> None:
    lines = [f"1 0 {DEVICE} /var/lib {tmp_path}/host rw", f"2 0 0:77 /state {stand.root} rw"]
    (stand.proc / "self/mountinfo").write_text("\n".join(lines))
    (stand.proc / "1/mountinfo").write_text("2 0 0:77 /state /var/lib/tangram rw")
    process = stand.container("/grants/k1", device="0:77", root="/state")
    assert stand.clean() == {"kept": ["team/trains"]}
    (process / "mountinfo").unlink()
    assert stand.clean() == {"removed": [str(stand.root)]}
    assert stand.unmounted == []


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "host/tangram/grants").mkdir(parents=True)
    command = [sys.executable, "-m", "deviceplugin.uninstall", str(tmp_path / "host/tangram")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    yield child
    child.kill()
    child.communicate()


def test_the_program_prints_what_it_did_and_waits_for_its_end(program: subprocess.Popen[str], tmp_path: Path) -> None:
    assert program.stdout is not None
    printed = json.loads(program.stdout.readline())
    assert printed == {"removed": [str(tmp_path / "host/tangram")]}
    assert not (tmp_path / "host/tangram").exists()
    assert program.poll() is None
    program.terminate()
    assert program.wait(10) == 0
