"""Processes that bypass the library are reported within 5 s and killed within 10 s; a process with the library never is, whatever its state."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, Stage, Worker, a_node, wait_for
from tests.integration.shim.test_guard import PROGRAM, Bypass, bypasses, raw, statically, unloaded
from tests.signals import send_signal
from vgpu.api.cgroup import NOWHERE, place_of
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol.status import StatusDocument, decode_status

__all__ = ["bypasses", "raw"]

REPORTED_S, KILLED_S = 5.0, 10.0
"""Specified."""
SEEN = ("--grants-in-environment", "true", "--guard-slack-mib", "64")
"""Workers have no mount and no cgroup of a pod to be known by."""
KILL = ("--bypass", "kill", "--bypass-quiet-s", "0", *SEEN)
READINGS_S = 4.5
"""More than three readings take."""
WALL, PTRACE_ATTACH, PTRACE_DETACH = 0x40000000, 16, 17
"""Of waitpid: threads too. Of ptrace."""
UID, ID = "1b2c3d4e-0000-4000-8000-000000000001", "c1" * 32


@pytest.fixture
def strict(build: Path) -> Iterator[Stage]:
    """A node of its own with a container of 1000 MiB, whose arbiter kills without waiting for a minute after its start."""
    with a_node(build, CONTEXT_MIB) as made:
        made.grant((GPUS[0], 1000))
        made.start_measuring_arbiter(*KILL)
        yield made


def document(stage: Stage) -> StatusDocument:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(stage.folder / "status.sock"))
        return decode_status(b"".join(iter(lambda: sock.recv(65536), b"")))


def reasons(stage: Stage) -> dict[str, tuple[int, ...]]:
    return {one.reason: one.pids for one in stage.status().unenforced}


def some_readings() -> None:
    """What does not happen has no event to wait for."""
    threading.Event().wait(READINGS_S)


@pytest.mark.parametrize("way", ["static", "env -i"])
def test_a_bypass_is_reported_within_5_s_and_killed_within_10_and_its_siblings_live(
    strict: Stage, raw: Path, bypasses: list[Bypass], way: str
) -> None:
    worker = strict.worker()
    worker.must("alloc(100)")
    began = time.monotonic()
    bypass = statically(strict, raw, 1500) if way == "static" else unloaded(strict, 1500)
    bypasses.append(bypass)
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    (kill,) = document(strict).kills
    assert (kill.pid, kill.bypass, kill.container) == (bypass.pid, True, "main")
    wait_for(lambda: strict.status().memory_state == "enforced")
    assert worker.request("info()")[0] == 0


@pytest.mark.parametrize(
    ("options", "mib"),
    [
        (("--bypass", "report", "--bypass-quiet-s", "0", *SEEN), 1500),
        (("--bypass", "kill", *SEEN), 1500),
        (KILL, 900),
    ],
    ids=["policy report", "a minute after the start", "within the limit"],
)
def test_otherwise_it_is_reported_and_lives(
    strict: Stage, raw: Path, bypasses: list[Bypass], options: tuple[str, ...], mib: int
) -> None:
    strict.stop_arbiter()
    strict.start_measuring_arbiter(*options)
    bypass = statically(strict, raw, mib)
    bypasses.append(bypass)
    wait_for(lambda: "bypassing" in reasons(strict), REPORTED_S)
    if mib > 1000:
        wait_for(lambda: [(one.policy, one.pids) for one in strict.status().bypasses] == [("report", (bypass.pid,))])
    some_readings()
    assert bypass.process.poll() is None
    assert document(strict).kills == ()


def ptrace(request: int, thread: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).ptrace(request, thread, None, None) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def in_state(worker: Worker, state: str) -> Iterator[None]:
    threads: list[int] = []
    match state:
        case "stopped":
            send_signal(worker.pid, signal.SIGSTOP)
        case "in a kernel of 60 s":
            worker.start("context_sync()")
        case "traced":  # as a debugger that attaches to all threads, which stop
            threads = [int(one.name) for one in Path(f"/proc/{worker.pid}/task").iterdir()]
            for thread in threads:
                ptrace(PTRACE_ATTACH, thread)
                os.waitpid(thread, WALL)
    try:
        yield
    finally:
        for thread in threads:
            ptrace(PTRACE_DETACH, thread)


@pytest.mark.parametrize("state", ["stopped", "in a kernel of 60 s", "without the library's thread", "traced"])
def test_no_process_with_the_library_is_killed_when_the_arbiter_restarts(strict: Stage, state: str) -> None:
    """At its whole limit; and then far over it, as its limit is lowered: that is for `guard`, whose policy is to report."""
    env = strict.without_threads if state == "without the library's thread" else {}
    worker = strict.worker(**env)
    if state == "in a kernel of 60 s":
        worker.must("busy(60_000)")  # while its code fits
    while worker.request("alloc(20)")[0] == 0:
        pass
    assert strict.true_mib(worker) > 960
    with in_state(worker, state):
        strict.stop_arbiter(another=True)
        strict.start_measuring_arbiter(*KILL)
        wait_for(lambda: strict.status().processes)
        some_readings()
        assert document(strict).kills == ()
        strict.write_grant(grant_to_text(Grant("default", "a", "1", "main", (GrantGpu(GPUS[0], 400),))))
        wait_for(lambda: "over-limit" in reasons(strict))
        some_readings()
        found = reasons(strict)
        assert "over-limit" in found
        assert "bypassing" not in found
        assert "unconnected" in found or state not in ("stopped", "traced")
        assert strict.status().bypasses == ()
        assert document(strict).kills == ()
        assert worker._process.poll() is None


CGROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def container_cgroup() -> Iterator[Path]:
    """Of a container in a pod, of the kernel's."""
    if place_of(Path("/proc/self/cgroup").read_text()) != NOWHERE:
        pytest.skip("these tests run in a pod, to which a cgroup made here belongs")
    root = CGROUPS if (CGROUPS / "cgroup.controllers").exists() else CGROUPS / "pids"
    made = [root / f"pod{UID}", root / f"pod{UID}" / ID]
    try:
        for folder in made:
            folder.mkdir(exist_ok=True)  # a run that was killed may have left it
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield made[-1]
    with ExitStack() as over:
        for folder in made:
            over.enter_context(suppress(OSError))
            over.callback(folder.rmdir)


