"""A container with a share sees only itself on the GPU. See view.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import view
from tests.gpu.kit.machine import Machine
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", view.CASES)
def test_a_container_sees_only_itself(
    name: str, here: Machine, results: Results, judge: Callable[[Results], None]
) -> None:
    view.run_case(here, results, name)
    judge(results)
