"""Which pods have living processes, read from a /proc of our own making."""

from __future__ import annotations

import shutil
from pathlib import Path
from uuid import UUID

import pytest

from deviceplugin.pods.pod_processes import EACH, PodProcesses
from vgpu.api.cgroup import place_of

A, B, C = (str(UUID(int=number)) for number in (1, 2, 3))


class FakeProc:
    """A /proc with what is requested."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.add(1, "/init.scope")

    def add(
        self, pid: int, cgroup: str, state: str = "S", threads: dict[int, str] | None = None, name: str = "x"
    ) -> None:
        made = self.folder / str(pid)
        made.mkdir(parents=True)
        (made / "cgroup").write_text(f"0::{cgroup}\n")
        (made / "stat").write_text(f"{pid} ({name}) {state} 1 1 1\n")
        for thread, its in (threads or {pid: state}).items():
            (made / "task" / str(thread)).mkdir(parents=True)
            (made / "task" / str(thread) / "stat").write_text(f"{thread} ({name}) {its} 1 1 1\n")

    def end(self, pid: int) -> None:
        shutil.rmtree(self.folder / str(pid))


def cgroup(uid: str) -> str:
    return f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice/cri-containerd-0.scope"


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_a_pod_lives_as_long_as_any_process_of_it(proc: FakeProc) -> None:
    looking = PodProcesses(proc.folder)
    proc.add(10, cgroup(A))
    proc.add(11, cgroup(A))
    proc.add(12, cgroup(B))
    assert looking.living([A, B, C]) == {A, B}
    proc.end(10)
    proc.end(12)
    assert looking.living([A, B, C]) == {A}
    proc.end(11)
    assert looking.living([A, B, C]) == set()


@pytest.mark.parametrize(
    ("state", "threads", "lives"),
    [
        ("R", None, True),
        ("D", None, True),
        ("T", None, True),
        ("Z", None, False),
        ("X", None, False),
        ("Z", {10: "Z", 11: "D"}, True),
        ("Z", {10: "Z", 11: "Z"}, False),
    ],
)
def test_a_zombie_uses_nothing_unless_one_of_its_threads_runs(
    proc: FakeProc, state: str, threads: dict[int, str] | None, *, lives: bool
) -> None:
    proc.add(10, cgroup(A), state, threads, name="a) Z (b")
    assert PodProcesses(proc.folder).living([A]) == ({A} if lives else set())


def test_where_cgroups_are_of_version_1_a_process_whose_first_thread_has_ended_is_its_pods(proc: FakeProc) -> None:
    """The kernel shows the root's for the first thread then."""
    proc.add(10, "/", "Z", {10: "Z", 11: "D"})
    root, own = (f"4:memory:{path}\n3:cpuset:{path}\n0::/\n" for path in ("/", cgroup(A)))
    (proc.folder / "10/cgroup").write_text(root)
    for thread, text in ((10, root), (11, own)):
        (proc.folder / f"10/task/{thread}/cgroup").write_text(text)
    assert PodProcesses(proc.folder).living([A]) == {A}


def test_a_process_number_that_another_pod_has_now_does_not_count(proc: FakeProc) -> None:
    looking = PodProcesses(proc.folder)
    proc.add(10, cgroup(A))
    assert looking.living([A]) == {A}
    proc.end(10)
    proc.add(10, cgroup(B))
    assert looking.living([A]) == set()
    assert looking.living([A, B]) == {B}


def test_no_pod_counts_as_alive_by_a_cgroup_that_another_pod_named_like_its_own(proc: FakeProc) -> None:
    proc.add(10, f"{cgroup(A)}/pod{B}")
    assert PodProcesses(proc.folder).living([B]) == set()
    assert PodProcesses(proc.folder).living([A, B]) == {A}


def test_on_a_node_that_runs_inside_a_pod_the_nodes_own_pods_live(proc: FakeProc) -> None:
    """The arbiter's rule: our own cgroup shows how many pods of other nodes come first."""
    (proc.folder / "self").mkdir()
    (proc.folder / "self/cgroup").write_text(f"0::{cgroup(A)}/kubelet{cgroup(C)}\n")
    proc.add(10, f"{cgroup(A)}/kubelet{cgroup(B)}")
    proc.add(11, f"{cgroup(A)}/kubelet{cgroup(B)}/pod{C}")
    (proc.folder / "10/mountinfo").write_text("mounts of 10\n")
    assert PodProcesses(proc.folder).living([A, B, C]) == {B}
    assert (B, "mounts of 10\n", "10") in list(PodProcesses(proc.folder).mounts({A, B, C}))


