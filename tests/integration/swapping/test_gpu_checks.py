"""The checks of tests/gpu on elastic memory, on the fake driver: what differs is known, and how much is elastic stands in the rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.built import shim_build
from tests.gpu import burst_differences, driver_answers, estate, leftovers, paths, peers
from tests.gpu.kit.machine import Machine, Watcher, machine
from tests.gpu.kit.results import Known, Results

PATHS = dict(paths.cases())
POOL_MIB = 128


@pytest.fixture(scope="module")
def here() -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch, machine(_fake(patch), POOL_MIB, burst_all=True) as made:
        made.start_arbiter()
        made.wait_for_nvml()
        yield made


def _fake(patch: pytest.MonkeyPatch) -> bool:
    patch.setenv("TANGRAM_SHIM_BUILD", str(shim_build()))
    return True


@pytest.fixture(scope="module")
def watch(here: Machine) -> Watcher:
    return here.watcher()


def seen(results: Results, check: str) -> list[str]:
    return [row.seen for row in results.rows if row.check == check]


@pytest.mark.parametrize(
    "name",
    ["sync", "async", "pool trimmed", "vmm", "context primary", "IPC in one container", "killed while it has all"],
)
def test_a_path_answers_on_elastic_memory_as_without_it_or_as_is_known(
    here: Machine, watch: Watcher, name: str
) -> None:
    results = Results(expected=burst_differences.EXPECTED)
    paths.run_case(here, watch, results, name, PATHS[name])
    assert results.failed() == []
    assert len(results.rows) > 1


def test_the_rows_have_how_much_was_elastic(here: Machine, watch: Watcher) -> None:
    results = Results(expected=burst_differences.EXPECTED)
    paths.run_case(here, watch, results, "sync", PATHS["sync"])
    elastic, counted = (
        seen(results, check) for check in (burst_differences.ELASTIC_ROW, burst_differences.COUNTED_ROW)
    )
    assert elastic == counted, "all memory of cuMemAlloc is elastic"
    burst_differences.sum_up(results, "paths")
    assert float(seen(results, f"{burst_differences.ELASTIC_ROW}, all rows together")[0]) > 2 * paths.LIMIT_MIB * 0.8


def test_only_the_difference_that_is_known_is_one() -> None:
    results = Results(expected={("p", "c", "check"): Known("answered 1$", "why")}, part="p", case="c")
    results.check("check", "yes", "it answered 1", ok=False)
    results.check("check", "yes", "it answered 2", ok=False)
    results.check("other", "yes", "it answered 1", ok=False)
    results.check("check", "yes", "yes")
    assert [row.ok for row in results.rows] == ["differs", "no", "no", "yes"]
    assert results.rows[0].seen == "it answered 1: why"


@pytest.mark.parametrize("name", driver_answers.CASES)
def test_the_driver_answers_as_the_page_has_it(here: Machine, name: str) -> None:
    results = Results()
    driver_answers.run_case(here, results, name)
    assert results.failed() == []
    assert sum(row.ok == "yes" for row in results.rows) > 5


def test_the_whole_gpu_is_read_for_what_another_process_left(here: Machine, watch: Watcher) -> None:
    results = Results()
    leftovers.run_case(here, watch, results, "the whole GPU by vmm, the writer is killed")
    assert results.failed() == []
    assert seen(results, "MiB of the GPU read") == ["512"]
    assert seen(results, "control: bytes of the word that its process finds") == [str(256 * 2**20)]


def test_memory_of_two_gpus_answers_as_the_drivers_also_after_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results()
    assert peers.run(_fake(monkeypatch), results, lambda: False) == 0
    assert {row.ok for row in results.rows} == {"yes", "fact"}
    assert len([row for row in results.rows if row.case == "after a swap" and row.ok == "yes"]) > 16


@pytest.mark.parametrize("name", [name for name in estate.CASES if name != "an XID of a program"])
def test_the_node_says_of_a_gpu_what_nvidia_smi_says(here: Machine, name: str) -> None:
    """The fake driver's nvidia-smi has no sensors, and it raises no XID for a program's mistake."""
    results = Results()
    estate.run_case(here, results, name)
    assert results.failed() == []
    assert len(results.rows) > 1
