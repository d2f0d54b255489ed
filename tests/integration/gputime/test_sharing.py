"""Which container runs on a GPU when: real processes, a real arbiter, channels that are really suspended (of the kernel driver's double)."""

from __future__ import annotations

import signal
import statistics
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from deviceplugin.grants.grant_directories import GrantDirectories, Record
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.service_class import ServiceClassUpdater
from tests.builders import pod
from tests.integration.gputime.conftest import GPUS, Node, until
from tests.signals import send_signal
from vgpu.api.codec import assignment_to_json
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.names import DEFAULT

LC, BE = "latency-critical", "best-effort"
LONG_REQUEST_US = 800_000
"""Less than the second after which a waiting container gets a slice."""


def shares(node: Node, seconds: float, *names: str) -> list[float]:
    """Percent of the time that each container was on, of the time in which it had work."""
    before = [node.gpu_time(name) for name in names]
    time.sleep(seconds)  # what is measured is what happens in this time
    after = [node.gpu_time(name) for name in names]
    got = []
    for then, now in zip(before, after, strict=True):
        worked = (now.on_s + now.off_s + now.capped_s) - (then.on_s + then.off_s + then.capped_s)
        assert worked > seconds * 0.5, "it had work"
        got.append((now.on_s - then.on_s) / worked * 100)
    return got


def ran_percent(node: Node, programs, seconds: float) -> float:
    """Percent of a GPU's time that processes had together, as the GPU counts it."""
    ran, began = sum(node.ran_us(program) for program in programs), time.monotonic()
    time.sleep(seconds)
    return (sum(node.ran_us(program) for program in programs) - ran) / (time.monotonic() - began) / 1e4


