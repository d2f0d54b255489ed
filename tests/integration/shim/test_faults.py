"""When something is missing, broken or in the way."""

from __future__ import annotations

import random
import subprocess
import time

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, OUT_OF_MEMORY, ROUTES, Stage, wait_for
from tests.mounting import with_grant
from tests.probe import Probe
from vgpu.api.contract import CONTAINER_DIR, EARLIER_CONTAINER_DIR, GRANT_DIRS

GRACE_MS = "500"
"""More than the 200 ms within which a library reconnects."""


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_grant_the_library_does_nothing(bare_stage: Stage, route: str) -> None:
    probe = bare_stage.probe(route, TANGRAM_GRANT="")
    assert probe.alloc(2000) == 0
    assert probe.info_mib() == (14384, 16384)
    assert probe.end() == ""


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "tangram-grant 1\npod default/a\nuid 1\ncontainer main\nclass gold\n",
            'line 5: found "class gold", expected class',
        ),
        ("tangram-grant 9\n", 'line 1: found "tangram-grant 9", expected tangram-grant 1'),
        ("", 'line 1: found "", expected tangram-grant 1'),
    ],
)
def test_a_corrupt_grant_closes_every_gpu_with_one_warning(bare_stage: Stage, text: str, warning: str) -> None:
    bare_stage.write_grant(text)
    for device in (0, 1):
        probe = bare_stage.probe(device=device)
        assert [
            probe.alloc(1),
            probe.alloc(1),
            probe.request("async", MIB)[0],
            probe.request("create", 2 * MIB, 1)[0],
        ] == [
            2,
            2,
            2,
            2,
        ]
        errors = probe.end()
        assert warning in errors
        assert errors.count("\n") == 1


def test_a_missing_grant_file_closes_every_gpu(bare_stage: Stage) -> None:
    probe = bare_stage.probe(TANGRAM_GRANT=str(bare_stage.folder / "none/grant"))
    assert probe.alloc(1) == OUT_OF_MEMORY
    assert "cannot be read (No such file or directory)" in probe.end()


def test_without_an_arbiter_new_memory_is_refused_after_a_bounded_wait_with_one_warning(bare_stage: Stage) -> None:
    bare_stage.grant((GPUS[0], 1000))
    probe = bare_stage.bare_probe(TANGRAM_WAIT_MS="2000")
    before = time.monotonic()
    assert probe.request("use", 0) == [OUT_OF_MEMORY], "a context is memory too"
    first_s = time.monotonic() - before
    assert 1.5 < first_s < 4
    before = time.monotonic()
    assert probe.request("use", 0) == [OUT_OF_MEMORY]
    assert time.monotonic() - before < 0.5, "patience is spent once"
    errors = probe.end()
    assert "the arbiter does not answer" in errors
    assert errors.count("\n") == 1


def test_an_arbiter_that_comes_late_is_found(bare_stage: Stage) -> None:
    bare_stage.grant((GPUS[0], 1000))
    probe = bare_stage.bare_probe()
    probe.start("use", 0)
    bare_stage.start_arbiter("--grace-ms", "0")
    wait_for(lambda: probe.finish()[0] == 0 or probe.start("use", 0))
    assert probe.alloc(1) == 0


def test_while_the_arbiter_is_away_what_is_leased_can_be_used(own_stage: Stage) -> None:
    probe = own_stage.probe()
    assert probe.alloc(1) == 0
    own_stage.stop_arbiter()
    assert probe.alloc(10) == 0, "within the chunk that was leased"
    assert probe.alloc(900) == OUT_OF_MEMORY


def test_an_allocation_that_begins_before_the_end_of_the_arbiter_is_noticed_waits_for_the_next(
    own_stage: Stage,
) -> None:
    probe = own_stage.probe(LD_PRELOAD=f"{own_stage.library}:{own_stage.build}/tests/libslow_poll.so")
    assert probe.alloc(1) == 0
    own_stage.stop_arbiter(another=True)
    probe.start("alloc", 500 * MIB)
    own_stage.start_arbiter("--grace-ms", "1000")
    assert probe.finish()[0] == 0


def test_what_was_leased_and_unused_when_the_arbiter_went_is_no_obstacle_to_an_allocation_that_waits_for_it(
    own_stage: Stage,
) -> None:
    probe = own_stage.probe()
    assert probe.alloc(2) == 0
    own_stage.stop_arbiter(another=True)
    probe.start("alloc", 998 * MIB)
    own_stage.start_arbiter("--grace-ms", "200")
    assert probe.finish()[0] == 0


def test_a_restarted_arbiter_learns_what_is_held_and_lends_only_the_rest(own_stage: Stage) -> None:
    one, two = own_stage.probe(), own_stage.probe()
    assert one.alloc(600) == 0
    own_stage.stop_arbiter(another=True)
    own_stage.start_arbiter()
    assert two.alloc(500) == OUT_OF_MEMORY
    assert two.alloc(400) == 0
    assert one.alloc(1) == OUT_OF_MEMORY


