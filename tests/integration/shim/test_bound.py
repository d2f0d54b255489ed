"""What a context grows by in a call is reserved before the call, refused if it does not fit, and settled when NVML was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.shim.burst_kit import elastic
from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, OUT_OF_MEMORY, Stage, Worker, a_node, wait_for

PAGE_MIB = 2
ROOM_MIB = 60
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
BURSTS = "import tests.integration.shim.burst_limits\n"


def full_but(worker: Worker, mib: int) -> int:
    """The share is full but for so much. What fills it."""
    at = worker.must(f"alloc({worker.free_mib() - mib})")
    assert mib - PAGE_MIB < worker.free_mib() <= mib
    return int(at)


def test_code_is_held_before_it_is_loaded_and_settled_by_what_nvml_counts(measured: Stage) -> None:
    """8 MiB of text are 16 at most, and what the fake driver counts for them."""
    worker = measured.worker(**EAGER)
    full_but(worker, 16)
    left = worker.free_mib()
    assert worker.request("code(8 * 1024)")[0] == OUT_OF_MEMORY
    assert worker.free_mib() == left
    worker.must("code(4 * 1024)")
    assert worker.free_mib() <= 16 - 8 - PAGE_MIB
    wait_for(lambda: worker.free_mib() >= 16 - PAGE_MIB)


def test_a_lazily_loaded_function_is_bounded_when_its_handle_is_got(measured: Stage) -> None:
    worker = measured.worker()
    module = worker.must("code(8 * 1024)")
    filling = full_but(worker, 8)
    assert worker.request(f"function_of({module})")[0] == OUT_OF_MEMORY
    worker.must(f"free({filling})")
    full_but(worker, 24)
    assert worker.request(f"function_of({module})")[0] == 0


def test_a_kernel_of_a_library_is_bounded_at_its_first_launch_and_not_again(measured: Stage) -> None:
    worker = measured.worker()
    library = worker.must("code(8 * 1024, way='cuLibraryLoadData')")
    kernel = worker.must(f"kernel_of({library})")
    filling = full_but(worker, 8)
    assert worker.request(f"launch_once({kernel})") == [OUT_OF_MEMORY]
    worker.must(f"free({filling})")
    filling = full_but(worker, 24)
    assert worker.request(f"launch_once({kernel})") == [0]
    wait_for(lambda: worker.free_mib() >= 24 - PAGE_MIB)
    worker.must(f"free({filling})")
    full_but(worker, 4)
    assert worker.request(f"launch_once({kernel})") == [0], "its code is there"


def test_many_small_modules_in_a_row_are_not_bounded_by_a_page_each(measured: Stage) -> None:
    worker = measured.worker(**EAGER)
    full_but(worker, 16)
    for _ in range(200):
        worker.must("code(8)")


def test_a_further_context_is_refused_where_it_does_not_fit(measured: Stage) -> None:
    worker = measured.worker()
    full_but(worker, CONTEXT_MIB)
    left = worker.free_mib()
    assert worker.request("context_new()")[0] == OUT_OF_MEMORY
    assert worker.free_mib() == left


def test_streams_are_held_before_they_are_made(measured: Stage) -> None:
    worker = measured.worker()
    filling = full_but(worker, 0)
    assert worker.request("stream_new()")[0] == OUT_OF_MEMORY
    worker.must(f"free({filling})")
    full_but(worker, 30)
    for _ in range(50):
        worker.must("stream_new()")


@pytest.mark.parametrize("way", ["cuModuleLoadData", "cuLibraryLoadData"])
def test_code_is_charged_to_the_memory_reserved_beside_a_context(own_measured: Stage, way: str) -> None:
    own_measured.stop_arbiter(another=True)
    own_measured.start_measuring_arbiter("--context-room-mib", str(ROOM_MIB))
    worker = own_measured.worker(**EAGER)
    # the first context on a node: a busy machine measures it, and reserves the room, after the library has waited for that
    wait_for(lambda: worker.free_mib() <= 1000 - CONTEXT_MIB - ROOM_MIB)
    full_but(worker, PAGE_MIB)  # for its variable
    worker.must(f"code(8 * 1024, way={way!r})")


def test_what_cannot_be_requested_is_charged_to_the_lease_or_refused(own_measured: Stage) -> None:
    worker = own_measured.worker(TANGRAM_WAIT_MS="100", **EAGER)
    worker.must("alloc(1)")
    own_measured.stop_arbiter()
    assert worker.request("code(200 * 1024)")[0] == OUT_OF_MEMORY
    worker.must("code(1024)")


# --- a library's variables and kernels are loaded into each context that uses them ---

VARIABLES_MIB = 100
AT_ONCE_MIB = 16
"""Reserved for code at once, and not counted as free: what of it is not needed serves a request all the same (bound.c)."""


def library_of(worker: Worker) -> tuple[int, int]:
    """With variables, used in the first context. And its kernel."""
    before = worker.free_mib()
    library = worker.must(f"code(8, {VARIABLES_MIB} << 20, way='cuLibraryLoadData')")
    kernel = worker.must(f"kernel_of({library})")
    assert worker.request(f"launch_once({kernel})") == [0]
    assert VARIABLES_MIB <= before - worker.free_mib() <= VARIABLES_MIB + 20, "once"
    return int(library), int(kernel)


def test_variables_of_a_library_are_held_in_each_context_that_uses_it(measured: Stage) -> None:
    worker = measured.worker()
    library, kernel = library_of(worker)
    worker.must("context_new()")
    filling = full_but(worker, VARIABLES_MIB - AT_ONCE_MIB - PAGE_MIB)
    assert worker.request(f"launch_once({kernel})") == [OUT_OF_MEMORY]
    worker.must(f"free({filling})")
    before = worker.free_mib()
    assert worker.request(f"launch_once({kernel})") == [0]
    held = before - worker.free_mib()
    assert VARIABLES_MIB <= held <= VARIABLES_MIB + 20
    for _ in range(3):
        assert worker.request(f"launch_once({kernel})") == [0]
    assert before - worker.free_mib() <= held, "it is there"
    assert worker.request(f"unload({library})") == [0]
    wait_for(lambda: worker.free_mib() >= before + VARIABLES_MIB - 20)


def test_a_context_that_ends_gives_the_variables_of_libraries_back(measured: Stage) -> None:
    worker = measured.worker()
    _, kernel = library_of(worker)
    before = worker.free_mib()
    context = worker.must("context_new()")
    assert worker.request(f"launch_once({kernel})") == [0]
    assert worker.free_mib() <= before - VARIABLES_MIB
    worker.must(f"context_end({context})")
    wait_for(lambda: worker.free_mib() >= before - 20)


def test_variables_of_a_library_are_held_on_the_second_gpu_when_it_is_used_there(measured: Stage) -> None:
    measured.grant((GPUS[0], 1000), (GPUS[1], CONTEXT_MIB + VARIABLES_MIB))
    worker = measured.worker()
    _, kernel = library_of(worker)
    worker.must("context_new(1)")
    wait_for(lambda: worker.free_mib() <= VARIABLES_MIB)
    filling = worker.must("alloc(20)")
    assert worker.request(f"launch_once({kernel})") == [OUT_OF_MEMORY]
    worker.must(f"free({filling})")
    worker.must("alloc(2)")


def test_what_elastic_memory_keeps_is_released_for_code(build: Path) -> None:
    """The program freed all it had, and the library keeps it for the next request: a refusal would be for memory that nobody uses."""
    with a_node(build, CONTEXT_MIB, prelude=BURSTS) as made:
        made.grant((GPUS[0], 1000))
        made.start_measuring_arbiter()
        made.worker().kill()
        worker = elastic(made)
        module = worker.must("code(8 * 1024)")
        blocks = [worker.must("alloc(50)") for _ in range((worker.free_mib() - 8) // 50)]
        rest = worker.must(f"alloc({worker.free_mib() - 8})")
        assert worker.request(f"function_of({module})")[0] == OUT_OF_MEMORY
        for at in (*blocks, rest):
            worker.must(f"free({at})")
        assert worker.request(f"function_of({module})")[0] == 0
