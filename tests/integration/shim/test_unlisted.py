"""Memory that a program takes without a context, so that NVML lists it for no process: the arbiter reports it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, Stage, a_node, wait_for
from tests.integration.shim.test_bypass import REPORTED_S, document
from tests.integration.shim.test_guard import raw

__all__ = ["raw"]


@pytest.fixture
def stage(build: Path) -> Iterator[Stage]:
    """A node of its own with a container of 4000 MiB."""
    with a_node(build, CONTEXT_MIB) as made:
        made.grant((GPUS[0], 4000))
        made.start_measuring_arbiter()
        yield made


def test_memory_that_nvml_lists_for_no_process_is_in_the_status_within_5_s(stage: Stage, raw: Path) -> None:
    """Beside a program that has plain and managed memory by the library, which is not reported."""
    worker = stage.worker()
    worker.must("alloc(1500)")
    worker.must("managed(500)")
    with subprocess.Popen(
        [str(raw), str(stage.folder / "driver.sock"), "2560", "unlisted"],
        env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_for(lambda: document(stage).unlisted, REPORTED_S)
        whole = document(stage)
        (found,) = whole.unlisted
        assert found.gpu == GPUS[0]
        assert found.used_bytes == (CONTEXT_MIB + 1500 + 500 + 2560) * MIB
        assert 2560 - 256 <= found.held_bytes / MIB <= 2560, (
            "what the worker may have allocated since counts as explained"
        )
        wait_for(lambda: document(stage).unlisted[0].held_bytes == 2560 * MIB)
        assert whole.ungranted == ()
        assert [(one.pid, one.gpus[0].measured_bytes) for one in stage.status().processes] == [
            (worker.pid, (CONTEXT_MIB + 1500) * MIB)
        ]
        assert process.poll() is None, "no process is killed for it"
        process.communicate("\n")
    wait_for(lambda: not document(stage).unlisted)
    assert worker.request("info()")[0] == 0