def test_a_busy_best_effort_container_is_stopped_in_mid_kernel_for_a_request(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("work_on(300_000)")
    until(lambda: node.ran_us(background) > 100_000)
    took = urgent.do("requests(40, 1000, 0.02)")
    assert statistics.median(took) < 6, (
        "a request beside 300 ms kernels, which half of the GPU would make 2 ms and more"
    )
    assert not node.misuses()
    until(lambda: not node.held(background), 2)
    before = node.ran_us(background)
    until(lambda: node.ran_us(background) > before, 2)


def test_while_the_request_runs_the_other_one_does_not(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("work_on(100_000)")
    urgent.do(f"launch({LONG_REQUEST_US})")
    until(lambda: node.held(background))
    looks: list[tuple[int, int]] = []

    def is_over() -> bool:
        looks.append(node.ran_both_us(background, urgent))
        return looks[-1][1] >= LONG_REQUEST_US

    until(is_over)
    meanwhile = [ran for ran, of_request in looks if of_request < LONG_REQUEST_US]
    assert len(meanwhile) >= 2, "looked at while the request ran"
    assert meanwhile[-1] - meanwhile[0] < 30_000, "what it had before it was stopped"
    until(lambda: node.ran_us(background) > meanwhile[-1])


@pytest.mark.parametrize("core", [20, 60])
def test_a_cap_is_enforced_for_kernels_that_fill_the_gpu(node, core):
    one = node.run("a", core=core)
    one.do("work_on(20_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 2.0, "a") == [pytest.approx(core, abs=3)]
    assert ran_percent(node, [one], 2.0) < core + 3
    assert not node.misuses()


def test_caps_of_two_containers_hold_side_by_side(node):
    one, other = node.run("a", core=25), node.run("b", core=50)
    one.do("work_on(5_000)")
    other.do("work_on(40_000)")
    until(lambda: node.ran_us(one) > 20_000 and node.ran_us(other) > 20_000)
    few, many = shares(node, 3.0, "a", "b")
    assert 15 < few < 28, "less than asked when the machine is busy: each switch waits for a processor"
    assert 25 < many < 53
    assert ran_percent(node, [one, other], 2.0) < 80


def test_all_processes_of_a_container_count_together(node):
    grant = node.grant("a", core=40)
    programs = [node.run_in(grant) for _ in range(3)]
    for program in programs:
        program.do("work_on(10_000)")
    until(lambda: all(node.ran_us(program) > 5_000 for program in programs))
    assert ran_percent(node, programs, 2.0) < 46


def test_a_container_that_is_alone_and_uncapped_is_never_suspended(node):
    one = node.run("a")
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 50_000)
    assert shares(node, 1.0, "a") == [100]
    assert node.gpu_time("a").suspends == 0


def test_an_announced_request_finds_the_gpu_cleared(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("work_on(100_000)")
    urgent.start("requests(1, 1000, 0.0, hint_us=400_000)")
    assert urgent.finish()[0] < 50
    urgent.start("requests(30, 1000, 0.01, hint_us=3000)")
    took = urgent.finish()
    assert statistics.median(took) < 4
    assert not node.misuses()


def test_a_change_of_class_takes_effect_while_it_runs(node):
    one, other = node.run("a", BE), node.run("b")
    one.do("work_on(20_000)")
    other.do("work_on(20_000)")
    until(lambda: node.held(one))
    node.grant("a", LC)
    assert until(lambda: node.held(other), 2) < 2
    assert not node.held(one)


def test_an_edit_of_a_running_pods_annotation_takes_effect_within_two_seconds(node):
    record = Record(("x",), "", "default", "a", "main", GPUS[:1], 0.0)
    record = msgspec.structs.replace(record, uid=f"uid-{record.key}")
    one, other = node.run(record.key, BE), node.run("b")
    one.do("work_on(20_000)")
    other.do("work_on(20_000)")
    until(lambda: node.held(one))
    grants, pods = GrantDirectories(node.folder, Path("none")), NodePods(DEFAULT, 1024, ("default",))
    grants.update(record)
    class_updater = ServiceClassUpdater(pods, grants, lambda: None)
    text = assignment_to_json(Assignment({"main": (AssignedGpu(GPUS[0], 0, 1024),)}, service_class=BE))
    placed = replace(pod("a").asking(mib=1024).on("n1").assigned(text=text), uid=record.uid)
    pods.on_change(None, placed.build())
    class_updater.once()
    assert node.held(one)
    pods.on_change(placed.build(), placed.annotated(**{"class": LC}).build())
    began = time.monotonic()
    class_updater.once()
    until(lambda: node.held(other) and not node.held(one), 2)
    assert time.monotonic() - began < 2


def test_the_end_of_work_is_detected_without_a_wait(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("work_on(20_000)")
    urgent.do("launch(1000, stream())")
    until(lambda: node.held(background), 2)
    assert until(lambda: not node.held(background), 2) < 1


def test_a_program_with_more_channels_than_a_list_takes_is_gated_and_runs_on(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("contexts(9)")
    background.do("work_on(20_000)")
    until(lambda: node.gpu_time("be").mode == "gate")
    urgent.do("launch(1_500_000)")
    until(lambda: not node.gpu_time("be").on or node.gpu_time("lc").working)
    ran = node.ran_us(background)
    assert urgent.do("wait()") < 3.5, "its own second and a half, and what was in flight"
    assert node.ran_us(background) - ran < 300_000, "its new work waited"
    until(lambda: node.ran_us(background) > ran + 300_000, 5)
    assert node.gpu_time("be").suspends == 0
    assert node.log().count("cannot be suspended") == 1
    assert "bad packet" not in node.log()
    assert not node.misuses()


# -- faults -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def suspended(node):
    """A container that is suspended with work, and the one for which it is suspended."""
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("work_on(20_000)")
    urgent.do("launch(30_000_000)")
    until(lambda: node.held(background))
    return background, urgent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_container_stays_suspended_for_a_second_when_the_arbiter_dies_or_stops(node, suspended, number):
    background, _ = suspended
    send_signal(node.arbiter.pid, number)
    ran = node.ran_us(background)
    assert until(lambda: node.ran_us(background) > ran, 3) < 1.2
    assert not node.misuses()


def test_a_fresh_arbiter_takes_over(node, suspended):
    background, urgent = suspended
    node.arbiter.kill()
    node.arbiter.wait()
    (node.folder / "status.sock").unlink()
    until(lambda: not node.held(background))
    node.start_arbiter()
    until(lambda: node.held(background), 5)
    urgent.end()
    until(lambda: not node.held(background), 2)


def test_an_arbiter_that_was_stopped_takes_hold_again(node, suspended):
    background, _ = suspended
    send_signal(node.arbiter.pid, signal.SIGSTOP)
    until(lambda: not node.held(background), 3)
    node.arbiter.send_signal(signal.SIGCONT)
    until(lambda: node.held(background), 3)


@pytest.mark.parametrize("victim", ["be", "lc"])
def test_a_killed_container_leaves_the_gpu_to_the_other(node, suspended, victim):
    background, urgent = suspended
    dies, lives = (background, urgent) if victim == "be" else (urgent, background)
    dies.end()
    ran = node.ran_us(lives)
    until(lambda: node.ran_us(lives) > ran and not node.held(lives), 3)
    assert not node.misuses()


def test_a_stopped_container_can_be_suspended_and_resumed(node):
    background, urgent = node.run("be", BE), node.run("lc", LC)
    background.do("launch(60_000_000)")
    background.send(signal.SIGSTOP)
    urgent.do("launch(200_000)")
    until(lambda: node.held(background), 2)
    urgent.do("wait()")
    until(lambda: not node.held(background), 2)
    background.send(signal.SIGCONT)
    assert not node.misuses()


def test_a_forked_child_is_a_process_of_its_own(node):
    one = node.run("a", core=50)
    one.do("launch(10_000) or wait()")
    assert one.do("__import__('os').system('true')") == 0
    one.do("work_on(10_000)")
    until(lambda: node.ran_us(one) > 100_000)
    assert shares(node, 1.5, "a") == [pytest.approx(50, abs=4)]
