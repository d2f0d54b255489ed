"""Memory of every allocation path is limited, returned when the driver has freed it, and never counted too low.

The container of these tests has 1000 MiB of the first GPU. `true_mib` is the driver's own count of the process.
"""

from __future__ import annotations

import pytest

from tests.integration.shim.conftest import GPUS, OUT_OF_MEMORY, Stage, wait_for

SUFFIXES = ("", "_ptsz")


def test_arrays_are_counted_by_their_texels(stage: Stage) -> None:
    gpu = stage.worker()
    made = [gpu.must(how) for how in ("array(8192, 8192)", "array2d(8192, 8192)", "array(512, 512, depth=256)")]
    assert (stage.true_mib(gpu), gpu.free_mib()) == (768, 232)
    assert gpu.request("array(8192, 8192)")[0] == OUT_OF_MEMORY
    for one in made:
        gpu.must(f"array_end({one})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_mipmapped_arrays_are_counted_with_all_their_levels(stage: Stage) -> None:
    gpu = stage.worker()
    made = gpu.must("mipmap(8192, 8192, 14)")
    assert stage.true_mib(gpu) == 342
    assert gpu.free_mib() in (658, 1000 - 342)
    assert gpu.request("mipmap(16384, 16384, 2)")[0] == OUT_OF_MEMORY
    gpu.must(f"mipmap_end({made})")
    assert gpu.free_mib() == 1000


def test_an_array_of_a_format_that_is_not_known_counts_as_the_widest(stage: Stage) -> None:
    gpu = stage.worker()
    assert gpu.request("array(8192, 8192, texel=0x7ffffff0)")[0] == OUT_OF_MEMORY, "1024 MiB at 16 bytes a texel"
    assert gpu.request("array(1024, 1024, texel=0x7ffffff0)")[0] == 1, "the driver's own error for it"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_block_in_a_sparse_array_is_charged_until_the_array_is_gone(stage: Stage, suffix: str) -> None:
    gpu = stage.worker()
    made, handle = gpu.must("array(65536, 8, flags=0x40)"), gpu.must("create(600)")
    gpu.must(f"tile({made}, {handle}, '{suffix}')")
    gpu.must(f"release({handle})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (600, 400), "the array keeps it"
    assert gpu.request("alloc(500)")[0] == OUT_OF_MEMORY
    gpu.must(f"array_end({made})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_sparse_arrays_have_no_memory_of_their_own(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("array(8192, 8192, flags=0x40)")
    assert gpu.free_mib() == 1000


@pytest.mark.parametrize("way", ["", "_v2", "WithFlags", "WithParams", "WithParams_ptsz"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_graph_is_charged_when_it_is_launched_and_keeps_its_memory(stage: Stage, way: str, suffix: str) -> None:
    gpu = stage.worker()
    made = gpu.must("graph(400, 300)")
    ready = gpu.must(f"graph_ready({made}, '{way}')")
    assert gpu.free_mib() == 1000, "an address is no memory"
    for _ in range(3):
        gpu.must(f"graph_run({ready}, 0, '{suffix}')")
    held = stage.true_mib(gpu)
    assert (held >= 400, gpu.free_mib()) == (True, 1000 - held)
    gpu.must("context_sync()")
    assert gpu.free_mib() == 1000 - held, "graphs keep theirs"
    gpu.must(f"graph_end({ready})")
    gpu.must("graph_trim()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_a_graph_that_does_not_fit_is_refused_and_one_that_has_its_memory_runs_on(stage: Stage) -> None:
    gpu = stage.worker()
    large, small = (gpu.must(f"graph_ready({gpu.must(f'graph({mib})')})") for mib in (1002, 600))
    assert gpu.request(f"graph_run({large})")[0] == OUT_OF_MEMORY
    gpu.must(f"graph_run({small})")
    gpu.must("alloc(400)")
    for _ in range(3):
        assert gpu.request(f"graph_run({small})")[0] == 0
    assert stage.true_mib(gpu) == 1000
    gpu.must("graph_trim()")
    gpu.must("alloc(600)")
    assert gpu.request(f"graph_run({small})")[0] == OUT_OF_MEMORY, "what was trimmed has to be had again"


def test_a_graph_inside_a_graph_is_counted(stage: Stage) -> None:
    gpu = stage.worker()
    outer = gpu.must(f"graph_in_graph({gpu.must('graph(700)')})")
    ready = gpu.must(f"graph_ready({outer})")
    gpu.must("alloc(400)")
    assert gpu.request(f"graph_run({ready})")[0] == OUT_OF_MEMORY


def test_an_upload_at_instantiation_is_paid_for_then(stage: Stage) -> None:
    gpu = stage.worker()
    made = gpu.must("graph(700)")
    gpu.must("alloc(400)")
    assert gpu.request(f"graph_ready({made}, 'WithParams', 2)")[0] == OUT_OF_MEMORY
    assert gpu.request(f"graph_ready({made}, 'WithParams', 0)")[0] == 0


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_what_is_allocated_in_a_capture_is_charged_at_the_launch(stage: Stage, mode: int) -> None:
    gpu = stage.worker()
    stream = gpu.must("stream_new()")
    gpu.must("alloc(500)")
    gpu.must(f"capture({stream}, {mode})")
    at = gpu.must(f"stream_alloc(600, {stream})")
    gpu.must(f"stream_free({at}, {stream})")
    ready = gpu.must(f"graph_ready({gpu.must(f'captured({stream})')})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (500, 500), "a capture takes nothing, and is not refused"
    assert gpu.request(f"graph_run({ready}, {stream})")[0] == OUT_OF_MEMORY
    assert stage.true_mib(gpu) == 500


def test_a_capture_by_one_stream_leaves_the_others_counted(stage: Stage) -> None:
    gpu = stage.worker()
    stream, other = gpu.must("stream_new()"), gpu.must("stream_new()")
    gpu.must(f"capture({stream}, 2)")
    gpu.must(f"stream_alloc(600, {other})")
    assert gpu.request(f"stream_alloc(600, {other})")[0] == OUT_OF_MEMORY
    gpu.must(f"captured({stream})")


def test_memory_of_a_sibling_is_charged_to_one_of_them(stage: Stage) -> None:
    owner, guest = stage.worker(), stage.worker()
    handle = owner.must(f"ipc_get({owner.must('alloc(600)')})")
    at = guest.must(f"ipc_open('{handle}')")
    assert guest.request("alloc(401)")[0] == OUT_OF_MEMORY
    own = guest.must("alloc(400)")
    guest.must(f"ipc_close({at})")
    guest.must(f"free({own})")
    assert guest.request("alloc(401)")[0] == OUT_OF_MEMORY


def test_memory_of_another_container_cannot_be_opened_beyond_the_limit(stage: Stage) -> None:
    stage.grant((GPUS[0], 4000), key="other")
    owner, guest = stage.worker(key="other"), stage.worker()
    handle = owner.must(f"ipc_get({owner.must('alloc(1500)')})")
    assert guest.request(f"ipc_open('{handle}')")[0] == OUT_OF_MEMORY
    assert guest.free_mib() == 1000
    small = owner.must(f"ipc_get({owner.must('alloc(600)')})")
    at = guest.must(f"ipc_open('{small}')")
    owner.kill()
    assert guest.free_mib() == 400, "the process that has it open is charged, whichever made it"
    guest.must(f"ipc_close({at})")
    assert guest.free_mib() == 1000


@pytest.mark.parametrize("free", ["free", "stream_free"])
def test_a_pointer_of_another_processs_pool_is_charged_while_it_is_imported(stage: Stage, free: str) -> None:
    stage.grant((GPUS[0], 4000), key="other")
    owner, guest = stage.worker(key="other"), stage.worker()
    pool = owner.must("pool_new(handles=1)")
    large, small = (owner.must(f"pool_alloc({mib}, {pool})") for mib in (1500, 600))
    _, pid, fd, data = owner.request(f"pool_export({pool}, {large})")
    assert guest.request(f"pool_import({pid}, {fd}, '{data}')")[0] == OUT_OF_MEMORY
    _, pid, fd, data = owner.request(f"pool_export({pool}, {small})")
    at = guest.must(f"pool_import({pid}, {fd}, '{data}')")
    assert guest.free_mib() == 400
    guest.must(f"{free}({at})")
    guest.must("context_sync()")
    assert guest.free_mib() == 1000


def test_an_imported_block_is_charged_as_far_as_it_is_mapped(stage: Stage) -> None:
    stage.grant((GPUS[0], 4000), key="other")
    owner, guest = stage.worker(key="other"), stage.worker()
    _, pid, fd = owner.request(f"export_block({owner.must('create(600, 0, 1)')})")
    handle = guest.must(f"import_block({pid}, {fd})")
    at = guest.must(f"map_block({handle}, 600)")
    assert guest.free_mib() == 400
    again = guest.must(f"map_block({handle}, 600)")
    assert guest.free_mib() == 400, "one block, mapped twice"
    guest.must(f"release({handle})")
    guest.must(f"unmap({at}, 600)")
    assert guest.free_mib() == 400
    guest.must(f"unmap({again}, 600)")
    assert guest.free_mib() == 1000


def test_an_imported_block_that_does_not_fit_cannot_be_mapped(stage: Stage) -> None:
    stage.grant((GPUS[0], 4000), key="other")
    owner, guest = stage.worker(key="other"), stage.worker()
    _, pid, fd = owner.request(f"export_block({owner.must('create(1200, 0, 1)')})")
    handle = guest.must(f"import_block({pid}, {fd})")
    assert guest.request(f"map_block({handle}, 1200)")[0] == OUT_OF_MEMORY
    assert guest.free_mib() == 1000


def test_a_block_mapped_in_several_places_is_counted_once(stage: Stage) -> None:
    gpu = stage.worker()
    handle = gpu.must("create(600)")
    at = [gpu.must(f"map_block({handle}, 600)") for _ in range(3)]
    gpu.must(f"release({handle})")
    kept = gpu.must(f"retain({at[2]})")
    for one in at:
        assert gpu.free_mib() == 400
        gpu.must(f"unmap({one}, 600)")
    assert gpu.free_mib() == 400, "a handle was retained"
    gpu.must(f"release({kept})")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)


def test_external_memory_is_charged_while_it_is_imported(stage: Stage) -> None:
    gpu = stage.worker()
    assert gpu.request("external(1001)")[0] == OUT_OF_MEMORY
    made = gpu.must("external(600)")
    assert gpu.free_mib() == 400
    gpu.must(f"external_end({made})")
    assert gpu.free_mib() == 1000
    assert gpu.request(f"external_end({made})")[0] == 400, "the driver's own error"


def test_pointers_that_were_never_allocated_get_the_drivers_own_error(stage: Stage) -> None:
    gpu = stage.worker()
    at = gpu.must("alloc(100)")
    for call in ("free(4096)", "stream_free(4096)", "ipc_close(4096)", f"free({at + 512})"):
        assert gpu.request(call)[0] == 1, call
    gpu.must(f"free({at})")
    assert gpu.request(f"free({at})")[0] == 1, "freed twice"
    assert gpu.request("free(0)")[0] == 0
    assert gpu.free_mib() == 1000


def test_stream_ordered_memory_may_be_freed_at_once(stage: Stage) -> None:
    gpu = stage.worker()
    at = gpu.must("stream_alloc(900)")
    gpu.must(f"free({at})")
    gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (0, 1000)
    gpu.must(f"pool_keep({gpu.must('pool_of()')}, 4000)")
    gpu.must(f"free({gpu.must('stream_alloc(900)')})")
    gpu.must("context_sync()")
    assert (stage.true_mib(gpu), gpu.free_mib()) == (900, 100), "its pool has it, and pays for it"


def test_a_destroyed_context_takes_its_memory_with_it(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("alloc(100)")
    context = gpu.must("context_new()")
    for _ in range(4):
        gpu.must("alloc(100)")
    assert gpu.free_mib() == 500
    gpu.must(f"context_end({context})")
    gpu.must("use(0)")
    wait_for(lambda: gpu.free_mib() == 900)
    assert stage.true_mib(gpu) == 100


def test_a_reset_device_has_nothing(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("alloc(500)")
    gpu.must("reset()")
    gpu.must("use(0)")
    wait_for(lambda: gpu.free_mib() == 1000)
    assert stage.true_mib(gpu) == 0


def test_host_memory_is_not_counted(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("host(2000)")
    assert gpu.free_mib() == 1000


def test_managed_memory_is_charged_in_full(stage: Stage) -> None:
    gpu = stage.worker()
    assert gpu.request("managed(1001)")[0] == OUT_OF_MEMORY
    at = gpu.must("managed(600)")
    assert gpu.free_mib() == 400
    gpu.must(f"free({at})")
    assert gpu.free_mib() == 1000


@pytest.mark.parametrize(("kib", "count", "lost_mib"), [(4, 2000, 8), (1025, 100, 200), (2049, 100, 400)])
def test_managed_memory_is_charged_by_the_pages_that_the_gpu_loses(
    stage: Stage, kib: int, count: int, lost_mib: int
) -> None:
    """Small requests share pages, none with plain memory; two of more than half a page do not fit in one."""
    gpu = stage.worker()
    gpu.must("alloc(0.001)")
    gpu.must(f"[max(managed({kib} / 1024)[0] for _ in range({count}))]")
    assert 1000 - gpu.free_mib() == stage.true_mib(gpu) == lost_mib + 2


def test_managed_memory_of_small_requests_ends_at_the_limit(stage: Stage) -> None:
    gpu = stage.worker()
    gpu.must("[0, *(managed(1.1) for _ in range(499))]")
    assert [gpu.request("managed(1.1)")[0] for _ in range(2)] == [0, OUT_OF_MEMORY]
    assert gpu.request("managed(0.5)")[0] == 0, "in a page that is charged already"
    assert stage.true_mib(gpu) <= 1000


def test_with_several_devices_each_call_is_charged_to_the_context_it_is_made_in(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 300))
    gpu = stage.worker(device=0)
    gpu.must("alloc(200)")
    gpu.must("use(1)")
    assert gpu.request("alloc(301)")[0] == OUT_OF_MEMORY
    gpu.must("alloc(250)")
    assert gpu.free_mib() == 50
    gpu.must("use(0)")
    assert gpu.free_mib() == 800


@pytest.mark.parametrize(("visible", "limits"), [("1", (300,)), (GPUS[1], (300,)), ("1,0", (300, 1000))])
def test_the_limit_is_the_gpus_whatever_its_number_in_the_process(
    stage: Stage, visible: str, limits: tuple[int, ...]
) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 300))
    gpu = stage.worker(CUDA_VISIBLE_DEVICES=visible)
    for device, limit in enumerate(limits):
        gpu.must(f"use({device})")
        assert gpu.request("info()")[2] == limit
        assert gpu.request(f"alloc({limit + 1})")[0] == OUT_OF_MEMORY
        assert gpu.request(f"stream_alloc({limit + 2})")[0] == OUT_OF_MEMORY
        assert gpu.request(f"create({limit + 2}, {device})")[0] == OUT_OF_MEMORY
        gpu.must(f"alloc({limit})")
