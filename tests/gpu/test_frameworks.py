"""Frameworks at their limit: their own error, life after it, the driver's records. See frameworks.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import frameworks
from tests.gpu.kit.machine import Machine, Watcher
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", frameworks.CASES, ids=lambda case: case.name)
def test_a_framework_meets_its_limit_and_lives_on(
    case: frameworks.Case,
    here: Machine,
    watch: Watcher,
    all_results: list[Results],
    judge: Callable[[Results], None],
) -> None:
    all_results.append(frameworks.run_case(here, watch, case))
    judge(all_results[-1])