def test_a_process_that_ends_while_it_is_read_is_no_error(proc: FakeProc) -> None:
    proc.add(10, cgroup(A))
    (proc.folder / "10/stat").unlink()
    shutil.rmtree(proc.folder / "10/task")
    (proc.folder / "11").mkdir()
    assert PodProcesses(proc.folder).living([A]) == set()
    assert PodProcesses(proc.folder / "none").living([A]) == set()


def test_a_proc_that_does_not_show_the_node_is_known(proc: FakeProc) -> None:
    assert not PodProcesses(proc.folder).blind
    proc.end(1)
    assert PodProcesses(proc.folder).blind


def test_our_own_process_is_found_in_the_real_one() -> None:
    text = Path("/proc/self/cgroup").read_text()
    assert PodProcesses().living([A]) == set()
    assert text  # there is something to read


def test_the_mounts_of_a_pods_processes_are_read(proc: FakeProc) -> None:
    for pid, of in ((10, A), (11, B), (12, A), (13, A)):
        proc.add(pid, cgroup(of))
        (proc.folder / str(pid) / "mountinfo").write_text(f"mounts of {pid}\n")
    proc.end(13)
    looking = PodProcesses(proc.folder)
    assert sorted(looking.mounts({A})) == [(A, "mounts of 10\n", "10"), (A, "mounts of 12\n", "12")]
    assert list(looking.mounts(set())) == []


def test_a_check_yields_now_and_then_and_never_where_there_is_nothing_to_check(proc: FakeProc) -> None:
    ways: list[int] = []
    looking = PodProcesses(proc.folder, lambda: ways.append(1))
    for pid in range(10, 10 + 2 * EACH):
        proc.add(pid, cgroup(B) if pid % 2 else "/system.slice/a-podman.service")
    assert looking.living([A]) == set()
    assert len(ways) == 3  # the first process is number 1
    assert looking.living([]) == set()
    assert list(looking.mounts([])) == []
    assert len(ways) == 3


@pytest.mark.parametrize("uid", ["0" * 31 + "a", A])
@pytest.mark.parametrize(
    "form", ["/kubepods/burstable/pod{0}/0", "/kubepods-pod{1}.slice/crio-0.scope", "/x/podpod{0}"]
)
def test_a_pod_is_found_by_any_name_that_its_cgroup_may_have(proc: FakeProc, uid: str, form: str) -> None:
    proc.add(10, form.format(uid, uid.replace("-", "_")))
    looking = PodProcesses(proc.folder)
    assert looking.living([uid]) == {place_of(f"0::{form.format(uid, uid.replace('-', '_'))}").pod} - {""}


def dev_of(proc: FakeProc, pid: int, *names: str) -> Path:
    """The /dev of a process, which has these files."""
    dev = proc.folder / str(pid) / "root/dev"
    dev.mkdir(parents=True)
    for name in names:
        (dev / name).touch()
    return dev


def test_a_device_is_found_in_the_dev_of_the_process_itself(proc: FakeProc) -> None:
    for pid in (10, 11):
        proc.add(pid, cgroup(A))
    dev_of(proc, 10, "nvidiactl", "nvidia0")
    dev_of(proc, 11, "null")
    looking = PodProcesses(proc.folder)
    assert looking.has_device("10", "nvidiactl") is True
    assert looking.has_device("11", "nvidiactl") is False


def test_a_link_is_not_followed_out_of_a_container(proc: FakeProc, tmp_path: Path) -> None:
    """A container chooses what its /dev is. It must not have us look at the node's."""
    proc.add(10, cgroup(A))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "nvidiactl").touch()
    (proc.folder / "10/root").mkdir()
    (proc.folder / "10/root/dev").symlink_to(elsewhere)
    assert PodProcesses(proc.folder).has_device("10", "nvidiactl") is None


def test_nothing_is_known_of_a_process_that_has_ended_or_is_gone(proc: FakeProc) -> None:
    proc.add(10, cgroup(A), "Z")
    dev_of(proc, 10)
    looking = PodProcesses(proc.folder)
    assert looking.has_device("10", "nvidiactl") is None
    assert looking.has_device("11", "nvidiactl") is None
