"""Two GPUs in one process: elastic memory answers as plain memory does, also after a swap. See peers.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpu import peers
from tests.gpu.kit.machine import real_driver
from tests.gpu.kit.results import Results

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_elastic_memory_answers_another_gpu_as_plain_memory_does(
    results: Results, judge: Callable[[Results], None]
) -> None:
    peers.run(not real_driver(), results, lambda: False)
    judge(results)
