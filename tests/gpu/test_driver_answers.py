"""The driver's answers about plain, mapped and elastic memory. See driver_answers.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import driver_answers
from tests.gpu.kit.machine import Machine
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", driver_answers.CASES)
def test_the_driver_answers_as_the_page_says(
    name: str, here: Machine, results: Results, judge: Callable[[Results], None]
) -> None:
    driver_answers.run_case(here, results, name)
    judge(results)
