"""The host pool's program: a copier for each shared GPU, whose pool outlives both, and reasons where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from hack.waiting import eventually
from hostpool.copier_process import FIRST_S
from hostpool.folders import SUFFIX
from tests.integration.copier.harness import Owner, digest, done, restore, save, state
from tests.integration.hostpool.stand import BOOT_ID, FIRST, LIMIT_S, MIB, SECOND, Stand
from vgpu.api.host_pool import NO_GPUS, missing_on_gpu
from vgpu.protocol.copier import Result


def test_each_shared_gpu_has_a_copier_with_its_part_of_the_pool(stand: Stand) -> None:
    stand.share(FIRST, SECOND)
    stand.start("64Mi")
    status = stand.until_ready(FIRST, SECOND)
    assert [(gpu.pool_bytes, gpu.registered_bytes, gpu.reason) for gpu in status.gpus] == [(32 * MIB, 32 * MIB, "")] * 2
    assert all(gpu.pages.startswith(("pages of 4 KiB", "huge pages of")) for gpu in status.gpus)
    for gpu in (FIRST, SECOND):
        link = stand.connect(gpu)
        assert state(link).pool_bytes == 32 * MIB
        link.close()
    assert stand.page("/healthz")[0] == 200
    assert stand.page("/readyz") == (200, "ok\n")
    metrics = stand.page("/metrics")[1]
    for sample in (
        f'tangram_host_pool_bytes{{gpu_uuid="{FIRST}",state="registered"}} {32.0 * MIB:.10}',
        f'tangram_host_pool_ready{{gpu_uuid="{SECOND}"}} 1.0',
        f'tangram_host_pool_copier_restarts_total{{gpu_uuid="{FIRST}"}} 0.0',
        f'tangram_host_pool_start_duration_seconds{{gpu_uuid="{FIRST}"}} ',
    ):
        assert sample.split(" ")[0] in metrics


def test_the_end_and_a_new_program_keep_what_is_in_the_pool(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("32Mi")
    before = stand.until_ready(FIRST)
    owner = Owner(stand.driver)
    try:
        owner.make("a", 4 * MIB, seed=1)
        link = stand.connect(FIRST)
        save(link, owner, "a", 1, 8 * MIB, 4 * MIB)
        assert done(link).result == Result.COPIED
        link.close()
        assert stand.stop() == 0
        ended = stand.status()
        assert ended is not None
        assert ended.reason == "its program was stopped"
        assert (stand.pools / f"{FIRST}{SUFFIX}").stat().st_size == 32 * MIB
        stand.start("32Mi")
        again = stand.until_ready(FIRST)
        assert again.gpus[0].file_id == before.gpus[0].file_id != ""
        owner.make("b", 4 * MIB, seed=None)
        link = stand.connect(FIRST)
        restore(link, owner, "b", 1, 8 * MIB, 4 * MIB)
        assert done(link).result == Result.COPIED
        assert owner.digest("b") == digest(4 * MIB, 1)
        link.close()
    finally:
        owner.end()


def test_a_copier_that_is_killed_is_started_again_with_the_same_file(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("32Mi")
    before = stand.until_ready(FIRST)
    for kills in (1, 2, 3):
        (pid,) = stand.copier_pids()
        os.kill(pid, signal.SIGKILL)
        stand.until(lambda status: not status.gpus[0].ready and "signal 9" in status.gpus[0].reason, "the end is seen")
        assert stand.until_ready(FIRST).gpus[0].file_id == before.gpus[0].file_id
        assert f'restarts_total{{gpu_uuid="{FIRST}"}} {kills}.0' in stand.page("/metrics")[1]
    delays = [line["retry_s"] for line in map(json.loads, stand.said().splitlines()) if "retry_s" in line]
    assert delays == [FIRST_S] * 3, "one that was ready is started again soon"


def test_a_program_that_is_killed_leaves_copiers_whose_place_the_next_ones_take(stand: Stand) -> None:
    """In a pod they end with it. Here one lives on until it is killed: its successor waits for the lock."""
    stand.share(FIRST)
    process = stand.start("32Mi")
    stand.until_ready(FIRST)
    (orphan,) = stand.copier_pids()
    process.kill()
    process.wait()
    stand.start("32Mi")
    status = stand.until(lambda status: "another copier" in "".join(g.reason for g in status.gpus), "it is refused")
    assert not status.gpus[0].ready
    os.kill(orphan, signal.SIGKILL)
    stand.until_ready(FIRST)


def test_a_gpu_that_is_given_whole_loses_its_copier_and_keeps_its_file(stand: Stand) -> None:
    stand.share(FIRST, SECOND)
    stand.start("64Mi")
    stand.until_ready(FIRST, SECOND)
    stand.share(FIRST, SECOND, whole=(SECOND,))
    status = stand.until_ready(FIRST)
    assert status.gpus[0].pool_bytes == 32 * MIB, "the other GPU's part stays its own"
    assert status.left_over == (SECOND,)
    eventually(lambda: len(stand.copier_pids()) == 1, "its copier has ended", timeout_s=LIMIT_S)
    stand.share(FIRST, SECOND, released=True)
    stand.until_ready()
    eventually(lambda: not stand.copier_pids(), "no process has a GPU open", timeout_s=LIMIT_S)
    stand.share(FIRST, SECOND)
    assert stand.until_ready(FIRST, SECOND).left_over == ()


def test_a_smaller_pool_than_before_keeps_the_files_that_exist(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("64Mi")
    stand.until_ready(FIRST)
    assert stand.stop() == 0
    stand.share(FIRST, SECOND)
    stand.start("66Mi")
    status = stand.until_ready(FIRST, SECOND)
    assert [gpu.pool_bytes for gpu in status.gpus] == [64 * MIB, 2 * MIB]
    assert stand.stop() == 0
    (stand.pools / f"{SECOND}{SUFFIX}").unlink()
    stand.start("32Mi")
    why = "pool files of other GPUs take all of burst.hostPool"
    status = stand.until(lambda status: why in "".join(gpu.reason for gpu in status.gpus), "no memory for the other")
    assert missing_on_gpu(stand.until(lambda s: s.gpus[0].ready, "the first"), FIRST, boot_id=BOOT_ID, now_s=0) == ""


def test_a_pool_larger_than_the_node_is_refused_and_no_copier_runs(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("32Ti")
    status = stand.until(lambda status: bool(status.reason), "a reason")
    assert status.reason.startswith("burst.hostPool is 32768.0 GiB: the node has ")
    code, text = stand.page("/readyz")
    assert code == 503
    assert text.startswith("the host pool is not ready: burst.hostPool is 32768.0 GiB")
    assert stand.page("/healthz")[0] == 200
    assert stand.copier_pids() == []
    assert list(stand.pools.iterdir()) == []


def test_a_pool_that_cannot_be_pinned_gives_the_reason_and_is_tried_again(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("32Mi", faults="fail cuMemHostRegister_v2")
    why = "the driver cannot register the pool's memory after 0 of 32 MiB: CUDA error 2"
    stand.until(lambda status: why in "".join(gpu.reason for gpu in status.gpus), "the reason")
    eventually(
        lambda: f'restarts_total{{gpu_uuid="{FIRST}"}} 2.0' in stand.page("/metrics")[1], "tries", timeout_s=LIMIT_S
    )
    assert stand.page("/readyz")[0] == 503


def test_a_copier_that_hangs_before_it_is_ready_is_killed(stand: Stand) -> None:
    stand.share(FIRST)
    stand.start("32Mi", "--stall-s", "1", faults="hang cuMemHostRegister_v2 seconds=1000")
    stand.until(lambda status: "made no progress for 1 s" in "".join(g.reason for g in status.gpus), "the reason")


@pytest.mark.parametrize("what", ["connection", "copy"])
def test_a_copier_that_hangs_after_it_was_ready_is_killed_and_started_again(stand: Stand, what: str) -> None:
    """Its bound is 10 s, and it is waited for."""
    stand.share(FIRST)
    faults = "hang cuEventRecord seconds=1000" if what == "copy" else ""
    stand.start("32Mi", faults=faults)
    stand.until_ready(FIRST)
    (hung,) = stand.copier_pids()
    owner, link = Owner(stand.driver), stand.connect(FIRST)
    try:
        if what == "copy":
            owner.make("a", 4 * MIB, seed=1)
            save(link, owner, "a", 1, 8 * MIB, 4 * MIB)
            assert state(link).jobs == 1, "the connection is served"
        else:
            os.kill(hung, signal.SIGSTOP)
        stand.until(lambda status: "its copier hangs" in "".join(gpu.reason for gpu in status.gpus), "the reason")
        stand.until_ready(FIRST)
        assert hung not in stand.copier_pids()
        assert f'restarts_total{{gpu_uuid="{FIRST}"}} 1.0' in stand.page("/metrics")[1]
    finally:
        link.close()
        owner.end()


def test_without_a_file_of_the_device_plugin_of_this_boot_it_waits(stand: Stand) -> None:
    stand.start("32Mi")
    stand.until(lambda status: status.reason == NO_GPUS, "it waits")
    stand.share(FIRST, boot_id="earlier")
    stand.shared.with_name("garbage").write_text("{")
    assert stand.page("/readyz")[0] == 503
    stand.share(FIRST)
    stand.until_ready(FIRST)
    stand.shared.write_text("{")  # what cannot be read changes nothing
    stand.until_ready(FIRST)


def test_folders_that_cannot_have_the_pool_are_named(stand: Stand) -> None:
    stand.share(FIRST)
    (stand.folder / "link").symlink_to(stand.pools)
    stand.start("32Mi", "--pool-dirs", str(stand.folder / "link"))
    # flags of a list add up: the good folder comes first
    stand.until_ready(FIRST)
    assert stand.stop() == 0
    assert "it is a link, not a folder" in stand.said()


@pytest.mark.parametrize("words", [("--pool", "x"), ("--pool", "1Mi")])
def test_wrong_settings_end_it_with_a_sentence(stand: Stand, words: tuple[str, ...]) -> None:
    process: subprocess.Popen[bytes] = stand.start(*words[1:])
    assert process.wait(LIMIT_S) == 2
    assert "pool" in stand.said()
