"""Processes belong to the pod and container that their cgroup names, whatever they show and call themselves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from arbiter import host
from arbiter.enforcement import enforcements
from arbiter.memory.meter import MemoryReading, Meter, SeenProcess
from nvml.messages import AnyReply, AnyRequest, ProcessesReply, ProcessUsage
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, MIB, ArbiterNode, HandMeter, a_grant, wait_for
from vgpu.api.cgroup import CgroupOwner
from vgpu.api.codec import grant_to_text
from vgpu.api.contract import CONTAINER_ID
from vgpu.api.enforcement import Finding, Reason
from vgpu.protocol import wire

A, B = (f"1b2c3d4e-0000-4000-8000-00000000000{n}" for n in range(2))
C1, C2 = "c1" * 32, "c2" * 32
"""IDs of containers."""


def in_pod(uid: str, container: str = C1) -> str:
    return f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice/cri-containerd-{container}.scope\n"


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    """Of a pod with one container and a pod with two."""
    for key, uid, container in (("a", A, "main"), ("b1", B, "main"), ("b2", B, "side")):
        folder = tmp_path / "grants" / key
        folder.mkdir(parents=True)
        (folder / "grant").write_text(grant_to_text(replace(a_grant(), uid=uid, container=container)))
    (tmp_path / "grants" / "damaged").mkdir()
    (tmp_path / "grants" / "damaged" / "grant").write_text("no grant")
    return tmp_path / "grants"


class Proc:
    """The content of /proc. `mounts` of a process: the key that it shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grants: Path) -> None:
        self.cgroups: dict[str, str] = {}
        self.shown: dict[int, str] = {}
        monkeypatch.setattr(host, "_read", lambda of, name: self.cgroups.get(str(of), "").encode() * (name == "cgroup"))
        monkeypatch.setattr(host, "grant_of", lambda pid, _grants: self.shown.get(pid))
        self.grants = grants


@pytest.fixture
def proc(monkeypatch: pytest.MonkeyPatch, grants: Path) -> Proc:
    return Proc(monkeypatch, grants)


@pytest.mark.parametrize(
    ("cgroup", "key"),
    [
        (in_pod(A), "a"),
        (in_pod(B), "b1"),
        (in_pod("1b2c3d4e-0000-4000-8000-00000000000f"), None),
        (f"{in_pod(A).rstrip()}/pod{B}\n", "a"),
        ("0::/system.slice/x.service\n", None),
        ("", None),
    ],
    ids=["one grant", "two grants", "no grant", "a cgroup that is named like a pod's", "the node's own", "gone"],
)
def test_a_process_that_shows_no_grant_belongs_to_the_pod_of_its_cgroup(
    proc: Proc, cgroup: str, key: str | None
) -> None:
    proc.cgroups["1"] = cgroup
    assert host.key_of(1, proc.grants, None) == key


def test_of_several_containers_it_is_the_one_of_its_container_id(proc: Proc) -> None:
    proc.cgroups |= {"1": in_pod(B), "2": in_pod(B, C2)}
    (proc.grants / "b2" / CONTAINER_ID).write_text(f"{C1}\n")
    assert host.key_of(1, proc.grants, None) == "b2"
    assert host.key_of(2, proc.grants, None) == "b1", "that container is unknown: the first of the pod's"


@pytest.mark.parametrize("content", [C1[:-1], f"{C1}{C1}", "containerd://", "\xff", "x" * 300, None])
def test_what_is_no_container_id_is_none(proc: Proc, content: str | None) -> None:
    """The file may have any content, or be a FIFO without a writer."""
    proc.cgroups["1"], path = in_pod(B), proc.grants / "b2" / CONTAINER_ID
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content, encoding="latin-1")
    assert host.key_of(1, proc.grants, None) == "b1"


def test_what_a_process_shows_decides_among_the_grants_of_its_pod_alone(proc: Proc) -> None:
    proc.cgroups |= {"1": in_pod(A), "2": in_pod(B)}
    proc.shown |= {1: "b2", 2: "b2"}
    assert host.key_of(1, proc.grants, None) == "a"
    assert host.key_of(2, proc.grants, None) == "b2"


