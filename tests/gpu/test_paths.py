"""Every way to take GPU memory is held to the grant, in the driver's own records. See paths.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import paths
from tests.gpu.kit.machine import Machine, Watcher
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CASES = dict(paths.cases())


@pytest.mark.parametrize("name", CASES)
def test_memory_is_held_to_the_grant(
    name: str, here: Machine, watch: Watcher, results: Results, judge: Callable[[Results], None]
) -> None:
    paths.run_case(here, watch, results, name, CASES[name])
    judge(results)
