"""The Event that reports that a request fits a node's GPUs together and no single one."""

from __future__ import annotations

import pytest

from extender.fit_report import AGAIN_S, AT_ONCE, NOTED, REASON, SETTLE_S
from tests.builders import PodBuilder, gpu, pod, share
from tests.unit.extender.extender_parts import FULL_MIB, HALF_MIB, ExtenderParts

Reported = list[tuple[str, str, str]]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ExtenderParts:
    """Two GPUs, each half used by a pod that may not be evicted."""
    made = ExtenderParts(n1=2)
    for row in (0, 1):
        made.report(pod(f"v{row}").asking(mib=HALF_MIB, core=10).on("n1").assigned(share(gpu(row), HALF_MIB, 10)))
    made.reported = []  # type: ignore[attr-defined]
    monkeypatch.setattr(
        made.preemption.recorder,
        "event",
        lambda about, reason, note, *_, **__: made.reported.append((about.name, reason, note)),  # type: ignore[attr-defined]
    )
    return made


def reported(parts: ExtenderParts) -> Reported:
    return parts.reported  # type: ignore[attr-defined,no-any-return]


def refused_by_filter(parts: ExtenderParts, built: PodBuilder) -> None:
    parts.report(built)
    assert parts.filter(built, "n1").node_names == []


def later(parts: ExtenderParts, seconds: float = SETTLE_S) -> None:
    parts.now_s += seconds
    parts.preemption.expire()


def test_a_pod_that_the_sum_would_take_is_shown_what_there_is(parts: ExtenderParts) -> None:
    refused_by_filter(parts, pod("a").asking(mib=HALF_MIB + 1024, core=20))
    later(parts)
    assert reported(parts) == [
        (
            "a",
            REASON,
            "Fits the sum of node n1, no single GPU: 2 GPUs have 81920 MiB and 180 % gpu-core free together, "
            "the best of them 40960 MiB and 90 %; the pod requests 41984 MiB and 20 % gpu-core of one GPU",
        )
    ]


def test_a_pod_that_no_sum_would_take_is_not(parts: ExtenderParts) -> None:
    for row in (0, 1):
        parts.report(pod(f"w{row}").asking(mib=HALF_MIB).on("n1").assigned(share(gpu(row), HALF_MIB)))
    refused_by_filter(parts, pod("a").asking(mib=HALF_MIB))
    later(parts)
    assert reported(parts) == []


def test_it_is_reported_once_in_a_while_and_not_at_every_try(parts: ExtenderParts) -> None:
    for _ in range(3):
        refused_by_filter(parts, pod("a").asking(mib=FULL_MIB))
        later(parts)
    assert len(reported(parts)) == 1
    later(parts, AGAIN_S)
    refused_by_filter(parts, pod("a").asking(mib=FULL_MIB))
    later(parts)
    assert len(reported(parts)) == 2


@pytest.mark.parametrize("change", ["bound", "gone", "placed"])
def test_a_pod_that_needs_no_reporting_any_more_gets_none(parts: ExtenderParts, change: str) -> None:
    asking = pod("a").asking(mib=FULL_MIB)
    refused_by_filter(parts, asking)
    if change == "bound":
        parts.report(pod("a").asking(mib=FULL_MIB).on("n2").assigned(share(gpu(0, node="n2"), FULL_MIB)))
    elif change == "gone":
        parts.end("a")
    else:
        parts.end("v0")
        assert parts.filter(asking, "n1").node_names == ["n1"]
    later(parts)
    assert reported(parts) == []


def test_a_pod_for_which_others_are_evicted_is_not_reported(parts: ExtenderParts) -> None:
    urgent = pod("a").asking(mib=FULL_MIB).of_priority(1000)
    refused_by_filter(parts, urgent)
    assert list(parts.preempt(urgent, n1=["v0"]).nodes) == ["n1"]
    later(parts)
    assert reported(parts) == []


def test_of_many_few_are_noted_and_reported_at_a_time(parts: ExtenderParts) -> None:
    for at in range(NOTED + 5):
        refused_by_filter(parts, pod(f"p{at}").asking(mib=FULL_MIB))
    later(parts)
    assert len(reported(parts)) == AT_ONCE
    for _ in range(NOTED):
        later(parts, 1.0)
    assert len({name for name, _, _ in reported(parts)}) == NOTED