@pytest.mark.parametrize(
    ("cgroup", "served"),
    [(in_pod("uid-a"), False), (in_pod(A), True), (in_pod(B), False), (f"{in_pod(B).rstrip()}/pod{A}\n", False)],
    ids=["none", "its", "other", "another that made a cgroup which is named like its"],
)
def test_a_process_that_shows_no_grant_is_served_at_the_sockets_of_its_pod_alone(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch, cgroup: str, *, served: bool
) -> None:
    node.limits = replace(node.limits, mount_needed=True)
    server = node.start()
    node.allocate("k", replace(a_grant(), uid=A))
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    monkeypatch.setattr(
        host, "_read", lambda pid, name: cgroup.encode() if (pid, name) == (os.getpid(), "cgroup") else b""
    )
    process = node.connect()
    if served:
        assert process.hello().lease(MIB).granted_bytes == MIB
    else:
        assert isinstance(process.receive(), wire.Error)


@pytest.mark.parametrize(
    ("container", "mounted_there", "served"),
    [(C1, "", True), (C2, "", False), (C2, "k", False), ("d3" * 32, "", True)],
    ids=[
        "its",
        "a sibling",
        "a sibling that shows a folder of that name",
        "a container that started again, or has no grant",
    ],
)
def test_a_process_of_another_container_with_a_grant_is_refused_whatever_it_shows(
    node: ArbiterNode, monkeypatch: pytest.MonkeyPatch, container: str, mounted_there: str, *, served: bool
) -> None:
    """Root of a container can change its root to that of another container of its pod, where that one's socket is."""
    node.limits = replace(node.limits, mount_needed=True)
    server = node.start()
    for key, its in (("k", C1), ("sibling", C2)):
        (node.allocate(key, replace(a_grant(), uid=A)) / CONTAINER_ID).write_text(f"{its}\n")
    wait_for(
        lambda: (
            [server.containers[key].container_id for key in ("k", "sibling") if key in server.containers] == [C1, C2]
        )
    )
    mounts = f"40 22 8:1 /x/{node.folder.name}/{mounted_there} /.tangram ro - ext4 /dev/sda1 rw\n" * bool(mounted_there)
    shown = {"cgroup": in_pod(A, container).encode(), "mountinfo": mounts.encode()}
    monkeypatch.setattr(host, "_read", lambda pid, name: shown.get(name, b"") if pid == os.getpid() else b"")
    process = node.connect()
    if served:
        assert process.hello().lease(MIB).granted_bytes == MIB
    else:
        assert process.receive() == wire.Error(2, "this socket is another container's: yours is in sibling")


def test_a_process_that_is_connected_belongs_to_the_container_that_it_is_connected_to(
    node: ArbiterNode, meter: HandMeter
) -> None:
    """In a pod with several, if its cgroup names the pod alone."""
    server = node.start()
    for key in ("b1", "b2"):
        node.allocate(key, replace(a_grant(), uid=B))
    wait_for(lambda: all(server.containers.get(key) and server.containers[key].grant for key in ("b1", "b2")))
    process = node.process("b2")
    pid = os.getpid()
    for _ in range(2):
        seen = {pid: SeenProcess(0, None, 0, place=CgroupOwner(B, C1))}
        meter._report(MemoryReading(meter._clock(), {GPU: {pid: 900 * MIB}}, seen))
    wait_for(lambda: not meter._readings)
    with server.lock:
        assert [enforcements(server)[key].findings for key in ("b1", "b2")] == [(), ()]
    assert node.process("b1").lease(1000 * MIB).granted_bytes == 1000 * MIB
    process.close()


CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def pod_cgroup() -> Iterator[Path]:
    """One that is named like a pod's, of the kernel's."""
    root = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "pids"
    made = root / f"pod{A}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield made
    with suppress(OSError):
        made.rmdir()


class Lists:
    """NVML, which lists one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        return [ProcessesReply((ProcessUsage(self.pid, GPU, 900 * MIB),)) for _ in requests]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_that_changed_its_root_and_does_not_come_back_is_charged_and_reported(
    node: ArbiterNode, meter: HandMeter, tmp_path: Path, pod_cgroup: Path
) -> None:
    """It has the mount no more, and no thread that has."""
    server = node.start()
    node.allocate("k", replace(a_grant(), uid=A))
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    lost = "import os, sys; os.chroot(sys.argv[1]); print('gone', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["python3", "-c", lost, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "gone\n"
        (pod_cgroup / "cgroup.procs").write_text(str(process.pid))
        reads = Meter(Nvml(Lists(process.pid)), node.folder)
        reads.want([GPU])
        for _ in range(2):
            meter._report(reads._read(meter._clock()))
        wait_for(lambda: not meter._readings)
        with server.lock:
            found = enforcements(server)["k"].findings
        assert found == (Finding(Reason.UNCONNECTED, (process.pid,)),)
        assert node.process().lease(101 * MIB).refused
        process.communicate()
