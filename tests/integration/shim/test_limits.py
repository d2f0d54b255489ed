"""The limit is enforced: by every way into the driver, over all processes of the container, to the last MiB."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.shim.conftest import GPUS, INVALID_VALUE, MIB, OUT_OF_MEMORY, ROUTES, Stage, wait_for

VERBS = ("alloc", "managed", "async", "pool", "create")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_process_gets_its_limit_and_not_one_mib_more(stage: Stage, route: str, verb: str) -> None:
    probe = stage.probe(route)
    assert [probe.request(verb, 100 * MIB)[0] for _ in range(10)] == [0] * 10
    assert probe.request(verb, 2 * MIB)[0] == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("mib", "fit"), [(2 + 1 / MIB, 250), (3, 250), (2, 500), (5, 166)], ids=lambda value: f"{value:.6g}"
)
def test_memory_is_charged_by_the_pages_that_the_gpu_loses(stage: Stage, mib: float, fit: int) -> None:
    """Of 1,000 MiB; one byte more than 2 MiB takes two pages."""
    worker = stage.worker()
    answers = [worker.request(f"alloc({mib!r})") for _ in range(fit + 2)]
    assert [code for code, _ in answers] == [0] * fit + [OUT_OF_MEMORY] * 2


@pytest.mark.parametrize("route", ROUTES)
def test_rows_are_counted_with_their_padding(stage: Stage, route: str) -> None:
    probe = stage.probe(route)
    code, at, pitch = probe.request("pitch", 100, 1024 * 1024)
    assert (code, pitch >= 512) == (0, True)
    free, _ = probe.info_mib()
    assert free == 1000 - pitch
    assert probe.request("free", at) == [0]
    assert probe.info_mib()[0] == 1000


def test_an_allocation_beyond_the_limit_is_refused_and_a_smaller_one_goes_through(stage: Stage) -> None:
    probe = stage.probe()
    assert probe.alloc(1001) == OUT_OF_MEMORY
    assert probe.alloc(1000) == 0


@pytest.mark.parametrize(
    ("verb", "free"),
    [("alloc", "free"), ("managed", "free"), ("async", "freeasync"), ("async", "free"), ("pool", "freeasync")],
)
def test_what_is_freed_can_be_had_again(stage: Stage, verb: str, free: str) -> None:
    probe = stage.probe()
    for _ in range(5):
        code, at = probe.request(verb, 900 * MIB)
        assert code == 0
        assert probe.request(free, at) == [0]
    assert probe.request("sync") == [0]
    assert probe.info_mib() == (1000, 1000)


def test_a_block_is_held_until_it_is_released_and_unmapped(stage: Stage) -> None:
    probe = stage.probe()
    size = 600 * MIB
    _, handle = probe.request("create", size, 0)
    _, at = probe.request("reserve", size)
    assert probe.request("map", at, size, handle) == [0]
    assert probe.request("release", handle) == [0]
    assert probe.request("create", size, 0)[0] == OUT_OF_MEMORY, "the mapping still keeps it"
    assert probe.request("unmap", at, size) == [0]
    assert probe.request("create", size, 0)[0] == 0


def test_a_block_is_charged_to_the_gpu_it_is_on_and_not_to_the_current_one(stage: Stage) -> None:
    stage.grant((GPUS[0], 1000), (GPUS[1], 100))
    probe = stage.probe(device=0)
    assert probe.request("create", 200 * MIB, 1)[0] == OUT_OF_MEMORY
    assert probe.request("create", 200 * MIB, 0)[0] == 0


def test_two_processes_share_one_limit_and_race_for_the_last_page(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    for probe in (one, two):
        probe.start("fill", 2 * MIB)
    answers = [one.finish(), two.finish()]
    assert [code for code, _ in answers] == [OUT_OF_MEMORY] * 2
    assert sum(count for _, count in answers) == 500


@pytest.mark.parametrize(("processes", "block_mib"), [(16, 8), (64, 2)])
def test_processes_that_start_at_once_get_the_limit_together(stage: Stage, processes: int, block_mib: int) -> None:
    probes = [stage.bare_probe(ROUTES[n % 3]) for n in range(processes)]
    for probe in probes:
        probe.start("use", 0)
    assert [probe.finish() for probe in probes] == [[0]] * processes
    for probe in probes:
        probe.start("fill", block_mib * MIB)
    answers = [probe.finish() for probe in probes]
    assert {code for code, _ in answers} == {OUT_OF_MEMORY}
    assert sum(count for _, count in answers) * block_mib in range(1001 - block_mib, 1001)


def test_a_sibling_hands_over_what_it_does_not_use(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    assert one.alloc(2) == 0
    assert two.alloc(998) == 0
    assert two.alloc(1) == OUT_OF_MEMORY


def test_the_memory_of_a_killed_process_is_free(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    assert one.alloc(1000) == 0
    assert two.alloc(1) == OUT_OF_MEMORY
    one.kill()
    wait_for(lambda: two.alloc(1000) == 0)


def test_a_stopped_sibling_delays_an_allocation_only_for_a_bounded_time(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    assert one.alloc(1) == 0
    one.stop()
    assert two.alloc(999) == OUT_OF_MEMORY
    assert two.alloc(600) == 0


def test_threads_never_exceed_the_limit_and_leave_nothing_behind(stage: Stage) -> None:
    probe = stage.probe()
    code, failed = probe.request("hammer", 8, 200, 120 * MIB)
    assert code == 0
    assert failed > 0, "two threads of 8 x 120 MiB are more than the limit: some must have been refused"
    assert probe.info_mib() == (1000, 1000)


def test_a_forked_child_counts_with_its_parent(stage: Stage) -> None:
    parent = stage.bare_probe("dlsym")
    assert parent.request("child", 1001 * MIB) == [OUT_OF_MEMORY]
    assert parent.request("child", 1000 * MIB) == [0]
    assert parent.request("use", 0) == [0]
    assert parent.alloc(500) == 0
    assert parent.request("child", 501 * MIB)[0] in (OUT_OF_MEMORY, 100), (
        "refused, or CUDA does not start in such a child"
    )
    assert parent.alloc(500) == 0, "the parent's connection is whole after the fork"


FORKED = """
import ctypes, os, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
print(pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20, flush=True)
out, into = os.pipe()
if os.fork() == 0:
    cuda, context, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    codes = [cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(mib << 20)) for mib in (1001, 1000)]
    os.write(into, str(codes).encode())
    os._exit(0)
