"""Contexts and the guard, with a meter that the test writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arbiter import host
from arbiter.memory.contexts import Measuring
from arbiter.memory.meter import Reading, Seen
from arbiter.memory.over_limit import REMEMBERED_S
from arbiter.server import Server
from arbiter.status import status_of
from tests.mounting import with_grant
from tests.unit.arbiter.conftest import GPU, MIB, OTHER_GPU, HandMeter, Node, Process, a_grant, wait_for
from vgpu.api.contract import GRANT_DIRS
from vgpu.protocol import wire
from vgpu.protocol.wire import Step


class SetClock:
    """Seconds, as the test says."""

    now_s = 0.0
    armed = False

    def __call__(self) -> float:
        return self.now_s


def begin(process: Process) -> wire.Message:
    process.send(wire.Context(0, Step.BEGIN, 0), 0x40000007)
    seq, answer = process.receive_numbered()
    assert seq == 0x40000007
    return answer


def done(process: Process, step: Step = Step.DONE, reported: int = 0) -> None:
    process.send(wire.Context(0, step, reported), 0x40000008)


def test_the_first_context_is_measured_and_the_next_is_held_for(node: Node, meter: HandMeter) -> None:
    node.start()
    node.allocate("k", a_grant())
    first = node.process()
    assert begin(first) == wire.Leased(0, False, 0, 1000 * MIB)
    done(first)
    wait_for(lambda: meter.hurries == 1)
    meter.says(me=300)
    assert first.receive() == wire.Measured(0, True, 300 * MIB, 700 * MIB)
    assert first.page is not None
    assert first.page[0] == 700 * MIB
    second = node.process()
    assert begin(second) == wire.Leased(0, False, 300 * MIB, 400 * MIB)


def test_a_context_that_does_not_fit_is_refused(node: Node, meter: HandMeter) -> None:
    server = node.start()
    server.measuring.costs[GPU] = 300 * MIB
    node.allocate("k", a_grant())
    node.process().lease(701 * MIB)
    late = node.process()
    late.sock.settimeout(10)
    answer = begin(late)
    assert isinstance(answer, wire.Leased)
    assert (answer.refused, answer.granted_bytes) == (True, 0)


def test_who_initialises_the_driver_is_promised_a_context_for_a_while(node: Node, meter: HandMeter) -> None:
    server = node.start()
    server.measuring.costs[GPU] = 300 * MIB - 1
    node.allocate("k", a_grant())
    first = node.connect().hello(wire.FOR_CONTEXT)
    assert first.page is not None
    assert (first.promised_mib, first.page[0]) == (300, 1000 * MIB), "the page does not show it: nobody uses it yet"
    assert node.process().promised_mib == 0, "that one has requested none"
    assert begin(first) == wire.Leased(0, False, 300 * MIB, 700 * MIB)
    assert node.connect().hello(wire.FOR_CONTEXT).promised_mib == 300
    assert first.lease(401 * MIB).granted_bytes == 401 * MIB, "it waits until the second promise has ended"


def test_a_begin_that_was_sent_before_a_promise_ended_is_read_before_it_ends(node: Node, meter: HandMeter) -> None:
    node.allocate("k", a_grant())
    clock = SetClock()
    server = Server(node.folder, node.limits, clock, Measuring(meter, {GPU: 300 * MIB}))
    promised, other = node.connect(), node.connect()
    clock.now_s = 10.0  # it has opened
    select = server._poller.select

    def late(pause_s: float | None = None) -> list[Any]:
        """While the loop is between its look at the sockets and its look at the clock, BEGIN comes and the promise ends."""
        ready = select(0.2)
        if clock.armed and not ready:
            clock.armed, clock.now_s = False, 11.5
            promised.send(wire.Context(0, Step.BEGIN, 0), 0x40000007)
        return ready

    server._poller.select = late  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert promised.hello(wire.FOR_CONTEXT).promised_mib == 300
        other.hello().send(wire.Lease(0, 701 * MIB, 0))
        clock.armed = True
        assert promised.receive() == wire.Leased(0, False, 300 * MIB, 700 * MIB)
        assert other.receive() == wire.Leased(0, True, 0, 700 * MIB)
    finally:
        server.stop()
        thread.join()


def test_where_there_are_several_gpus_no_context_is_promised(node: Node, meter: HandMeter) -> None:
    server = node.start()
    server.measuring.costs |= {GPU: 300 * MIB, OTHER_GPU: 300 * MIB}
    node.allocate("k", a_grant(uuids=(GPU, OTHER_GPU)))
    assert node.connect().hello(wire.FOR_CONTEXT).promised_mib == 0


def test_without_nvml_nothing_is_known_and_nobody_waits(node: Node) -> None:
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    assert begin(process) == wire.Leased(0, False, 0, 1000 * MIB)
    done(process)
    assert process.receive() == wire.Measured(0, False, 0, 1000 * MIB)


def test_nvml_that_fails_answers_who_waits_for_it(node: Node, meter: HandMeter) -> None:
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    meter.is_blind()
    assert process.receive() == wire.Measured(0, False, 0, 1000 * MIB)


def test_a_context_made_while_nvml_is_being_opened_waits_for_its_measure(node: Node, meter: HandMeter) -> None:
    meter.trouble = "NVML is not open yet"
    node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    meter.trouble = ""
    meter.says(me=300)
    assert process.receive() == wire.Measured(0, True, 300 * MIB, 700 * MIB)


def test_a_process_that_hangs_up_before_it_is_measured_teaches_nothing(node: Node, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    process = node.process()
    begin(process)
    done(process)
    wait_for(lambda: meter.hurries == 1)
    process.close()
    meter.says()
    assert node.process().lease(1000 * MIB).granted_bytes == 1000 * MIB
    assert server.measuring.costs == {}


def test_a_deaf_process_that_is_dropped_while_it_is_answered_ends_nothing_else(node: Node, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    deaf, other = node.process(), node.process()
    begin(deaf)
    done(deaf)
    wait_for(lambda: meter.hurries == 1)
    with server.lock:  # the reading is there first, and its answer finds nobody
        meter.says(me=300)
        deaf.sock.close()
    assert other.lease(1).granted_bytes >= 1


def test_a_pid_that_connects_twice_is_charged_once(node: Node, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    first, second = node.process(), node.process()
    meter.says(me=300)
    wait_for(lambda: server.containers["k"].ledger.context_bytes(0) == 300 * MIB)
    assert first.lease(1).granted_bytes >= 1
    assert second.lease(1).granted_bytes >= 1


def test_the_list_of_processes_names_those_with_memory(node: Node, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    process, _idle = node.process(), node.process()
    process.lease(100 * MIB)
    meter.says("k", me=300, p999999=50)
    wait_for(lambda: server.containers["k"].ledger.context_bytes(0))
    process.send(wire.Processes(0), 5)
    assert process.receive_numbered() == (5, wire.ProcessList(0, (wire.ListedProcess(1, 300 * MIB),)))


def test_over_the_limit_twice_is_over_and_policy_report_kills_nobody(node: Node, meter: HandMeter) -> None:
    server = node.start()
    node.allocate("k", a_grant())
    sleeper = subprocess.Popen(["sleep", "60"])
    wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
    container = server.containers["k"]
    meter.says("k", **{f"p{sleeper.pid}": 1001})
    wait_for(lambda: container.contexts.unconnected_usage.get(GPU))
    assert container.lookout.excesses == ()
    meter.says("k", **{f"p{sleeper.pid}": 1001})
    wait_for(lambda: container.lookout.excesses)
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()


def test_a_kill_is_in_the_status_after_the_container_is_gone(node: Node, meter: HandMeter) -> None:
    """With the process its excess ends, and often the container: nobody may have looked meanwhile."""
    server = node.start()
    node.allocate("k", replace(a_grant(), guard="kill"))
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        wait_for(lambda: "k" in server.containers and server.containers["k"].grant)
        started = host.started_at(sleeper.pid)
        for _ in range(2):
            meter._report(
                Reading(time.monotonic(), {GPU: {sleeper.pid: 1001 * MIB}}, {sleeper.pid: Seen(started, "k", 0)})
            )
        assert sleeper.wait(10) == -signal.SIGKILL
    meter.says("k")
    shutil.rmtree(node.folder / "k")
    wait_for(lambda: not server.containers)
    (kill,) = status_of(server).kills
    assert (kill.id, kill.uid, kill.pod, kill.container) == (f"{sleeper.pid}-{started}", "uid-a", "default/a", "main")
    assert (kill.gpu, kill.command, kill.held_bytes, kill.limit_bytes) == (GPU, "sleep 60", 1001 * MIB, 1000 * MIB)
    assert server.measuring.kills.lately(time.monotonic() + REMEMBERED_S) == ()


MOUNTS = """\
22 1 0:20 / / rw,relatime - ext4 /dev/sda1 rw
40 22 8:1 /var/lib/tangram/grants/0a /.tangram ro,relatime shared:1 - ext4 /dev/sda1 rw
"""
EARLIER = MOUNTS.replace("/.tangram", "/run/tangram")
OTHER = "41 22 8:1 /var/lib/tangram/grants/0b /run/tangram ro,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (MOUNTS, "0a"),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/tangram/grants/0a"), "0a"),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/elsewhere/0a"), None),
        (MOUNTS.replace("/var/lib/tangram/grants/0a", "/0a"), None),
        (MOUNTS.replace("/.tangram", "/.tangram/x"), None),
        (MOUNTS.replace("/.tangram", "/volume"), None),
        (MOUNTS + "41 22 0:9 / /.tangram rw - tmpfs none rw\n", None),
        (EARLIER, "0a"),
        (EARLIER.replace("/run/tangram", "/run/tangram/x"), None),
        (EARLIER + "41 22 0:9 / /run/tangram rw - tmpfs none rw\n", None),
        (MOUNTS + OTHER, "0a"),
        (OTHER + MOUNTS, "0a"),
        (MOUNTS + "41 22 0:9 / /run/tangram rw - tmpfs none rw\n", "0a"),
        ("", None),
        ("nonsense", None),
    ],
)
def test_a_process_belongs_to_the_grant_that_is_mounted_in_its_namespace(text: str, key: str | None) -> None:
    assert host.grant_in(text, "grants") == key


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("/state/grants/0a/grant", "0a"),
        ("/state/grants/0a/other", None),
        ("/state/grants/0a/b/grant", None),
        ("/state/grants//grant", None),
        ("/other/grants/0a/grant", None),
        ("", None),
    ],
)
def test_a_process_of_a_run_belongs_to_the_grant_it_was_started_with(value: str, key: str | None) -> None:
    with subprocess.Popen(["sleep", "60"], env={"TANGRAM_GRANT": value, "PATH": os.environ["PATH"]}) as child:
        wait_for(Path(f"/proc/{child.pid}/environ").read_bytes, 30)  # a moment later than there is a child
        assert host.grant_named(child.pid, Path("/state/grants")) == key
        child.kill()


def test_another_users_word_for_his_grant_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"], env=os.environ | {"TANGRAM_GRANT": "/state/grants/0a/grant"}) as child:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert host.grant_named(child.pid, Path("/state/grants")) is None
        child.kill()


STATE = """\
22 1 0:20 / / rw,relatime - overlay overlay rw
30 22 8:1 /var/lib/tangram /var/lib/tangram rw,relatime shared:1 - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("root", "device", "key"),
    [
        ("/var/lib/tangram/grants/0a", "8:1", "0a"),
        ("/tmp/grants/0a", "8:1", None),
        ("/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/t/grants/0a", "8:1", None),
        ("/var/lib/tangram/grants/0a", "0:51", None),
        ("/var/lib/tangram/grants/0a/b", "8:1", None),
        ("/var/lib/tangram/grants", "8:1", None),
        ("/var/lib/tangram/grants/0a//deleted", "8:1", None),
    ],
)
def test_a_folder_that_is_named_alike_is_nobodys_grant(
    monkeypatch: pytest.MonkeyPatch, root: str, device: str, key: str | None
) -> None:
    """As one makes it who is root in a user namespace of his own, to have his memory charged to another."""
    for at in GRANT_DIRS:
        theirs = f"{STATE}40 22 {device} {root} {at} ro,relatime - ext4 /dev/sda1 rw\n"
        monkeypatch.setattr(host, "_read", lambda pid, _, text=theirs: (STATE if pid == "self" else text).encode())
        assert host.grant_of(7, Path("/var/lib/tangram/grants")) == key


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(("made_in", "key"), [("state", "0a"), ("elsewhere", None)])
@pytest.mark.parametrize("at", GRANT_DIRS)
def test_a_mount_of_the_kernels_belongs_to_the_process_it_was_made_for(
    tmp_path: Path, at: str, made_in: str, key: str | None
) -> None:
    for folder in ("state", "elsewhere"):
        (tmp_path / folder / "grants" / "0a").mkdir(parents=True)
    command = with_grant(tmp_path / made_in / "grants/0a", at, "sh", "-c", "echo done && exec sleep 60")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        if child.stdout.readline() != "done\n":
            pytest.skip("mounts are not allowed here")
        assert host.grant_of(child.pid, tmp_path / "state" / "grants") == key
        child.kill()


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/var/lib/tangram/grants", ("8:1", "/var/lib/tangram/grants")),
        ("/var/lib/tangram", ("8:1", "/var/lib/tangram")),
        ("/var/lib/other", ("0:20", "/var/lib/other")),
        ("/", ("0:20", "")),
        ("/a b", ("0:20", "/a\\040b")),
    ],
)
def test_a_path_has_one_place_in_one_file_system(path: str, place: tuple[str, str]) -> None:
    assert host.place_of(STATE, path) == place
    assert host.place_of("", path) is None


