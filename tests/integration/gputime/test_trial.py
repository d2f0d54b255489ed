"""The trial of suspends on the fake driver: from its start by the device plugin to the effect of the verdict on an arbiter."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvml.trials import Trier
from tests.built import REPOSITORY, fake_build, shim_build
from tests.fake import FakeDriver, start_fake_driver
from tests.integration.gputime.conftest import GPUS, Node, until
from tests.unit.deviceplugin.builders import inventory
from vgpu.api.inventory import Inventory
from vgpu.gputime.trial_verdict import (
    FILE,
    ModelVerdict,
    TrialOutcome,
    Trials,
    TrialVerdict,
    trials_from_text,
    trials_to_text,
)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """In the environment of this process, as a node's driver is there for a device plugin."""
    made = start_fake_driver(f"gpu h200 uuid={GPUS[0]} context_mib=0\n", tmp_path)
    for name, value in made.env(LD_PRELOAD=str(fake_build() / "libfake-kernel.so")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    yield made
    made.stop()


def gpus() -> Inventory:
    """One GPU, which the fake driver has too, and one of another model of which no share may be allocated."""
    one, other = inventory(2).gpus
    return replace(inventory(2), gpus=(replace(one, uuid=GPUS[0]), replace(other, model="other", healthy=False)))


def trier(state: Path, program: Path, **options: Any) -> Trier:
    """Where the loader finds the driver's library."""
    return Trier(state, program, Path("/nowhere"), report=lambda *_: None, **options)


def verdicts(trier: Trier, state: Path, of: Inventory | None = None) -> Trials:
    asyncio.run(trier.try_out(of or gpus()))
    return trials_from_text((state / FILE).read_bytes())


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_new_pods_do_not_get_keeps_the_verdict_of_its_model(tmp_path: Path) -> None:
    """Pods still run on it, and the arbiter reads whether it may suspend them."""
    one, other = inventory(2).gpus
    both = replace(inventory(2), gpus=(replace(one, uuid=GPUS[0]), replace(other, model=one.model)))
    program = shim_build() / "tangram-trial"
    assert verdicts(trier(tmp_path, program), tmp_path, both).uuids_of(one.model) == (GPUS[0], other.uuid)
    fewer = verdicts(trier(tmp_path, program), tmp_path, replace(both, gpus=both.gpus[1:]))
    assert set(fewer.uuids_of(one.model)) == {GPUS[0], other.uuid}
    assert fewer.of_gpu(GPUS[0]) == fewer.of_gpu(other.uuid)


@pytest.mark.usefixtures("driver")
def test_a_driver_that_suspends_is_found_to_once_a_boot(tmp_path: Path) -> None:
    trials = verdicts(trier(tmp_path, shim_build() / "tangram-trial"), tmp_path)
    (tried,) = trials.tried
    assert tried.uuids == (GPUS[0],)
    assert tried.verdict.outcome is TrialOutcome.WORKS, tried.verdict.why
    assert (tried.verdict.before > 0, tried.verdict.during, tried.verdict.after > 0) == (True, 0, True)
    again = verdicts(trier(tmp_path, Path("/nowhere/program")), tmp_path)
    assert again == trials, "a verdict stands until the next boot"
    (tmp_path / FILE).write_text(trials_to_text(Trials(boot_id="earlier", driver=trials.driver, tried=trials.tried)))
    anew = verdicts(trier(tmp_path, Path("/nowhere/program")), tmp_path)
    assert anew.tried[0].verdict.outcome is TrialOutcome.CANNOT_RUN, "one of an earlier boot does not"


def test_a_process_that_the_driver_does_not_let_suspend_is_no_success(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")  # the driver's kernel side is not there: no channels are seen
    (tried,) = verdicts(trier(tmp_path, shim_build() / "tangram-trial"), tmp_path).tried
    assert tried.verdict.outcome is TrialOutcome.CANNOT_RUN
    assert "no compute channels" in tried.verdict.why


def test_a_trial_that_hangs_is_killed_with_all_it_started_and_that_is_the_verdict(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    program = tmp_path / "hangs"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}\nexec sleep 600\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tried,) = verdicts(trier(tmp_path, program, limit_s=3.0), tmp_path).tried
    assert tried.verdict.outcome is TrialOutcome.HUNG
    until(lambda: not Path(f"/proc/{int(pid.read_text())}").exists())


def test_a_trial_that_could_not_run_is_made_again_by_the_next_start_alone(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = tmp_path / "counts"
    program.write_text(f"#!/bin/sh\necho x >> {seen}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    one = trier(tmp_path, program)
    for _ in range(2):
        assert verdicts(one, tmp_path).tried[0].verdict.outcome is TrialOutcome.CANNOT_RUN
    assert seen.read_text() == "x\n"
    verdicts(trier(tmp_path, program, again=False), tmp_path)
    assert seen.read_text() == "x\n"
    verdicts(trier(tmp_path, program), tmp_path)
    assert seen.read_text() == "x\nx\n"


@pytest.mark.parametrize("outcome", [TrialOutcome.HUNG, TrialOutcome.CANNOT_RUN])
def test_an_arbiter_suspends_by_the_verdict(node: Node, outcome: TrialOutcome) -> None:
    tried = ModelVerdict("NVIDIA H200", (GPUS[0],), TrialVerdict(outcome, "set by this test"))
    node.has_tried(tried)
    background, urgent = node.run("be", "best-effort"), node.run("lc", "latency-critical")
    background.do("work_on(2000)")
    gpu_time = node.gpu_time("be")
    assert gpu_time is not None
    assert gpu_time.mode == ("gate" if outcome is TrialOutcome.HUNG else "suspend")
    assert "set by this test" in gpu_time.trouble
    urgent.start("requests(50, 2000, 0.002)")
    if outcome is TrialOutcome.HUNG:
        assert not any(node.held(background) for _ in range(50))
    else:
        until(lambda: node.held(background))
    urgent.finish()
    background.do("stop()")
    assert node.misuses() == ""
