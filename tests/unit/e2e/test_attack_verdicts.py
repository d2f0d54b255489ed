"""The judges of tests/e2e/attacks fail when the product is broken: each is given what a broken one would leave, and what a good one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.attacks import verdict
from tests.e2e.attacks.attack import LIMIT_MIB, Attack, Outcome
from tests.e2e.attacks.table import FAMILIES
from tests.e2e.attacks.verdict import Neighbour, Reported

ROWS = [attack for family in FAMILIES.values() for attack in family]
LOG = "100.000 tried: it\n101.500 allocated 960 MiB\n"


def fails(judge: Callable[[], object], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        judge()


def test_an_attack_acted_when_it_logs_its_memory_or_a_refusal() -> None:
    assert verdict.acted(LOG) == (101.5, 960)
    assert verdict.acted(LOG + "102.000 refused: cuInit answers 2\n") == (102.0, 0)
    assert verdict.acted("Traceback (most recent call last):\nallocated 960 MiB\n") is None, (
        "a script that broke is no attack"
    )


def test_an_attack_that_did_not_happen_is_not_harmless() -> None:
    verdict.happened("tried: it", LOG)
    fails(lambda: verdict.happened("tried: dlmopen: done", LOG), "the attack did not happen")


@pytest.mark.parametrize(
    ("prints", "answer", "why"),
    [
        ("is privileged", "Error from server (InternalError): context deadline exceeded", "not for 'is privileged'"),
        ("is privileged", "Unable to connect to the server: EOF", "not for 'is privileged'"),
        ("", "Unable to connect to the server: EOF", "may be any failure"),
    ],
    ids=["the webhook hangs", "no API server", "the row expects no sentence"],
)
def test_a_failure_is_a_refusal_only_by_its_reason(prints: str, answer: str, why: str) -> None:
    verdict.refused(
        "is privileged", 'admission webhook "pods.tangram.sh" denied the request: container main is privileged'
    )
    fails(lambda: verdict.refused(prints, answer), why)


def test_who_was_refused_has_nothing() -> None:
    verdict.nothing_held(0)
    fails(lambda: verdict.nothing_held(64), "64 MiB by the driver's records")


@pytest.mark.parametrize(
    ("booked", "claimed", "why"),
    [
        (2048, 2048, "2048 MiB by the driver's records"),
        (LIMIT_MIB + 1, 0, "at most 1024"),
        (0, 960, "show 0 MiB of the 960"),
    ],
    ids=["no limit", "more than it logged", "records that do not see it"],
)
def test_harmless_is_an_attacker_within_the_limit_by_records_that_see_it(booked: int, claimed: int, why: str) -> None:
    verdict.harmless(LIMIT_MIB, 960)
    verdict.harmless(0, 0)
    fails(lambda: verdict.harmless(booked, claimed), why)


ROW = 'tangram_container_unenforced{container="a",namespace="n",pod="p",reason="over-limit"} 1.0\n'
LABELS = {"container": "a", "namespace": "n", "pod": "p", "reason": "over-limit"}


@pytest.mark.parametrize(
    "metrics",
    [
        "",
        ROW.replace(" 1.0", " 0.0"),
        ROW.replace('reason="over-limit"', 'reason="unconnected"'),
        ROW.replace('container="a"', 'container="b"'),
        f"# {ROW}",
        ROW.replace("unenforced{", "unenforced_total{"),
    ],
)
def test_a_report_has_a_row_of_its_own_container_and_reason(metrics: str) -> None:
    verdict.metric_row(f"x 1\n{ROW}", LABELS)
    fails(lambda: verdict.metric_row(metrics, LABELS), "no row has")


OVER = Reported(103, "OverMemoryLimit", "container a uses 2048 MiB of GPU-1 and was granted 1024 MiB; policy report")
THREAD = Reported(104, "LimitNotEnforced", "the limit of gpu-time of container a is not enforced (no-thread): ...")


def test_a_report_has_an_event_that_names_its_reason() -> None:
    assert verdict.report_of("over-limit", [replace(OVER, at_s=110), OVER]) == OVER
    assert verdict.report_of("no-thread", [OVER, THREAD]) == THREAD
    assert verdict.report_of("no-thread", [OVER]) is None, "another reason"
    assert verdict.report_of("over-limit", [THREAD]) is None
    assert verdict.report_of("over-limit", []) is None


def test_a_report_comes_within_5_s() -> None:
    verdict.reported(100, replace(OVER, at_s=105))
    fails(lambda: verdict.reported(100, replace(OVER, at_s=105.2)), "5.2 s after")


KILLED = {"exitCode": 137, "reason": "Error"}


@pytest.mark.parametrize(
    ("ended", "at_s", "why"),
    [
        ({"exitCode": 0, "reason": "Completed"}, 105, "exitCode"),
        ({"exitCode": 1, "reason": "Error"}, 105, "exitCode"),
        ({"exitCode": 137, "reason": "OOMKilled"}, 105, "OOMKilled"),
        (KILLED, 112, "killed 12.0 s after"),
    ],
    ids=["it ended by itself", "it broke", "the kernel killed it", "late"],
)
def test_killed_is_an_attacker_that_the_arbiter_ends_in_time(ended: dict[str, object], at_s: float, why: str) -> None:
    verdict.killed(100, KILLED, 110)
    fails(lambda: verdict.killed(100, ended, at_s), why)


def test_a_kill_is_reported_by_the_event_of_a_bypass() -> None:
    reported = Reported(
        104, "LimitBypassed", "container a held ...: process 7 (raw) went around the library and was killed"
    )
    assert verdict.kill_reported([OVER, reported])
    assert not verdict.kill_reported([replace(reported, reason="OverMemoryLimit")]), "the guard's policy killed it"
    assert not verdict.kill_reported(
        [replace(reported, note="goes around the library; arbiter.bypass: it is reported")]
    )
    assert not verdict.kill_reported([])


GOOD = Neighbour(
    "neighbour-0",
    "90.0 allocated 6144 MiB\n101.0 calls 19 slowest_ms 3.2\n118.5 calls 20 slowest_ms 999.0\n",
    0,
    6144,
    120,
)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (replace(GOOD, log=GOOD.log + "119.0 refused: cuMemAlloc_v2 answers 2\n"), "refused"),
        (replace(GOOD, restarts=1), "restarted 1 times"),
        (replace(GOOD, booked_mib=6080), "has 6080 MiB"),
        (replace(GOOD, log=GOOD.log + "119.0 calls 1 slowest_ms 1000.1\n"), "took 1000 ms"),
        (replace(GOOD, now_s=130), "logged nothing for 12 s"),
        (replace(GOOD, log="90.0 allocated 6144 MiB\n"), "logged nothing for 20 s"),
    ],
    ids=[
        "a call fails",
        "it was restarted",
        "it lost memory",
        "a call was slow",
        "a call hangs",
        "it hung from the start",
    ],
)
def test_a_neighbour_that_noticed_anything_was_disturbed(seen: Neighbour, why: str) -> None:
    verdict.undisturbed(GOOD, 6144, 100)
    verdict.undisturbed(
        replace(GOOD, log=GOOD.log.replace("90.0 allocated", "95.0 calls 1 slowest_ms 5000.0\n96.0 allocated")),
        6144,
        100,
    )
    fails(lambda: verdict.undisturbed(seen, 6144, 100), why)


@pytest.mark.parametrize("attack", [one for one in ROWS if not one.test], ids=lambda one: one.name)
def test_each_row_has_what_the_judge_needs(attack: Attack) -> None:
    """A refusal its sentence, a report its reason. A pod that allocates memory logs how much, which `acted` waits for."""
    if attack.outcome is Outcome.REFUSED:
        assert attack.prints
    if attack.outcome is Outcome.REPORTED:
        assert attack.reason
    assert bool(attack.script) != (attack.act is not None) or attack.pod is not None
