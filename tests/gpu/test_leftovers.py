"""What one process leaves in GPU memory, and whether the next one can read it. See leftovers.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import leftovers
from tests.gpu.kit.machine import Machine, Watcher
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", leftovers.CASES)
def test_the_next_process_reads_nothing_of_the_last(
    name: str, here: Machine, watch: Watcher, results: Results, judge: Callable[[Results], None]
) -> None:
    leftovers.run_case(here, watch, results, name)
    judge(results)
