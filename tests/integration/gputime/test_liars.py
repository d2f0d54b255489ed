"""Programs that compute without a report: detected by the driver's own count, and limited to their grants all the same."""

from __future__ import annotations

import statistics

import pytest

from tests.integration.gputime.conftest import Node, until
from tests.integration.gputime.test_sharing import ran_percent

LC, BE = "latency-critical", "best-effort"


@pytest.fixture
def liar(node: Node):
    """A program whose launches go past the library, in a container with a cap; its channels are known."""
    made = node.run("liar", core=30)
    made.do("go_past_the_library()")
    return made


def test_a_container_that_computes_without_a_report_is_found_and_capped_and_no_other_is_accused(node: Node, liar):
    honest = {name: node.run(name, service_class) for name, service_class in (("a", "standard"), ("lc", LC))}
    liar.do("work_on(20_000)")
    honest["a"].do("work_on(5_000)")
    honest["lc"].start("requests(40, 20_000, 0.08)")
    until(lambda: node.gpu_time("liar").unreported, 20)
    assert not node.gpu_time("liar").working, "it still reports that it is idle"
    assert "does work that it does not report" in node.log()
    honest["lc"].finish()
    assert ran_percent(node, [liar], 3.0) < 34
    for name in honest:
        gpu_time = node.gpu_time(name)
        assert not gpu_time.unreported
        assert gpu_time.seen_s > 0, "the driver's count is of it, too"
    assert not node.misuses()


def test_unreported_work_comes_after_all_others(node: Node, liar):
    urgent = node.run("lc", LC)
    liar.do("work_on(100_000)")
    until(lambda: node.gpu_time("liar").unreported, 20)
    took = urgent.do("requests(40, 1000, 0.02)")
    assert statistics.median(took) < 6, "as beside an honest best-effort container"
    assert not node.gpu_time("lc").unreported


def test_a_container_that_reports_all_its_work_is_never_accused(node: Node):
    """Bursts, kernels in flight when a wait ends, a cap, work without a wait, several processes."""
    capped, bursts, grant = node.run("capped", core=20), node.run("bursts"), node.grant("many")
    many = [node.run_in(grant) for _ in range(3)]
    capped.do("work_on(30_000)")
    bursts.start("[launch(700_000, stream()) or __import__('time').sleep(1.4) for _ in range(5)]")
    for program in many:
        program.start("requests(600, 500, 0.01)")
    assert bursts.finish()
    for program in many:
        program.finish()
    for name in ("capped", "bursts", "many"):
        gpu_time = node.gpu_time(name)
        assert gpu_time.seen_s > 0.2
        assert not gpu_time.unreported
    assert "does work that it does not report" not in node.log()


def test_somebody_else_stopped_a_containers_channels_and_it_runs_again(node: Node):
    """As any process with access to the GPU can, on a stock driver."""
    victim = node.run("victim")
    victim.do("launch(30_000_000)")
    until(lambda: node.ran_us(victim) > 0)
    node.driver.ctl("disable", victim.process.pid)
    ran = node.ran_us(victim)
    until(lambda: not node.held(victim) and node.ran_us(victim) > ran)
    assert node.gpu_time("victim").watchdog_resumes >= 1


def test_somebody_else_stopped_the_channels_of_a_container_under_a_core_limit_and_it_runs_again(node: Node):
    """Its own share suspends it twenty times a second: that must not count as a sign of life."""
    victim = node.run("victim", core=20)
    victim.do("work_on(2000)")
    until(lambda: node.gpu_time("victim").suspends > 5)
    node.driver.ctl("disable", victim.process.pid)
    until(lambda: node.gpu_time("victim").watchdog_resumes >= 1)
    ran = node.ran_us(victim)
    until(lambda: node.ran_us(victim) > ran + 200_000)
    assert not node.misuses()
