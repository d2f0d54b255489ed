"""Threads, locks and the end of an arbiter's turns: nobody is left stopped, and no lock is taken in the wrong order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from arbiter.gputime.gpu_thread import LATE_S
from arbiter.gputime.metrics import families
from arbiter.gputime.scheduler import Turns
from arbiter.server import Server
from arbiter.status import status_of
from tests.unit.arbiter.conftest import a_grant, wait_for
from tests.unit.arbiter.turns_kit import A, Driver, TurnsNode
from vgpu.api.codec import grant_to_text
from vgpu.gputime.events import from_lines, to_lines
from vgpu.gputime.scheduler import Share
from vgpu.protocol import wire
from vgpu.protocol.wire import Activity, What


@pytest.fixture
def node(driver: Driver) -> Iterator[TurnsNode]:
    made = TurnsNode()
    yield made
    made.close()
    assert driver.owed() == 0, "everybody runs after the end"


@pytest.fixture
def stopped(node: TurnsNode, driver: Driver):
    """One who is stopped, and who it is for."""
    background, urgent = node.container("be", "best-effort"), node.container("lc", "latency-critical")
    background.works()
    urgent.works()
    wait_for(lambda: driver.off(background))
    return background, urgent


def test_the_end_starts_everybody_and_closes_every_descriptor(node: TurnsNode, driver: Driver, stopped):
    node.turns.close()
    assert driver.owed() == 0
    assert node.device_descriptors() == 1, "the test's own"
    node.turns = Turns(node.failed.set)


def test_the_end_starts_also_who_was_dropped_and_whose_hang_up_nobody_has_seen(
    node: TurnsNode, driver: Driver, stopped, monkeypatch: pytest.MonkeyPatch
):
    background, _ = stopped
    monkeypatch.setattr(node.turns.gpu_threads.of(A), "_ready", lambda *_: None)
    node.drop("be")
    assert driver.off(background)
    node.turns.close()
    assert driver.owed() == 0
    assert node.device_descriptors() == 1, "the test's own"
    node.turns = Turns(node.failed.set)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_starts_everybody_and_ends_the_arbiter(
    node: TurnsNode, driver: Driver, stopped, monkeypatch
):
    _, urgent = stopped

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Share, "decide", broken)
    urgent.send(Activity(What.IDLE))
    assert node.failed.wait(5)
    assert driver.owed() == 0
    monkeypatch.undo()
    monkeypatch.setattr("arbiter.gputime.channels.fcntl.ioctl", driver.ioctl)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_is_stopped_any_more_by_another_thread_after_one_failed(node: TurnsNode, driver: Driver, stopped):
    node.turns.fail()
    assert driver.owed() == 0
    stopped[1].idles()
    stopped[1].works()
    assert node.is_quiet() or node.failed.is_set()
    assert driver.owed() == 0


def test_after_a_gap_who_went_on_by_himself_is_stopped_anew(node: TurnsNode, driver: Driver, stopped):
    background, _ = stopped
    driver.goes_on_by_itself(background)  # as nobody showed that he lives
    gpu_thread = node.turns.gpu_threads.all()[0]
    with node.turns.lock:
        gpu_thread._beat_due_s -= LATE_S + 1
        gpu_thread.request_again(0.0)
    wait_for(lambda: driver.off(background), 0.5)  # before a slice against starvation would do the same
    assert driver.owed() == 2, "both of its channels, once"


def test_a_page_that_is_closed_with_its_grant_is_not_written_any_more(node: TurnsNode, driver: Driver):
    """The page goes when the server drops the grant; the threads here learn of the hang-up later."""
    for round_ in range(30):
        container = node.container(f"t{round_}", "best-effort")
        container.works()
        node.drop(f"t{round_}")
        for gpu_thread in node.turns.gpu_threads.all():
            with node.turns.lock:
                gpu_thread._beat_due_s -= 1
                gpu_thread.request_again(0.0)
    assert node.is_quiet()
    assert not node.failed.is_set()


class OrderedLock:
    """A lock that may not be requested by who holds `inner`."""

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


def test_who_holds_the_lock_of_turns_never_requests_for_the_servers(driver: Driver, tmp_path, monkeypatch):
    """Status requests both, the server's first. The other way round, two threads would wait for each other."""
    folder = tmp_path / "g"
    turns = Turns(lambda: server.stop())
    inner = OrderedLock()
    turns.lock = inner  # type: ignore[assignment]
    server = Server(folder, turns=turns)
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
            sock.send(wire.encode(1, wire.Hello(1, wire.FOR_TURNS, "test")))
            assert isinstance(wire.decode(sock.recv(8192))[1], wire.Welcome)
            sock.send(wire.encode(1, Activity(What.WORK)))
            status_of(server)
    (folder / "k/grant").unlink()
    (folder / "k/arbiter.sock").unlink()
    (folder / "k").rmdir()
    wait_for(lambda: not server.containers)
    server.stop()
    thread.join(10)
    turns.close()
    assert not outer.breaches


def test_stop_may_be_called_again_while_it_ends_and_after(tmp_path):
    server = Server(tmp_path)
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


def test_what_happened_can_be_replayed(node: TurnsNode, driver: Driver, stopped):
    background, urgent = stopped
    urgent.idles()
    wait_for(lambda: not driver.off(background))
    with node.turns.lock:
        recorded = list(node.turns.trace)
        now = node.turns.share._now_s
        decision = node.turns.share.decide(now)
    share = Share()
    for event in from_lines(to_lines(recorded)):
        share.apply(event)
    assert share.decide(now).on == decision.on
    for name in ("be", "lc"):
        again, was = share.usage(name), node.turns.share.usage(name)
        assert again.suspends == was.suspends
        assert again.on_s == pytest.approx(was.on_s, abs=0.05)


def test_descriptors_of_the_threads_are_closed(driver: Driver):
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    made = TurnsNode()
    made.container("a")
    wait_for(lambda: made.channel_groups("a"))
    made.close()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_metrics_report_what_each_container_got(node: TurnsNode, driver: Driver, stopped):
    grants = {name: node.turns.containers[name].grant for name in ("be", "lc")}
    wait_for(lambda: node.status("be").off_s > 0.01)
    samples = {
        (sample.name, sample.labels.get("pod"), sample.labels.get("mode")): sample.value
        for family in families(node.turns, grants)
        for sample in family.samples
    }
    assert samples["tangram_arbiter_turns_off_seconds_total", "be", None] > 0.01
    assert samples["tangram_arbiter_turns_on_seconds_total", "lc", None] > 0.01
    assert samples["tangram_arbiter_turns_capped_seconds_total", "be", None] == 0
    assert samples["tangram_arbiter_suspends_total", "be", None] == 1
    assert samples["tangram_arbiter_turns_running", "be", None] == 0
    assert samples["tangram_arbiter_turns_working", "be", None] == 1
    assert samples["tangram_arbiter_turns_trouble", "be", None] == 0
    assert samples["tangram_arbiter_turns_mode", "be", "suspend"] == 1
    assert samples["tangram_arbiter_turns_mode", "be", "gate"] == 0
    assert samples["tangram_arbiter_switches_total", None, None] >= 3


def test_metrics_of_a_node_without_turns_are_there_and_empty():
    names = {family.name for family in families(None, {})}
    assert {"tangram_arbiter_turns_on_seconds", "tangram_arbiter_turns_mode", "tangram_arbiter_switches"} <= names
