"""The ends of waiting: which container is killed, stranded or only reported, and that the memory of all others is whole."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.swap.conftest import GPU, BurstNode, BurstProgram
from tests.integration.swap.polling import until
from tests.integration.swap.slow_processes import frozen, slow
from vgpu.protocol.status import SwapStatus

RECLAIM_S = "3"
POOL_MIB = 1024


def node_with(**env: str) -> Iterator[BurstNode]:
    made = BurstNode(POOL_MIB, **{f"TANGRAM_ARBITER_BURST_{name.upper()}": value for name, value in env.items()})
    yield made
    print(made.log())  # of a test that failed
    made.close()


@pytest.fixture
def impatient() -> Iterator[BurstNode]:
    """A node that gives a container a second to give way."""
    yield from node_with(reclaim_timeout_s=RECLAIM_S)


@pytest.fixture
def reporting() -> Iterator[BurstNode]:
    """The same, which kills nothing."""
    yield from node_with(reclaim_timeout_s=RECLAIM_S, over_limit="report")


@pytest.fixture
def stranding() -> Iterator[BurstNode]:
    """A node on which a container is stranded after a second."""
    yield from node_with(stranded_after_s="1")


def swap_of(node: BurstNode, name: str) -> SwapStatus:
    status = node.status(name)
    assert status is not None
    assert status.swap is not None
    return status.swap


def stop(program: BurstProgram) -> None:
    """All of its threads: the library cannot answer."""
    program.process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{program.process.pid}/task")
    until(lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()))


def alive(program: BurstProgram) -> bool:
    return program.process.poll() is None


def test_a_stopped_container_is_killed_for_a_neighbours_guarantee_and_nothing_else_is(impatient: BurstNode) -> None:
    hog, bystander = impatient.run("hog"), impatient.run("bystander", 50, 50)
    claimer = impatient.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    assert bystander.do("fill(20, 2)") == 0
    stop(hog)
    assert claimer.do("fill(500, 3)") == 0, "the hog is killed for it"
    until(lambda: not alive(hog))
    assert hog.process.returncode == -signal.SIGKILL
    (kill,) = impatient.document().kills
    assert (kill.uid, kill.pid, kill.whole) == ("uid-hog", hog.process.pid, True)
    assert "did not give way to another's guarantee" in kill.reason
    assert (kill.held_bytes >> 20, kill.limit_bytes >> 20) >= (700, 100)
    assert alive(bystander)
    assert [bystander.do("wrong()"), claimer.do("wrong()")] == [0, 0]
    again = impatient.run("hog2", 100, 900)
    assert again.do("fill(50, 4)") == 0
    assert impatient.misuses() == ""


def test_a_stopped_container_keeps_its_memory_where_only_anothers_excess_waits(impatient: BurstNode) -> None:
    hog, other = impatient.run("hog"), impatient.run("other", 100, 900)
    assert hog.do("fill(700, 1)") == 0
    stop(hog)
    other.send("fill(500, 2)")
    until(lambda: swap_of(impatient, "hog").unable)
    assert alive(hog)
    hog.process.send_signal(signal.SIGCONT)
    assert hog.do("wrong()") == 0
    assert other.answer("after it") in (0, 2)
    assert impatient.document().kills == ()
    assert alive(other)
    assert impatient.misuses() == ""


def test_a_container_that_does_not_give_way_is_only_reported_by_value(reporting: BurstNode) -> None:
    hog, claimer = reporting.run("hog"), reporting.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    stop(hog)
    claimer.send("fill(500, 3)")
    until(lambda: swap_of(reporting, "hog").over_limit)
    found = swap_of(reporting, "hog")
    assert found.over_limit_action == "report"
    assert "hog" in [one.key for one in reporting.document(brief=True).containers]
    assert alive(hog)
    hog.process.send_signal(signal.SIGCONT)
    assert claimer.answer("once it gives way") == 0
    until(lambda: not swap_of(reporting, "hog").over_limit)
    assert claimer.do("wrong()") == 0
    assert claimer.do("free_all()") is None
    assert hog.do("wrong()") == 0
    assert reporting.document().kills == ()


def test_an_endless_kernel_gives_way_and_is_not_killed(impatient: BurstNode) -> None:
    hog, claimer = impatient.run("hog"), impatient.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    hog.do("launch_endless()")
    assert claimer.do("fill(500, 3)") == 0
    assert claimer.do("wrong()") == 0
    assert swap_of(impatient, "hog").paused
    assert impatient.document().kills == ()
    assert alive(hog)
    claimer.end()
    until(lambda: not swap_of(impatient, "hog").paused)
    hog.do("end_endless()")
    assert hog.do("wrong()") == 0


def test_a_container_that_never_fits_is_stranded_and_is_not_killed(stranding: BurstNode) -> None:
    hog, claimer = stranding.run("hog"), stranding.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    assert claimer.do("fill(500, 3)") == 0
    assert swap_of(stranding, "hog").stranded == "", "it has no work: it waits for nothing"
    hog.send("wrong()")
    until(lambda: swap_of(stranding, "hog").stranded)
    found = swap_of(stranding, "hog")
    assert (found.stranded_action, found.paused, found.why) == ("evict", True, found.stranded)
    assert "hog" in [one.key for one in stranding.document(brief=True).containers]
    assert alive(hog)
    assert claimer.do("free_all()") is None
    assert hog.answer("once there is room") == 0
    until(lambda: not swap_of(stranding, "hog").stranded)
    assert stranding.document().kills == ()


def test_a_frozen_container_is_killed_for_a_neighbours_guarantee(impatient: BurstNode) -> None:
    hog, bystander = impatient.run("hog"), impatient.run("bystander", 50, 50)
    claimer = impatient.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    assert bystander.do("fill(20, 2)") == 0
    with frozen(hog.process.pid):
        claimer.send("fill(500, 3)")
        until(lambda: impatient.document().kills)
    until(lambda: not alive(hog))
    assert claimer.answer("after the kill") == 0
    assert [one.uid for one in impatient.document().kills] == ["uid-hog"]
    assert [bystander.do("wrong()"), claimer.do("wrong()")] == [0, 0]
    assert impatient.misuses() == ""


def test_a_container_with_50_millicores_gives_way_and_is_not_killed(node: BurstNode) -> None:
    hog, claimer = node.run("hog"), node.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    with slow(hog.process.pid):
        assert claimer.do("fill(500, 3)") == 0
        assert claimer.do("wrong()") == 0
    assert node.document().kills == ()
    assert alive(hog)
    assert claimer.do("free_all()") is None
    assert hog.do("wrong()") == 0


def test_a_kill_of_one_process_is_a_kill_of_its_container(impatient: BurstNode) -> None:
    """The other process of the container answers, and has no memory to give."""
    hog, claimer = impatient.run("hog"), impatient.run("claimer", 600, 600)
    sibling = impatient.join(hog)
    assert hog.do("fill(700, 1)") == 0
    assert sibling.do("fill(10, 4)") == 0
    stop(hog)
    assert claimer.do("fill(500, 3)") == 0
    until(lambda: not (alive(hog) or alive(sibling)))
    (kill,) = impatient.document().kills
    assert kill.pid == hog.process.pid, "the one with the most memory is named"
    assert claimer.do("wrong()") == 0


def test_metrics_count_swaps_pauses_and_kills(impatient: BurstNode) -> None:
    hog, claimer = impatient.run("hog"), impatient.run("claimer", 600, 600)
    assert hog.do("fill(700, 1)") == 0
    labels = 'container="main",namespace="default",pod="hog"'
    before = impatient.metrics()
    assert before[f'tangram_gpu_swap_ready{{gpu_uuid="{GPU}"}}'] == 1
    assert before["tangram_arbiter_swap_kills_total"] == 0
    assert before[f"tangram_container_paused_seconds_total{{{labels}}}"] == 0
    assert claimer.do("fill(500, 3)") == 0
    after = impatient.metrics()
    at_gpu = f'container="main",gpu_uuid="{GPU}",namespace="default",pod="hog"'
    assert after[f"tangram_container_gpu_memory_guaranteed_bytes{{{at_gpu}}}"] == 100 << 20
    assert after[f"tangram_container_gpu_memory_limit_bytes{{{at_gpu}}}"] == 900 << 20
    away_bytes = after[f"tangram_container_gpu_memory_away_bytes{{{at_gpu}}}"]
    assert away_bytes > 0
    assert after[f'tangram_gpu_swap_bytes_total{{direction="out",gpu_uuid="{GPU}"}}'] == away_bytes
    assert after['tangram_container_swaps_total{container="main",direction="out",namespace="default",pod="hog"}'] == 1
    assert after[f"tangram_container_paused_seconds_total{{{labels}}}"] > 0
    assert after[f"tangram_container_stranded{{{labels}}}"] == 0
    assert 0 < after[f'tangram_gpu_memory_container_capacity_bytes{{gpu_uuid="{GPU}"}}'] <= 1024 << 20
    assert claimer.do("free_all()") is None
    assert hog.do("wrong()") == 0
    back = impatient.metrics()
    assert back[f'tangram_gpu_swap_bytes_total{{direction="in",gpu_uuid="{GPU}"}}'] == away_bytes
    stop(hog)
    assert claimer.do("fill(500, 3)") == 0
    assert impatient.metrics()["tangram_arbiter_swap_kills_total"] == 1
