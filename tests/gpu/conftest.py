"""One GPU with an arbiter and a watcher for the tests of this folder: the machine's own, or the fake driver where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gpu.kit.machine import Machine, Watcher, machine
from tests.gpu.kit.results import Results


@pytest.fixture(scope="session")
def here() -> Iterator[Machine]:
    with machine() as made:
        made.start_arbiter()
        yield made


@pytest.fixture(scope="session")
def watch(here: Machine) -> Watcher:
    return here.watcher()


@pytest.fixture(scope="session")
def all_results() -> Iterator[list[Results]]:
    """Every test's rows. TANGRAM_GPU_CSV names a file that they are written to."""
    kept: list[Results] = []
    yield kept
    if "TANGRAM_GPU_CSV" in os.environ:
        whole = Results.at(Path(os.environ["TANGRAM_GPU_CSV"]))
        for results in kept:
            whole.extend(results)


@pytest.fixture
def results(all_results: list[Results]) -> Results:
    all_results.append(Results())
    return all_results[-1]


@pytest.fixture
def judge() -> Callable[[Results], None]:
    """No row may be `no`; a case that could not be run here is a skip with the reason."""

    def judged(results: Results) -> None:
        assert not results.failed(), "\n".join(
            f"{row.check}: wanted {row.wanted}, seen {row.seen}" for row in results.failed()
        )
        missing = [row for row in results.rows if row.ok == "not run"]
        if missing:
            pytest.skip(f"not run: {missing[0].seen}")

    return judged
