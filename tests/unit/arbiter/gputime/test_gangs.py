"""A container with several GPUs is resumed on all of them together; while one of its GPUs hangs, the others serve other containers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.unit.arbiter.conftest import wait_for
from tests.unit.arbiter.gputime_kit import A, B, Container, Driver, GpuTimeNode
from vgpu.gputime.timing import Timing

C = "GPU-00000000-0000-0000-0000-00000000000c"


class Held:
    """The next suspends of these containers do not return before `go_on`."""

    def __init__(self, driver: Driver, *of: Container) -> None:
        self.go_on, self._clients = threading.Event(), {one.client for one in of}
        self.reached = threading.Semaphore(0)
        driver.before = self._before

    def _before(self, client: int, disable: bool) -> None:
        if disable and client in self._clients and not self.go_on.is_set():
            self.reached.release()
            self.go_on.wait(120)

    def hangs(self) -> bool:
        return self.reached.acquire(timeout=30)


@pytest.fixture
def node(driver: Driver, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[GpuTimeNode]:
    """Its threads wake for what they are to do, and for no heartbeat."""
    for period in ("BEAT_S", "REST_S"):
        monkeypatch.setattr(f"arbiter.gputime.suspend_thread.{period}", 600.0)
    frame_s = getattr(request, "param", 0.05)
    made = GpuTimeNode(settings=Timing(frame_s=frame_s, starve_after_s=600), watchdog_s=0)
    yield made
    if driver.before is not None:
        driver.before.__self__.go_on.set()  # type: ignore[attr-defined]
    assert not made.failed.is_set(), "a GPU's thread failed"
    made.close()
    assert not made.failed.is_set(), "a GPU's thread failed at the end"
    assert driver.owed() == 0, "every container runs after the end"


class Gang:
    """A standard container on several GPUs, with a client for each."""

    def __init__(self, node: GpuTimeNode, driver: Driver, gpus: tuple[str, ...] = (A, B), name: str = "gang") -> None:
        self.process = node.container(name, gpus=gpus, channels=False)
        self._driver = driver
        self.clients = tuple(self.process.client + 1000 * (gpu + 1) for gpu in range(len(gpus)))
        for gpu, client in enumerate(self.clients):
            self.process.reports_channels(gpu=gpu, client=client)

    def off(self) -> list[bool]:
        """By GPU."""
        return [self._driver.off(self.process, client) for client in self.clients]

    def frees(self, *gpus: int) -> None:
        """Its channels there are gone, with their disables."""
        for gpu in gpus:
            self._driver.enables_its_own(self.clients[gpu])

    def resumes(self, gpu: int) -> int:
        return list(self._driver.calls).count((self.clients[gpu], False))


@pytest.fixture
def shared(node: GpuTimeNode, driver: Driver) -> tuple[Gang, Container, Container]:
    """A gang that is suspended for a latency-critical container on A, so that a best-effort one runs on B."""
    gang = Gang(node, driver)
    other, urgent = node.container("other", "best-effort", gpus=(B,)), node.container("lc", "latency-critical")
    gang.process.works()
    other.works()
    wait_for(lambda: driver.off(other))
    urgent.works()
    wait_for(lambda: gang.off() == [True, True] and not driver.off(other))
    wait_for(lambda: node.status("other").on and not node.status("gang").on)
    return gang, other, urgent


@pytest.fixture
def background(node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container]) -> Container:
    """A best-effort container on A, which waits for the latency-critical one."""
    made = node.container("background", "best-effort")
    made.works()
    wait_for(lambda: driver.off(made))
    return made


@pytest.mark.parametrize("node", [600.0], indirect=True, ids=["no slice ends"])
def test_no_gpu_resumes_a_gang_before_its_other_gpu_is_free(
    node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container]
) -> None:
    gang, other, urgent = shared
    before, held = gang.resumes(0), Held(driver, other)
    urgent.idles()
    assert held.hangs()
    assert node.read("lc")
    assert node.is_quiet()
    assert gang.off() == [True, True]
    assert gang.resumes(0) == before
    held.go_on.set()
    wait_for(lambda: gang.off() == [False, False] and driver.off(other))


def test_while_a_gpu_of_a_gang_hangs_its_other_gpu_serves_others(
    node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container], background: Container
) -> None:
    gang, other, urgent = shared
    held = Held(driver, other)
    urgent.idles()
    assert held.hangs()
    wait_for(lambda: not driver.off(background), 30)
    assert gang.off() == [True, True]
    held.go_on.set()
    wait_for(lambda: gang.off() == [False, False] and driver.off(background), 30)
    wait_for(lambda: node.status("gang").on)


def test_a_gang_that_runs_on_one_gpu_while_its_other_hangs_is_suspended_there(
    node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container], background: Container
) -> None:
    """Its resume does not return on B. Its kernel on A would spin for as long as B hangs."""
    gang, _, urgent = shared
    go_on, hung = threading.Event(), threading.Event()

    def before(client: int, disable: bool) -> None:
        if (client, disable) == (gang.clients[1], False):
            hung.set()
            go_on.wait(120)

    driver.before = before
    try:
        urgent.idles()
        assert hung.wait(30)
        wait_for(lambda: gang.off() == [False, True], 30)
        wait_for(lambda: gang.off() == [True, True] and not driver.off(background), 30)
    finally:
        go_on.set()
    driver.before = None
    wait_for(lambda: gang.off() == [False, False] and driver.off(background), 30)


def test_a_gang_that_lost_the_gpu_that_hangs_runs_on_the_other(
    node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container]
) -> None:
    gang, other, urgent = shared
    held = Held(driver, other)
    urgent.idles()
    assert held.hangs()
    wait_for(lambda: "gang" in node.scheduler._due._hung, 30)
    gang.process.reports_channels((), gpu=1, client=gang.clients[1])
    gang.frees(1)
    wait_for(lambda: not gang.off()[0], 30)
    held.go_on.set()


def test_a_gang_that_dies_while_it_waits_for_a_gpu_leaves_both_to_others(
    node: GpuTimeNode, driver: Driver, shared: tuple[Gang, Container, Container], background: Container
) -> None:
    gang, other, urgent = shared
    held = Held(driver, other)
    urgent.idles()
    assert held.hangs()
    gang.process.close()
    gang.frees(0, 1)
    held.go_on.set()
    wait_for(lambda: not driver.off(background) and not driver.off(other))


def test_gangs_that_overlap_in_a_ring_all_get_their_turns(driver: Driver) -> None:
    node = GpuTimeNode(settings=Timing(frame_s=0.01, quantum_least_s=0.002))
    rings = [Gang(node, driver, gpus, f"gang {at}") for at, gpus in enumerate([(A, B), (B, C), (C, A)])]
    for gang in rings:
        gang.process.works()
    turns = [gang.resumes(0) for gang in rings]
    wait_for(lambda: all(gang.resumes(0) >= before + 5 for gang, before in zip(rings, turns, strict=True)), 60)
    node.close()
    assert not node.failed.is_set()
    assert driver.owed() == 0


def test_a_switch_shows_progress_after_each_channel_group(node: GpuTimeNode, driver: Driver) -> None:
    """A neighbour with hundreds of groups on a GPU of a gang must not look like a GPU that does not answer."""
    one = node.container("many")
    for client in range(1, 4):
        one.reports_channels(client=one.client + 1000 * client)
    wait_for(lambda: node.channel_groups("many") == 4 and node.scheduler.containers["many"].is_on(A))
    assert node.is_quiet()
    of, progress = node.scheduler.containers["many"], list[int]()
    before = len(driver.calls)
    for on in (False, True):
        of.switch(A, on, lambda: progress.append(len(driver.calls) - before))
    assert len(progress) == 8
    assert progress == sorted(set(progress)), "a call of the driver before each"
