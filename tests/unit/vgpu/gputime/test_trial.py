"""What follows from a trial's verdict, and its document."""

from __future__ import annotations

import pytest

from vgpu.api.enforcement import GATED_POINTS, Reason
from vgpu.api.errors import BadDocument
from vgpu.gputime.trial import (
    Outcome,
    Suspending,
    Trials,
    Tried,
    Verdict,
    suspending,
    trials_from_text,
    trials_to_text,
    verdict_from_text,
    verdict_to_text,
)

WORKS = Verdict(Outcome.WORKS, before=200, after=190, suspend_us=512.5, resume_us=420.0)


def trials(*outcomes: Outcome, boot_id: str = "b", driver: str = "580.1") -> Trials:
    """The first outcome is of GPU-0, the second of GPU-1."""
    tried = (Tried(f"model {n}", (f"GPU-{n}",), Verdict(outcome, "why")) for n, outcome in enumerate(outcomes))
    return Trials(boot_id=boot_id, driver=driver, tried=tuple(tried))


def reason(of: Trials | None, *uuids: str, known: bool, driver: str = "580.1") -> Reason | None:
    return suspending(of, uuids or ("GPU-0",), boot_id="b", driver=driver, known=known).reason


@pytest.mark.parametrize(
    ("outcome", "on_known", "on_unknown"),
    [
        (Outcome.WORKS, None, None),
        (Outcome.NO_SUSPEND, Reason.NO_SUSPEND, Reason.NO_SUSPEND),
        (Outcome.HUNG, Reason.NO_SUSPEND, Reason.NO_SUSPEND),
        (Outcome.CANNOT_RUN, None, Reason.UNKNOWN_DRIVER),
    ],
)
def test_each_outcome_on_known_and_unknown_drivers(
    outcome: Outcome, on_known: Reason | None, on_unknown: Reason | None
) -> None:
    assert reason(trials(outcome), known=True) == on_known
    assert reason(trials(outcome), known=False) == on_unknown


def test_only_a_trial_that_works_has_nothing_to_say() -> None:
    for outcome in Outcome:
        found = suspending(trials(outcome), ["GPU-0"], boot_id="b", driver="580.1", known=True)
        assert (found == Suspending()) is (outcome is Outcome.WORKS)
        assert bool(found.why) is (outcome is not Outcome.WORKS)


@pytest.mark.parametrize(
    "of",
    [
        None,
        trials(),
        trials(Outcome.WORKS, boot_id="earlier"),
        trials(Outcome.WORKS, driver="580.2"),
        trials(Outcome.WORKS),
    ],
    ids=["no file", "no verdict", "another boot", "another driver", "another GPU"],
)
def test_a_verdict_on_something_else_is_none(of: Trials | None) -> None:
    assert reason(of, "GPU-7", known=False) is Reason.UNKNOWN_DRIVER
    known = suspending(of, ["GPU-7"], boot_id="b", driver="580.1", known=True)
    assert known.reason is None
    assert "not tried" in known.why


def test_a_failure_of_another_boot_does_not_count() -> None:
    assert reason(trials(Outcome.HUNG, boot_id="earlier"), known=True) is None


def test_of_several_gpus_the_worst_decides() -> None:
    both = trials(Outcome.WORKS, Outcome.HUNG)
    assert reason(both, "GPU-0", "GPU-1", known=True) is Reason.NO_SUSPEND
    assert reason(both, "GPU-1", "GPU-0", known=True) is Reason.NO_SUSPEND
    untried = trials(Outcome.WORKS, Outcome.CANNOT_RUN)
    assert "not tried" in suspending(untried, ["GPU-0", "GPU-1"], boot_id="b", driver="580.1", known=True).why


def test_how_exact_gating_is_goes_with_a_denied_suspend_of_one_gpu() -> None:
    both = trials(Outcome.HUNG, Outcome.HUNG, driver="580.1")

    def points(*uuids: str, of: Trials = both) -> float | None:
        return suspending(of, uuids, boot_id="b", driver="580.1", known=True).gating_points

    assert points("GPU-0") == GATED_POINTS[580]
    assert points("GPU-0", "GPU-1") is None
    assert points("GPU-0", of=trials(Outcome.WORKS, driver="580.1")) is None


def test_documents_come_back_as_they_were() -> None:
    assert verdict_from_text(verdict_to_text(WORKS)) == WORKS
    of = Trials(boot_id="b", driver="d", tried=(Tried("NVIDIA H200", ("GPU-0", "GPU-1"), WORKS),))
    assert trials_from_text(trials_to_text(of)) == of
    assert (of.of_model("NVIDIA H200"), of.of_model("x"), of.of_gpu("GPU-1")) == (WORKS, None, WORKS)


@pytest.mark.parametrize("text", ["", "[]", '{"outcome":"perhaps"}', '{"v":2}', b"\xff", '{"v":1,"tried":[{}]}'])
def test_a_document_that_is_not_understood_is_no_verdict(text: str | bytes) -> None:
    with pytest.raises(BadDocument):
        trials_from_text(text if text != "" else b"")
    if b'"v"' not in (text.encode() if isinstance(text, str) else text):
        with pytest.raises(BadDocument):
            verdict_from_text(text)
