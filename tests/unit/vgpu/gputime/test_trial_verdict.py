"""What follows from a trial's verdict, and its document."""

from __future__ import annotations

import pytest

from vgpu.api.enforcement import GATED_POINTS, Reason
from vgpu.api.errors import BadDocument
from vgpu.gputime.trial_verdict import (
    ModelVerdict,
    Suspendability,
    TrialOutcome,
    Trials,
    TrialVerdict,
    suspendability,
    trials_from_text,
    trials_to_text,
    verdict_from_text,
    verdict_to_text,
)

WORKS = TrialVerdict(TrialOutcome.WORKS, before=200, after=190, suspend_us=512.5, resume_us=420.0)


def trials(*outcomes: TrialOutcome, boot_id: str = "b", driver: str = "580.1") -> Trials:
    """The first outcome is of GPU-0, the second of GPU-1."""
    tried = (
        ModelVerdict(f"model {n}", (f"GPU-{n}",), TrialVerdict(outcome, "why")) for n, outcome in enumerate(outcomes)
    )
    return Trials(boot_id=boot_id, driver=driver, tried=tuple(tried))


def reason(of: Trials | None, *uuids: str, known: bool, driver: str = "580.1") -> Reason | None:
    return suspendability(of, uuids or ("GPU-0",), boot_id="b", driver=driver, known=known).reason


@pytest.mark.parametrize(
    ("outcome", "on_known", "on_unknown"),
    [
        (TrialOutcome.WORKS, None, None),
        (TrialOutcome.NO_SUSPEND, Reason.NO_SUSPEND, Reason.NO_SUSPEND),
        (TrialOutcome.HUNG, Reason.NO_SUSPEND, Reason.NO_SUSPEND),
        (TrialOutcome.CANNOT_RUN, None, Reason.UNKNOWN_DRIVER),
    ],
)
def test_each_outcome_on_known_and_unknown_drivers(
    outcome: TrialOutcome, on_known: Reason | None, on_unknown: Reason | None
) -> None:
    assert reason(trials(outcome), known=True) == on_known
    assert reason(trials(outcome), known=False) == on_unknown


def test_only_a_successful_trial_has_an_empty_reason() -> None:
    for outcome in TrialOutcome:
        found = suspendability(trials(outcome), ["GPU-0"], boot_id="b", driver="580.1", known=True)
        assert (found == Suspendability()) is (outcome is TrialOutcome.WORKS)
        assert bool(found.why) is (outcome is not TrialOutcome.WORKS)


@pytest.mark.parametrize(
    "of",
    [
        None,
        trials(),
        trials(TrialOutcome.WORKS, boot_id="earlier"),
        trials(TrialOutcome.WORKS, driver="580.2"),
        trials(TrialOutcome.WORKS),
    ],
    ids=["no file", "no verdict", "another boot", "another driver", "another GPU"],
)
def test_a_verdict_on_something_else_is_none(of: Trials | None) -> None:
    assert reason(of, "GPU-7", known=False) is Reason.UNKNOWN_DRIVER
    known = suspendability(of, ["GPU-7"], boot_id="b", driver="580.1", known=True)
    assert known.reason is None
    assert "not tried" in known.why


def test_a_failure_of_another_boot_does_not_count() -> None:
    assert reason(trials(TrialOutcome.HUNG, boot_id="earlier"), known=True) is None


def test_of_several_gpus_the_worst_decides() -> None:
    both = trials(TrialOutcome.WORKS, TrialOutcome.HUNG)
    assert reason(both, "GPU-0", "GPU-1", known=True) is Reason.NO_SUSPEND
    assert reason(both, "GPU-1", "GPU-0", known=True) is Reason.NO_SUSPEND
    untried = trials(TrialOutcome.WORKS, TrialOutcome.CANNOT_RUN)
    assert "not tried" in suspendability(untried, ["GPU-0", "GPU-1"], boot_id="b", driver="580.1", known=True).why


def test_how_exact_gating_is_goes_with_a_denied_suspend_of_one_gpu() -> None:
    both = trials(TrialOutcome.HUNG, TrialOutcome.HUNG, driver="580.1")

    def points(*uuids: str, of: Trials = both) -> float | None:
        return suspendability(of, uuids, boot_id="b", driver="580.1", known=True).gating_points

    assert points("GPU-0") == GATED_POINTS[580]
    assert points("GPU-0", "GPU-1") is None
    assert points("GPU-0", of=trials(TrialOutcome.WORKS, driver="580.1")) is None


def test_documents_come_back_as_they_were() -> None:
    assert verdict_from_text(verdict_to_text(WORKS)) == WORKS
    of = Trials(boot_id="b", driver="d", tried=(ModelVerdict("NVIDIA H200", ("GPU-0", "GPU-1"), WORKS),))
    assert trials_from_text(trials_to_text(of)) == of
    assert (of.of_model("NVIDIA H200"), of.of_model("x"), of.of_gpu("GPU-1")) == (WORKS, None, WORKS)


@pytest.mark.parametrize("text", ["", "[]", '{"outcome":"perhaps"}', '{"v":2}', b"\xff", '{"v":1,"tried":[{}]}'])
def test_a_document_that_is_not_understood_is_no_verdict(text: str | bytes) -> None:
    with pytest.raises(BadDocument):
        trials_from_text(text if text != "" else b"")
    if b'"v"' not in (text.encode() if isinstance(text, str) else text):
        with pytest.raises(BadDocument):
            verdict_from_text(text)