os.wait()
print(os.read(out, 64).decode())
"""


def test_a_child_of_a_process_that_is_connected_has_a_connection_of_its_own(stage: Stage) -> None:
    started = time.monotonic()
    assert stage.python(FORKED).splitlines() == ["0", "[2, 0]"]
    assert time.monotonic() - started < 2, "it need not find out by waiting that its parent's thread is not there"


def test_a_pointer_that_is_not_ours_is_answered_by_the_driver(stage: Stage) -> None:
    probe = stage.probe()
    assert probe.request("free", 0xDEAD000) == [INVALID_VALUE]
    code, at = probe.request("alloc", MIB)
    assert code == 0
    assert probe.request("free", at) == [0]
    assert probe.request("free", at) == [INVALID_VALUE], "freed twice"
    assert probe.info_mib() == (1000, 1000)


def test_a_full_gpu_gives_the_reservation_back(stage: Stage) -> None:
    stage.grant((GPUS[0], 16000))
    neighbour = stage.probe(LD_PRELOAD="")
    assert neighbour.alloc(10000) == 0
    probe = stage.probe()
    assert [probe.alloc(8000) for _ in range(3)] == [OUT_OF_MEMORY] * 3
    assert probe.info_mib() == (6384, 16000), "free is bounded by the GPU, and nothing stayed counted"
    assert probe.alloc(6000) == 0


def test_devices_are_known_by_uuid_whatever_their_number(stage: Stage) -> None:
    stage.grant((GPUS[0], 100), (GPUS[1], 300))
    second = stage.probe(device=0, CUDA_VISIBLE_DEVICES="1")
    assert second.info_mib() == (300, 300)
    assert second.alloc(301) == OUT_OF_MEMORY
    assert second.alloc(300) == 0
    swapped = stage.probe(device=1, CUDA_VISIBLE_DEVICES="1,0")
    assert swapped.info_mib() == (100, 100)
    assert swapped.request("total", 0) == [0, 300 * MIB]


def test_a_gpu_that_the_grant_does_not_name_is_left_alone(stage: Stage) -> None:
    probe = stage.probe(device=1)
    assert probe.alloc(2000) == 0
    assert probe.info_mib() == (14384, 16384)


def test_zero_bytes_are_answered_by_the_driver(stage: Stage) -> None:
    assert stage.probe().request("alloc", 0)[0] == INVALID_VALUE


FORGED = r"""
import ctypes, os, re
import sys
sys.path.insert(0, sys.argv[1])
import gpu
assert gpu.use()[0] == 0 and gpu.alloc(600)[0] == 0
libc = ctypes.CDLL(None, use_errno=True)
pages = re.findall(r"^([0-9a-f]+)-[0-9a-f]+ (\S+) .*tangram", open("/proc/self/maps").read(), re.MULTILINE)
pages = [(at, how) for at, how in pages if how[3] == "s"]
print({how for _, how in pages})
print({libc.mprotect(ctypes.c_void_p(int(at, 16)), ctypes.c_size_t(4096), 3) for at, _ in pages})
print([name for name in os.listdir("/proc/self/fd") if "tangram" in os.path.realpath(f"/proc/self/fd/{name}")])
print(gpu.alloc(600)[0])
"""


def test_what_the_processes_share_cannot_be_written_by_them(stage: Stage) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGED, str(Path(__file__).parent)],
        env=stage.env(), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["{'r--s'}", "{-1}", "[]", str(OUT_OF_MEMORY)]