DETACHED = """
echo $$ > "$1/cgroup.procs"
mount -t tmpfs none /run && mkdir /run/tangram && mount --bind -o ro "$2" /run/tangram && umount -l /run/tangram
shift 2
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("maps_it", [False, True], ids=["plain", "that maps the library's file"])
def test_a_program_whose_grant_mount_was_detached_is_killed(
    strict: Stage, bypasses: list[Bypass], container_cgroup: Path, *, maps_it: bool
) -> None:
    """Its cgroup identifies its container; a mapping proves nothing where the grant is gone."""
    strict.stop_arbiter()
    strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantGpu(GPUS[0], 1000),))))
    (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
    strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
    mapping = (
        f"import mmap; file = open({strict.library!r}, 'rb'); kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
    )
    program = mapping * maps_it + PROGRAM.format(bytes=1500 * 2**20)
    plain = {k: v for k, v in strict.env().items() if not k.startswith(("TANGRAM_GRANT", "LD_PRELOAD"))}
    began = time.monotonic()
    with subprocess.Popen(
        [
            "unshare", "--mount", "sh", "-ec", DETACHED, "sh", str(container_cgroup),
            str(strict.folder / "grants" / strict.key), "python3", "-c", program,
        ],
        env=plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_for(lambda: reasons(strict).get("bypassing") == (process.pid,), REPORTED_S)
        assert process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [kill.pid for kill in document(strict).kills] == [process.pid]
    wait_for(lambda: not (container_cgroup / "cgroup.procs").read_text())


ENTER = 'echo $$ > "$0/cgroup.procs"; exec "$@"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_static_program_of_a_pod_that_is_called_like_the_mps_server_is_killed(
    strict: Stage, raw: Path, bypasses: list[Bypass], container_cgroup: Path, tmp_path: Path
) -> None:
    """Memory of an MPS server of the node is its clients'. In a pod, any program can use its name."""
    strict.stop_arbiter()
    strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantGpu(GPUS[0], 1000),))))
    (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
    strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
    named = shutil.copy(raw, tmp_path / "nvidia-cuda-mps-server")
    began = time.monotonic()
    bypass = Bypass(
        strict, "sh", "-c", ENTER, str(container_cgroup), str(named), str(strict.folder / "driver.sock"), "1500"
    )
    bypasses.append(bypass)
    assert Path(f"/proc/{bypass.pid}/comm").read_text() == "nvidia-cuda-mps\n"
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [kill.pid for kill in document(strict).kills] == [bypass.pid]
    wait_for(lambda: not (container_cgroup / "cgroup.procs").read_text())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_of_a_container_without_a_grant_counts_against_the_grant_of_its_pod(
    strict: Stage, raw: Path, bypasses: list[Bypass], container_cgroup: Path
) -> None:
    """In a pod whose containers see each other's processes, one reaches what another one was given."""
    beside = container_cgroup.parent / ("d2" * 32)
    beside.mkdir(exist_ok=True)
    try:
        strict.stop_arbiter()
        strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantGpu(GPUS[0], 1000),))))
        (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
        strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
        began = time.monotonic()
        bypass = Bypass(strict, "sh", "-c", ENTER, str(beside), str(raw), str(strict.folder / "driver.sock"), "1500")
        bypasses.append(bypass)
        wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
        assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
        assert [(kill.pid, kill.container) for kill in document(strict).kills] == [(bypass.pid, "main")]
        assert document(strict).ungranted == ()
        wait_for(lambda: not (beside / "cgroup.procs").read_text())
    finally:
        with suppress(OSError):
            beside.rmdir()


AGAIN = 'echo $$ > "$0/cgroup.procs"; while :; do "$@" || true; done'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_container_that_starts_such_a_program_again_and_again_is_ended(
    strict: Stage, raw: Path, bypasses: list[Bypass], container_cgroup: Path
) -> None:
    """The parent has no GPU memory, so no reading shows it. If the programs were killed one by one, they would use the memory nearly all the time."""
    strict.stop_arbiter()
    strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantGpu(GPUS[0], 1000),))))
    (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
    strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
    began = time.monotonic()
    starter = Bypass(
        strict, "sh", "-c", AGAIN, str(container_cgroup), str(raw), str(strict.folder / "driver.sock"), "1500"
    )
    bypasses.append(starter)
    assert starter.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    wait_for(lambda: not (container_cgroup / "cgroup.procs").read_text())
    assert [kill.whole for kill in document(strict).kills] == [False, False, True]


FIRST_ENDED = PROGRAM.replace(
    "sys.stdin.read()",
    "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); ctypes.CDLL(None).pthread_exit(None)",
)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_whose_first_thread_has_ended_is_killed(
    strict: Stage, bypasses: list[Bypass], container_cgroup: Path
) -> None:
    """The kernel shows neither its memory nor its mounts by the first thread."""
    strict.stop_arbiter()
    strict.write_grant(grant_to_text(Grant("default", "a", UID, "main", (GrantGpu(GPUS[0], 1000),))))
    (strict.folder / "grants" / strict.key / "container").write_text(f"{ID}\n")
    strict.start_measuring_arbiter(*KILL, "--mount-needed", "true")
    program = FIRST_ENDED.format(bytes=1500 * 2**20)
    began = time.monotonic()
    bypass = Bypass(strict, "sh", "-c", ENTER, str(container_cgroup), sys.executable, "-c", program)
    bypasses.append(bypass)
    wait_for(lambda: reasons(strict).get("bypassing") == (bypass.pid,), REPORTED_S)
    # the first thread may still be ending where the arbiter looked early
    wait_for(lambda: Path(f"/proc/{bypass.pid}/maps").read_bytes() == b"")
    assert bypass.process.poll() is None
    assert bypass.process.wait(KILLED_S - (time.monotonic() - began)) == -signal.SIGKILL
    assert [kill.pid for kill in document(strict).kills] == [bypass.pid]
    wait_for(lambda: not (container_cgroup / "cgroup.procs").read_text())


def test_memory_that_belongs_to_no_grant_is_in_the_status_within_5_s(
    strict: Stage, raw: Path, bypasses: list[Bypass]
) -> None:
    """Another process of the node, that is in no container."""
    worker = strict.worker()
    plain = {k: v for k, v in strict.env().items() if not k.startswith(("TANGRAM_GRANT", "LD_PRELOAD"))}
    with subprocess.Popen(
        [str(raw), str(strict.folder / "driver.sock"), "700"],
        env=plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_for(lambda: document(strict).ungranted, REPORTED_S)
        (found,) = document(strict).ungranted
        assert (found.gpu, found.pid, found.held_bytes, found.pod) == (GPUS[0], process.pid, 700 * 2**20, "")
        assert str(raw) in found.command
        assert worker.request("info()")[0] == 0
        process.communicate("\n")
    wait_for(lambda: not document(strict).ungranted)