def test_an_arbiter_restarted_under_load_lends_nothing_twice(own_stage: Stage) -> None:
    probes = [own_stage.probe() for _ in range(4)]
    for probe in probes:
        probe.start("hammer", 2, 5000, 15 * MIB)
    control = own_stage.probe()
    for _ in range(3):
        wait_for(lambda: control.alloc(1) == 0)
        own_stage.stop_arbiter(another=True)
        own_stage.start_arbiter("--grace-ms", "500")
    wait_for(lambda: control.alloc(1) == 0)
    control.kill()
    for probe in probes:
        assert probe.finish()[0] == 0
    taken = [0]

    def all_is_taken() -> bool:
        """A probe that waited for its whole limit is refused until it is connected again: each tries until nothing is left."""
        for probe in probes:
            probe.start("fill", 2 * MIB)
        taken[0] += 2 * sum(probe.finish()[1] for probe in probes)
        assert taken[0] <= 1000, "lent twice"
        return taken[0] == 1000

    wait_for(all_is_taken, seconds=20)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_arbiter_killed_at_random_moments_lends_nothing_twice(own_measured: Stage, seed: int) -> None:
    """Against the driver's own count, contexts and all, at every moment looked at."""
    dice = random.Random(seed)
    workers = [own_measured.worker() for _ in range(2)]
    for number, worker in enumerate(workers):
        worker.start(f"churn(9, {number + seed * 10})")
    most, lives = 0, 0
    until = time.monotonic() + 8
    while time.monotonic() < until or lives < 3:
        own_measured.stop_arbiter(another=True)
        for _ in range(dice.randrange(1, 4)):
            most = max(most, own_measured.true_mib(*workers))
        own_measured.start_arbiter(*own_measured.measuring, "--grace-ms", GRACE_MS)
        for _ in range(dice.randrange(1, 12)):
            most = max(most, own_measured.true_mib(*workers))
        lives += 1
    assert [worker.finish()[0] for worker in workers] == [0, 0]
    assert 2 * CONTEXT_MIB < most <= 1000
    left = 1000 - 2 * CONTEXT_MIB
    # nothing is lost either; a probe that waited for its whole limit is refused until it is connected again
    wait_for(lambda: workers[0].request(f"alloc({left})")[0] == 0)
    # an arbiter that was killed before it measured a context learns its size once leases and uses rest
    wait_for(lambda: workers[0].free_mib() == 0)


def test_two_processes_racing_for_the_last_page_never_both_get_it(stage: Stage) -> None:
    workers = [stage.worker(), stage.worker()]
    workers[0].must("alloc(998)")
    for _ in range(50):
        for worker in workers:
            worker.start("alloc(1)")
        answers = [worker.finish() for worker in workers]
        assert sorted(code for code, _ in answers) == [0, OUT_OF_MEMORY]
        for worker, (code, at) in zip(workers, answers, strict=True):
            if code == 0:
                worker.must(f"free({at})")


def test_64_processes_that_start_at_once_all_start_and_stay_within_the_limit(stage: Stage) -> None:
    probes = [stage.bare_probe() for _ in range(64)]
    for probe in probes:
        probe.start("use", 0)
    assert [probe.finish() for probe in probes] == [[0]] * 64
    for probe in probes:
        probe.start("fill", 4 * MIB)
    assert sum(probe.finish()[1] for probe in probes) == 1000 // 4


def stop_with_an_unused_lease(stage: Stage, probe: Probe) -> None:
    """Of 900 MiB. What is left over is returned once a second, on a slow machine also before the stop."""
    for _ in range(20):
        _, at = probe.request("alloc", 900 * MIB)
        assert probe.request("free", at) == [0]
        probe.stop()
        if stage.status().gpus[0].leased_bytes >= 900 * MIB:
            return
        probe.resume()
    raise AssertionError("its lease went back each time")


def test_a_sibling_that_is_only_slow_is_waited_for_and_a_stopped_one_is_not(stage: Stage) -> None:
    one, two = stage.probe(), stage.probe()
    stop_with_an_unused_lease(stage, one)
    before = time.monotonic()
    assert two.alloc(900) == OUT_OF_MEMORY
    assert time.monotonic() - before < 0.4
    one.resume()
    wait_for(lambda: two.alloc(900) == 0)


