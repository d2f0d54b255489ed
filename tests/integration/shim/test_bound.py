"""What a context grows by in a call is held before the call, refused where it does not fit, and settled when NVML was read."""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, OUT_OF_MEMORY, Stage, Worker, wait_for

PAGE_MIB = 2
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}


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
    assert worker.ask("code(8 * 1024)")[0] == OUT_OF_MEMORY
    assert worker.free_mib() == left
    worker.must("code(4 * 1024)")
    assert worker.free_mib() <= 16 - 8 - PAGE_MIB
    wait_for(lambda: worker.free_mib() >= 16 - PAGE_MIB)


def test_a_lazily_loaded_function_is_bounded_when_its_handle_is_got(measured: Stage) -> None:
    worker = measured.worker()
    module = worker.must("code(8 * 1024)")
    filling = full_but(worker, 8)
    assert worker.ask(f"function_of({module})")[0] == OUT_OF_MEMORY
    worker.must(f"free({filling})")
    full_but(worker, 24)
    assert worker.ask(f"function_of({module})")[0] == 0


def test_a_kernel_of_a_library_is_bounded_at_its_first_launch_and_not_again(measured: Stage) -> None:
    worker = measured.worker()
    library = worker.must("code(8 * 1024, way='cuLibraryLoadData')")
    kernel = worker.must(f"kernel_of({library})")
    filling = full_but(worker, 8)
    assert worker.ask(f"launch_once({kernel})") == [OUT_OF_MEMORY]
    worker.must(f"free({filling})")
    filling = full_but(worker, 24)
    assert worker.ask(f"launch_once({kernel})") == [0]
    wait_for(lambda: worker.free_mib() >= 24 - PAGE_MIB)
    worker.must(f"free({filling})")
    full_but(worker, 4)
    assert worker.ask(f"launch_once({kernel})") == [0], "its code is there"


def test_many_small_modules_in_a_row_are_not_bounded_by_a_page_each(measured: Stage) -> None:
    worker = measured.worker(**EAGER)
    full_but(worker, 16)
    for _ in range(200):
        worker.must("code(8)")


def test_a_further_context_is_refused_where_it_does_not_fit(measured: Stage) -> None:
    worker = measured.worker()
    full_but(worker, CONTEXT_MIB)
    left = worker.free_mib()
    assert worker.ask("context_new()")[0] == OUT_OF_MEMORY
    assert worker.free_mib() == left


def test_streams_are_held_before_they_are_made(measured: Stage) -> None:
    worker = measured.worker()
    filling = full_but(worker, 0)
    assert worker.ask("stream_new()")[0] == OUT_OF_MEMORY
    worker.must(f"free({filling})")
    full_but(worker, 30)
    for _ in range(50):
        worker.must("stream_new()")


@pytest.mark.parametrize("way", ["cuModuleLoadData", "cuLibraryLoadData"])
def test_the_room_beside_a_context_pays_for_code(own_measured: Stage, way: str) -> None:
    own_measured.stop_arbiter(another=True)
    own_measured.start_measuring_arbiter("--context-room-mib", "60")
    worker = own_measured.worker(**EAGER)
    full_but(worker, PAGE_MIB)  # for its variable
    worker.must(f"code(8 * 1024, way={way!r})")


def test_what_cannot_be_asked_for_is_paid_by_the_lease_or_refused(own_measured: Stage) -> None:
    worker = own_measured.worker(TANGRAM_WAIT_MS="100", **EAGER)
    worker.must("alloc(1)")
    own_measured.stop_arbiter()
    assert worker.ask("code(200 * 1024)")[0] == OUT_OF_MEMORY
    worker.must("code(1024)")
