"""What the node says of a GPU agrees with the driver's own nvidia-smi. See estate.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import estate
from tests.gpu.kit.machine import Machine
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", estate.CASES)
def test_the_node_says_of_a_gpu_what_nvidia_smi_says(
    name: str, here: Machine, results: Results, judge: Callable[[Results], None]
) -> None:
    estate.run_case(here, results, name)
    judge(results)