@pytest.mark.parametrize("at", GRANT_DIRS)
def test_the_containers_environment_does_not_choose_the_limit_where_a_grant_is_mounted(
    bare_stage: Stage, at: str
) -> None:
    """In a root of its own, with the grant as the node mounts it, and as that of the release before did."""
    bare_stage.grant((GPUS[0], 100))
    bare_stage.grant((GPUS[0], 16000), key="forged")
    bare_stage.start_arbiter("--grace-ms", "0")
    command = with_grant(bare_stage.folder / "grants/k", at, f"{bare_stage.build}/tests/probe-direct")
    done = subprocess.run(
        command, input=f"use 0\nalloc {101 * MIB}\nalloc {100 * MIB}\n",
        env=bare_stage.env(key="forged"), capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert [int(line.split()[0]) for line in done.stdout.splitlines()] == [0, OUT_OF_MEMORY, 0]


def test_a_directory_in_a_volume_at_run_is_no_grant(bare_stage: Stage) -> None:
    """The release before mounted the grant there; now a volume may be there, with a forged one in it."""
    bare_stage.grant((GPUS[0], 100))
    bare_stage.grant((GPUS[0], 16000), key="forged")
    bare_stage.start_arbiter("--grace-ms", "0")
    grants = bare_stage.folder / "grants"
    forge = f"mkdir -p /mnt/run/tangram && mount --bind {grants}/forged /mnt/run/tangram"
    command = with_grant(grants / "k", CONTAINER_DIR, f"{bare_stage.build}/tests/probe-direct", then=forge)
    done = subprocess.run(
        command, input=f"use 0\nalloc {101 * MIB}\nalloc {100 * MIB}\n",
        env=bare_stage.env(), capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert [int(line.split()[0]) for line in done.stdout.splitlines()] == [0, OUT_OF_MEMORY, 0]


@pytest.mark.parametrize(("at", "lock"), [(CONTAINER_DIR, "{grants}/k"), (EARLIER_CONTAINER_DIR, "/mnt/run")])
def test_a_process_that_locked_itself_out_of_its_grant_is_refused_and_not_unlimited(
    bare_stage: Stage, at: str, lock: str
) -> None:
    bare_stage.grant((GPUS[0], 100))
    bare_stage.start_arbiter("--grace-ms", "0")
    bare_stage.folder.chmod(0o755)
    grants, as_nobody = (
        bare_stage.folder / "grants",
        ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"),
    )
    program = (*as_nobody, f"{bare_stage.build}/tests/probe-direct")
    command = with_grant(grants / "k", at, *program, then=f"chmod 700 {lock.format(grants=grants)}")
    env = {name: value for name, value in bare_stage.env().items() if name != "TANGRAM_GRANT"}
    done = subprocess.run(
        command, input=f"use 0\nalloc {MIB}\n",
        env=env, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert int(done.stdout.splitlines()[1].split()[0]) == OUT_OF_MEMORY
    assert "cannot be read" in done.stderr


@pytest.mark.parametrize("order", ["before", "after"])
def test_another_interposer_in_the_chain_still_finds_the_next(stage: Stage, order: str) -> None:
    chain = str(stage.build / "tests/libchain.so")
    preload = [chain, stage.library] if order == "before" else [stage.library, chain]
    probe = stage.probe(LD_PRELOAD=":".join(preload))
    assert probe.alloc(600) == 0
    assert probe.alloc(600) == OUT_OF_MEMORY
    errors = probe.end()
    assert "page 4096" in errors
    if order == "before":
        assert "chain: 2 allocations" in errors


def test_a_program_that_never_touches_cuda_has_no_thread_and_no_socket(stage: Stage) -> None:
    listing = "import os; print(len(os.listdir('/proc/self/task')), [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')[:-1]])"
    out = stage.python(listing)
    assert out.startswith("1 ")
    assert "socket" not in out


def test_a_driver_that_is_not_there_is_reported_by_the_program_itself(stage: Stage) -> None:
    out = stage.python(
        "import ctypes\ntry: ctypes.CDLL('libcuda.so.1')\nexcept OSError as error: print(error)", LD_LIBRARY_PATH=""
    )
    assert "libcuda.so.1: cannot open shared object file" in out


def test_stderr_that_is_closed_stops_nothing(bare_stage: Stage) -> None:
    bare_stage.write_grant("nonsense\n")
    done = subprocess.run(
        ["sh", "-c", f"exec {bare_stage.build}/tests/probe-direct 2>&-"], input=f"use 0\nalloc {MIB}\n",
        env=bare_stage.env(), stdout=subprocess.PIPE, text=True, check=True, timeout=30,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "2", "0"]


@pytest.mark.parametrize("fault", ["fail cuCtxGetDevice nth=1 error=999", "fail cuCtxGetDevice nth=2 error=999"])
def test_a_gpu_that_the_driver_fails_to_name_once_is_not_unlimited_from_then_on(stage: Stage, fault: str) -> None:
    gpu = stage.worker(TANGRAM_FAKE_FAULTS=fault)
    codes = [gpu.request(f"alloc({mib})")[0] for mib in (1001, 1001, 1001, 50, 951)]
    assert codes == [OUT_OF_MEMORY, OUT_OF_MEMORY, OUT_OF_MEMORY, 0, OUT_OF_MEMORY]
    assert stage.true_mib(gpu) == 50


def test_no_memory_is_allocated_on_a_gpu_that_the_driver_does_not_identify(stage: Stage) -> None:
    gpu = stage.worker(TANGRAM_FAKE_FAULTS="fail cuCtxGetDevice error=999")
    assert [gpu.request(way)[0] for way in ("alloc(50)", "managed(50)", "array(1024, 1024)")] == [OUT_OF_MEMORY] * 3
    assert gpu.request("stream_alloc(50)")[0] != 0
    assert stage.true_mib(gpu) == 0
    assert "does not report which GPU is current" in gpu.end()
