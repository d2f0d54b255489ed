"""Threads, locks and the end of an arbiter's scheduler: no container is left suspended, and no lock is taken in the wrong order."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from arbiter.gputime.metrics import families
from arbiter.gputime.node_scheduler import NodeScheduler
from arbiter.gputime.suspend_thread import LATE_S
from arbiter.server import ArbiterServer
from arbiter.status import status_of
from tests.unit.arbiter.conftest import a_grant, open_files, wait_for
from tests.unit.arbiter.gputime_kit import A, Driver, GpuTimeNode
from vgpu.api.codec import grant_to_text
from vgpu.gputime.events import from_lines, to_lines
from vgpu.gputime.scheduler import GpuTimeScheduler
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, ActivityKind


@pytest.fixture
def node(driver: Driver) -> Iterator[GpuTimeNode]:
    made = GpuTimeNode()
    yield made
    made.close()
    assert driver.owed() == 0, "every container runs after the end"


@pytest.fixture
def stopped(node: GpuTimeNode, driver: Driver):
    """A suspended container, and the container for which it is suspended."""
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    return background, urgent


def test_the_end_resumes_every_container_and_closes_every_descriptor(node: GpuTimeNode, driver: Driver, stopped):
    node.scheduler.close()
    assert driver.owed() == 0
    assert node.device_descriptors() == 1, "the test's own"
    node.scheduler = NodeScheduler(node.failed.set)


def test_the_end_resumes_also_a_dropped_container_whose_hang_up_was_not_read_yet(
    node: GpuTimeNode, driver: Driver, stopped, monkeypatch: pytest.MonkeyPatch
):
    background, _ = stopped
    monkeypatch.setattr(node.scheduler.suspend_threads.of(A), "_ready", lambda *_: None)
    node.drop("be")
    assert driver.off(background)
    node.scheduler.close()
    assert driver.owed() == 0
    assert node.device_descriptors() == 1, "the test's own"
    node.scheduler = NodeScheduler(node.failed.set)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_resumes_every_container_and_ends_the_arbiter(
    node: GpuTimeNode, driver: Driver, stopped, monkeypatch
):
    _, urgent = stopped

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(GpuTimeScheduler, "decide", broken)
    urgent.send(Activity(ActivityKind.IDLE))
    assert node.failed.wait(5)
    assert driver.owed() == 0
    monkeypatch.undo()
    monkeypatch.setattr("arbiter.gputime.channels.fcntl.ioctl", driver.ioctl)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_other_thread_suspends_a_container_after_one_failed(node: GpuTimeNode, driver: Driver, stopped):
    node.scheduler.fail()
    assert driver.owed() == 0
    stopped[1].idles()
    stopped[1].works()
    assert node.is_quiet() or node.failed.is_set()
    assert driver.owed() == 0


def test_after_a_gap_a_container_that_resumed_itself_is_suspended_anew(node: GpuTimeNode, driver: Driver, stopped):
    background, _ = stopped
    driver.goes_on_by_itself(background)  # because the heartbeat had stopped
    suspend_thread = node.scheduler.suspend_threads.all()[0]
    with node.scheduler.lock:
        suspend_thread._beat_due_s -= LATE_S + 1
        suspend_thread.wake_at(0.0)
    wait_for(lambda: driver.off(background), 0.5)  # before a slice against starvation would do the same
    assert driver.owed() == 2, "both of its channels, once"


def test_a_page_that_is_closed_with_its_grant_is_not_written_any_more(node: GpuTimeNode, driver: Driver):
    """The page goes when the server drops the grant; the threads here learn of the hang-up later."""
    for round_ in range(30):
        container = node.container(f"t{round_}", "best-effort")
        container.works()
        node.drop(f"t{round_}")
        for suspend_thread in node.scheduler.suspend_threads.all():
            with node.scheduler.lock:
                suspend_thread._beat_due_s -= 1
                suspend_thread.wake_at(0.0)
    assert node.is_quiet()
    assert not node.failed.is_set()


class OrderedLock:
    """A lock that a thread with `inner` may not take."""

    def __init__(self, inner: OrderedLock | None = None) -> None:
        self._lock, self._inner, self._owner = threading.Lock(), inner, 0
        self.breaches: list[str] = []

    def __enter__(self) -> None:
        if self._inner is not None and self._inner._owner == threading.get_ident():
            self.breaches.append(threading.current_thread().name)
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


def test_a_thread_with_the_schedulers_lock_never_takes_the_servers(driver: Driver, tmp_path, monkeypatch):
    """Status requests both, the server's first. The other way round, two threads would wait for each other."""
    folder = tmp_path / "g"
    scheduler = NodeScheduler(lambda: server.stop())
    inner = OrderedLock()
    scheduler.lock = inner  # type: ignore[assignment]
    server = ArbiterServer(folder, scheduler=scheduler)
    outer = OrderedLock(inner)
    server.lock = outer  # type: ignore[assignment]
    thread = threading.Thread(target=server.run)
    thread.start()
    (folder / "k").mkdir()
    (folder / "k/grant").write_text(grant_to_text(a_grant()))
    wait_for((folder / "k/arbiter.sock").exists)
    import socket

    for _ in range(20):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5)
            sock.connect(str(folder / "k/arbiter.sock"))
            sock.send(wire.encode(1, wire.Hello(1, wire.FOR_GPU_TIME, "test")))
            assert isinstance(wire.decode(sock.recv(8192))[1], wire.Welcome)
            sock.send(wire.encode(1, Activity(ActivityKind.WORK)))
            status_of(server)
    (folder / "k/grant").unlink()
    (folder / "k/arbiter.sock").unlink()
    (folder / "k").rmdir()
    wait_for(lambda: not server.containers)
    server.stop()
    thread.join(10)
    scheduler.close()
    assert not outer.breaches


