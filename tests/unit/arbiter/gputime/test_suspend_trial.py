"""The verdict of a trial depends on the count, whatever the driver returns."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arbiter.gputime import suspend_trial
from arbiter.gputime.channels import ChannelGroup
from vgpu.gputime.trial_verdict import TrialOutcome
from vgpu.protocol.messages import Channels


class Gpu:
    """A kernel that counts each time it is looked at, and a driver in front of it."""

    def __init__(self) -> None:
        self.counts, self.suspended = 0, False
        self.refuses: dict[str, int] = {}
        self.deaf = False
        """It answers that it suspends, and does not."""
        self.leaks = False
        """A suspended kernel counts on."""
        self.lost = False
        """A resumed kernel does not go on."""

    def count(self) -> int:
        self.counts += not self.suspended or self.leaks
        return self.counts

    def suspend(self) -> int:
        self.suspended = not self.deaf and "suspend" not in self.refuses
        return self.refuses.get("suspend", 0)

    def resume(self) -> int:
        self.suspended = self.lost and self.suspended
        return self.refuses.get("resume", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(suspend_trial, "STILL_S", 0.001)
    monkeypatch.setattr(suspend_trial, "MOVES_S", 0.05)
    made = Gpu()
    monkeypatch.setattr(ChannelGroup, "suspend", lambda _: made.suspend())
    monkeypatch.setattr(ChannelGroup, "resume", lambda _: made.resume())
    return made


@pytest.fixture
def channel_group() -> Iterator[ChannelGroup]:
    made = ChannelGroup(Channels(0, 1, 2, (3,), (), fresh=True), os.memfd_create("device"))
    yield made
    made.close()


def test_a_driver_that_suspends(gpu: Gpu, channel_group: ChannelGroup) -> None:
    found = suspend_trial.attempt(gpu.count, channel_group)
    assert found.outcome is TrialOutcome.WORKS
    assert found.before > 0
    assert (found.during, found.after > 0) == (0, True)


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (lambda g: setattr(g, "deaf", True), "counted"),
        (lambda g: setattr(g, "leaks", True), "counted"),
        (lambda g: setattr(g, "lost", True), "does not go on"),
        (lambda g: g.refuses.update(suspend=0x56), "0x56 to a suspend"),
        (lambda g: g.refuses.update(resume=0x1F), "0x1f to a resume"),
    ],
)
def test_a_driver_that_does_not(
    gpu: Gpu, channel_group: ChannelGroup, breaks: Callable[[Gpu], None], reason: str
) -> None:
    breaks(gpu)
    with pytest.raises(suspend_trial.NoSuspend, match=reason):
        suspend_trial.attempt(gpu.count, channel_group)


def test_a_kernel_that_never_counted_is_no_evidence_on_the_driver(gpu: Gpu, channel_group: ChannelGroup) -> None:
    gpu.suspended = True
    with pytest.raises(suspend_trial.TrialCannotRun):
        suspend_trial.attempt(gpu.count, channel_group)


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_program_that_is_not_there_ends_or_stays_silent_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspend_trial, "START_S", 0.2)
    for program, reason in (
        (tmp_path / "none", "cannot be started"),
        (script(tmp_path / "ends", "exit 3"), "ended with status 3"),
        (script(tmp_path / "silent", "exec sleep 60"), "not started its kernel"),
    ):
        found = suspend_trial.run(program)
        assert (found.outcome, reason in found.why) == (TrialOutcome.CANNOT_RUN, True), found
