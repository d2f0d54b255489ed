"""Two GPUs in one process: elastic memory answers as plain memory does, also after a swap. See peers.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu import peers
from tests.gpu.kit.machine import real_driver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_elastic_memory_answers_another_gpu_as_plain_memory_does(tmp_path: Path) -> None:
    assert peers.run(not real_driver(), tmp_path, lambda: False) == 0
    rows = (tmp_path / "peers.csv").read_text().splitlines()
    assert sum(row.endswith(",yes") for row in rows) > 60 or "one GPU" in "".join(rows)
