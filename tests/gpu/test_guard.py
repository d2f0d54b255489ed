"""The arbiter notices programs that go past the library, and no others. See guard.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import guard
from tests.gpu.kit.machine import Machine, Watcher
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", guard.CASES)
def test_the_arbiter_ends_what_goes_past_the_grant_and_nothing_else(
    name: str, here: Machine, watch: Watcher, results: Results, judge: Callable[[Results], None]
) -> None:
    guard.run_case(here, watch, results, name)
    judge(results)