def test_stop_may_be_called_again_while_it_ends_and_after(tmp_path):
    server = ArbiterServer(tmp_path)
    server.stop()
    server.run()
    server.stop()
    server.stop()


def test_a_second_sigterm_does_not_disturb_the_end(tmp_path):
    options = ["--grants-dir", str(tmp_path / "g"), "--metrics-host", "127.0.0.1", "--metrics-port", "0"]
    program = subprocess.Popen([sys.executable, "-m", "arbiter", *options], stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "status.sock").exists, 10)
    until = time.monotonic() + 10
    while program.poll() is None and time.monotonic() < until:
        program.send_signal(signal.SIGTERM)
        threading.Event().wait(0.002)
    _, log = program.communicate(timeout=10)
    assert "Bad file descriptor" not in log
    assert "Traceback" not in log
    assert program.returncode in (0, -signal.SIGTERM), "the last one may come when Python has ended its handlers"


def test_what_happened_can_be_replayed(node: GpuTimeNode, driver: Driver, stopped):
    background, urgent = stopped
    urgent.idles()
    wait_for(lambda: not driver.off(background))
    with node.scheduler.lock:
        recorded = list(node.scheduler.trace)
        now = node.scheduler.policy._now_s
        decision = node.scheduler.policy.decide(now)
    policy = GpuTimeScheduler()
    for event in from_lines(to_lines(recorded)):
        policy.apply(event)
    assert policy.decide(now).on == decision.on
    for name in ("be", "lc"):
        again, was = policy.usage(name), node.scheduler.policy.usage(name)
        assert again.suspends == was.suspends
        assert again.on_s == pytest.approx(was.on_s, abs=0.05)


def test_descriptors_of_the_threads_are_closed(driver: Driver):
    before = open_files()
    made = GpuTimeNode()
    made.container("a")
    wait_for(lambda: made.channel_groups("a"))
    made.close()
    assert open_files() <= before


def test_metrics_report_what_each_container_got(node: GpuTimeNode, driver: Driver, stopped):
    grants = {name: node.scheduler.containers[name].grant for name in ("be", "lc")}
    wait_for(lambda: node.status("be").off_s > 0.01)
    samples = {
        (sample.name, sample.labels.get("pod"), sample.labels.get("mode")): sample.value
        for family in families(node.scheduler, grants)
        for sample in family.samples
    }
    assert samples["tangram_container_gpu_time_waiting_seconds_total", "be", None] > 0.01
    assert samples["tangram_container_gpu_time_running_seconds_total", "lc", None] > 0.01
    assert samples["tangram_container_gpu_time_throttled_seconds_total", "be", None] == 0
    assert samples["tangram_container_suspends_total", "be", None] == 1
    assert samples["tangram_container_gpu_time_allowed", "be", None] == 0
    assert samples["tangram_container_gpu_work_queued", "be", None] == 1
    assert samples["tangram_container_suspend_blocked", "be", None] == 0
    assert samples["tangram_container_suspend_mode", "be", "suspend"] == 1
    assert samples["tangram_container_suspend_mode", "be", "gate"] == 0
    assert samples["tangram_arbiter_switches_total", None, None] >= 3


def test_metrics_of_a_node_without_gpu_time_are_there_and_empty():
    names = {family.name for family in families(None, {})}
    assert {
        "tangram_container_gpu_time_running_seconds",
        "tangram_container_suspend_mode",
        "tangram_arbiter_switches",
    } <= names