@pytest.mark.parametrize(
    ("status", "user"), [("Name:\tx\nUid:\t1000\t0\t0\t0\nGid:\t5\n", 1000), ("Name:\tx\n", None), ("", None)]
)
def test_a_process_is_of_its_real_user(status: str, user: int | None) -> None:
    assert host.user_of(status) == user


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_that_runs_as_root_for_another_user_is_not_roots() -> None:
    """He chose its environment. Its folder in /proc is root's all the same."""
    with subprocess.Popen(
        ["setpriv", "--ruid", "1000", "cat"],
        env={"TANGRAM_GRANT": "/state/grants/0a/grant", "PATH": os.environ["PATH"]},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"it runs\n")
        child.stdin.flush()
        child.stdout.readline()
        assert Path(f"/proc/{child.pid}").stat().st_uid == 0
        assert host.grant_named(child.pid, Path("/state/grants")) is None
        child.kill()


def test_facts_of_a_process_that_is_gone_are_empty() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert (host.command_of(child.pid), host.started_at(child.pid), host.pid_inside(child.pid)) == ("", 0, 0)
    assert host.grant_of(child.pid, Path("/grants")) is None
    assert not host.runs(child.pid)
    assert not host.kill(child.pid, 1)


def test_only_the_very_process_that_was_meant_is_killed() -> None:
    child = subprocess.Popen(["sleep", "60"])
    started = host.started_at(child.pid)
    assert not host.kill(child.pid, started + 1), "the pid was given to another since"
    assert child.poll() is None
    assert host.kill(child.pid, started)
    assert child.wait(10) == -9


def test_a_stopped_process_answers_nothing() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert host.runs(child.pid)
    os.kill(child.pid, 19)
    wait_for(lambda: not host.runs(child.pid))
    child.kill()
    child.wait()


def test_a_name_with_a_bracket_in_it_does_not_confuse_the_reader(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1"
    program.write_bytes(Path("/bin/sleep").read_bytes())
    program.chmod(0o755)
    child = subprocess.Popen([program, "60"])
    wait_for(lambda: "60" in host.command_of(child.pid))
    assert host.started_at(child.pid) > 1000
    child.kill()
    child.wait()
