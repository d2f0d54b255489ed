"""bench/memory_swap/pairs.py: its programs run, check every cell and leave complete rows."""

from __future__ import annotations

import sys

import pytest

from bench.memory_swap import changes, job_pairs, no_pressure, pairs, serving
from bench.memory_swap.job_pairs import Case
from bench.memory_swap.session import Session
from bench.memory_swap.swap_node import Node, NoSwapping
from tests.gpu.kit import burst

SMALL = 64 * 2**20
needs_swapping = pytest.mark.skipif(not burst.served(), reason="the arbiter of this tree does not serve bursts yet")


def figure(session: Session, part: str, case: str, name: str) -> float:
    found = session.figures.value(part, case, name, 0)
    assert found is not None, session.figures.rows
    return found


@pytest.mark.parametrize("form", changes.FORMS[:2], ids=lambda form: form.name)
def test_containers_change_places_and_no_byte_is_wrong(
    session: Session, monkeypatch: pytest.MonkeyPatch, form: changes.Form
) -> None:
    monkeypatch.setattr(changes, "FORMS", (form,))
    changes.places(session)
    assert session.figures.done("places", form.name, 0), session.figures.rows
    assert figure(session, "places", form.name, "wrong bytes") == 0
    assert figure(session, "places", form.name, "changes") == changes.FAKE_CHANGES


@needs_swapping
def test_the_gpu_had_no_room_for_both(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "FORMS", changes.FORMS[:1])
    changes.places(session)
    name = changes.FORMS[0].name
    swaps, changed = (figure(session, "places", name, what) for what in ("swaps", "changes"))
    assert swaps >= changed, "each time that one computes, memory of the other leaves"


def test_both_work_all_the_time_and_no_byte_is_wrong(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "FAKE_QUANTA_S", 2.0)
    changes.quanta(session)
    name = changes.FORMS[0].name
    assert figure(session, "quanta", name, "wrong bytes") == 0
    assert figure(session, "quanta", name, "changes") > 0


def test_a_server_answers_alone_and_beside_both_neighbours(session: Session) -> None:
    serving.run(session)
    for name in ("alone", "neighbour idle", "neighbour works"):
        assert figure(session, "server", "16 GB", f"{name}: p99") > 0
    assert figure(session, "server", "16 GB", "wrong bytes") == 0
    assert figure(session, "server", "16 GB", "neighbour's steps") > 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A pair that is soon done, with the processor's part."""
    made = Case("small", SMALL * 64, 2.0, 1.0, gpu_part=0.5, phases=2)
    monkeypatch.setattr(job_pairs, "JOBS", (made,))
    monkeypatch.setattr(job_pairs, "NVSHARE", ())
    monkeypatch.setattr(job_pairs, "FAKE_SOLO_S", 0.5)
    return made


def test_a_pair_of_jobs_is_compared_with_one_after_the_other(session: Session, small: Case) -> None:
    job_pairs.jobs(session)
    alone = [figure(session, "jobs", "small", f"{which} alone") for which in ("first", "second")]
    assert figure(session, "jobs", "small", "both of one after the other") == pytest.approx(
        figure(session, "jobs", "small", "both") / sum(alone), rel=1e-3
    )
    assert figure(session, "jobs", "small", "wrong bytes") == 0


def test_a_pair_in_unified_memory_takes_its_baseline_from_an_earlier_command(session: Session, small: Case) -> None:
    job_pairs.jobs(session)
    job_pairs.uvm(session)
    assert session.figures.done("uvm", "small", 0)
    assert session.figures.value("uvm", "small", "first alone", 0) is None, "it was not measured again"


def test_a_pair_that_does_not_end_in_time_is_ended_and_its_row_says_so(
    session: Session, small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_pairs, "FAKE_UVM_STOP_S", 0.3)
    job_pairs.uvm(session)
    (row,) = [row for row in session.figures.rows if row["figure"] == "both"]
    assert row["note"] == "> 0: stopped"
    (row,) = [row for row in session.figures.rows if row["figure"] == "both of one after the other"]
    assert row["note"].startswith("> ")


def test_without_pressure_the_memory_of_a_container_that_may_burst_is_elastic(session: Session) -> None:
    no_pressure.run(session)
    assert figure(session, "idle", "steps of 16 GB", "elastic") == 100


def test_what_was_measured_is_not_measured_again(session: Session, small: Case) -> None:
    job_pairs.jobs(session)
    before = list(session.figures.rows)
    job_pairs.jobs(session)
    assert session.figures.rows == before


def test_what_needs_swapping_is_not_run_without_it(
    session: Session, small: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "served", lambda: False)
    monkeypatch.setattr(type(session.node), "need_swapping", Node.need_swapping)
    with pytest.raises(NoSwapping):
        session.node.need_swapping()
    job_pairs.jobs(session)
    (row,) = session.figures.rows
    assert (row["figure"], session.failed) == ("not run", 0)


def test_a_pair_that_this_gpu_cannot_have_is_reported(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_pairs, "JOBS", (Case("huge", 64 * 10**12, 1.0, 1.0),))
    job_pairs.jobs(session)
    (row,) = session.figures.rows
    assert "the pair needs" in row["note"]
    assert session.failed == 1


def test_the_command_runs_a_part_and_goes_on_where_it_ended(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pairs.csv"
    monkeypatch.setattr(sys, "argv", ["pairs.py", str(out), "--fake", "--only", "idle", "--repeat", "1"])
    assert pairs.main() == 0
    first = out.read_text()
    assert "steps of 16 GB" in first
    assert pairs.main() == 0
    assert out.read_text() == first
    assert "of 1" in capsys.readouterr().out
