"""What the driver loses for a context, its modules and its kernels is charged, and never more than the limit is lost."""

from __future__ import annotations

import pytest

from tests.images import cubin, fatbin
from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, OUT_OF_MEMORY, Stage, Worker, wait_for

LIMIT_MIB = 1000
STACK, HEAP = 0, 2


def charged_mib(worker: Worker) -> int:
    return LIMIT_MIB - worker.free_mib()


IMAGES = {
    "cubin": cubin(table=12, large=8 * MIB),
    "fatbin": fatbin((2, 75, cubin(table=12, large=8 * MIB))),
    "ptx": b".version 8.0\n.target sm_80\n.global .b8 table[12];\n.visible .global .align 8 .u64 large[1048576];\n\0",
}
CALLS = {
    "a stack of 2048": f"set_limit({STACK}, 2048)",
    "a stack of 1040": f"set_limit({STACK}, 1040)",
    "a stack of 8000": f"set_limit({STACK}, 8000)",
    "a deep kernel": "deep(4096)",
    "a deep kernel in a graph": "deep_graph(4096)",
    "a kernel a little deeper than the stack": "deep(1032)",
    **{f"variables in {kind}": f"module_bytes('{image.hex()}')" for kind, image in IMAGES.items()},
    "a heap": f"set_limit({HEAP}, {100 * MIB})",
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_driver_loses_is_charged_when_it_is_lost(stage: Stage, name: str) -> None:
    worker = stage.worker()
    worker.must(CALLS[name])
    lost = stage.true_mib(worker)
    assert lost > 0 or name == "a heap"
    assert charged_mib(worker) >= lost


@pytest.mark.parametrize("name", [name for name in CALLS if name != "a heap"])
def test_what_would_lose_more_than_the_limit_is_refused(stage: Stage, name: str) -> None:
    worker = stage.worker()
    worker.must(f"alloc({LIMIT_MIB})")
    assert worker.request(CALLS[name])[0] == OUT_OF_MEMORY
    assert stage.true_mib(worker) == LIMIT_MIB


def test_a_deep_kernel_is_charged_once(stage: Stage) -> None:
    worker = stage.worker()
    worker.must("deep(4096)")
    before = charged_mib(worker)
    worker.must("deep(4096)")
    worker.must("deep(2048)")
    assert charged_mib(worker) == before


STREAMS_MIB = 50
"""Of 100 streams. Measured."""


def test_streams_are_charged_when_nvml_is_read(measured: Stage) -> None:
    worker = measured.worker()
    for _ in range(100):
        worker.must("stream_new()")
    assert measured.true_mib(worker) == CONTEXT_MIB + STREAMS_MIB
    wait_for(lambda: charged_mib(worker) >= CONTEXT_MIB + STREAMS_MIB)


def test_what_was_reserved_for_streams_and_not_needed_is_there_for_a_request_at_once(measured: Stage) -> None:
    """16 MiB are reserved for many streams together, and no reading comes between these calls."""
    measured.grant((GPUS[0], CONTEXT_MIB + 60))
    worker = measured.worker()
    worker.must("alloc(1)")
    wait_for(lambda: CONTEXT_MIB + 60 - worker.free_mib() <= CONTEXT_MIB + 15)
    left = worker.free_mib()
    worker.must("stream_new()")
    worker.must(f"alloc({left - 4})")
