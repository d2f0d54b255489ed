"""`run --gpu-mem-burst`: the limits that stand beside the grant, by the rules of a pod's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tangramctl import copiers
from tangramctl.copiers import pool_folder
from tangramctl.machine import StateRoot
from tests.integration.tangramctl.conftest import LARGE, LARGE_MIB, Ctl
from vgpu.api.burst import BurstLimits, burst_from_text
from vgpu.api.contract import BURST
from vgpu.api.grant import GrantGpu

POOL = ("--host-pool", "64Mi")


def limits(ctl: Ctl, at: int) -> BurstLimits | None:
    """Of the run that is so many in `ps`."""
    file = ctl.machine() / "grants" / ctl.ps()[at]["key"] / BURST
    return burst_from_text(file.read_text()) if file.exists() else None


def test_a_run_may_burst_to_what_is_written_or_to_what_others_are_not_granted(ctl: Ctl) -> None:
    ctl.probe("2Gi", ["--gpu", 0])
    ctl.probe("2Gi", ["--gpu", 0, "--gpu-mem-burst", "4Gi", *POOL])
    ctl.probe("2Gi", ["--gpu", 0, "--gpu-core", 30, "--gpu-mem-burst", "max", *POOL])
    found = [limits(ctl, at) for at in range(3)]
    assert found[0] is None
    assert found[1] == BurstLimits((GrantGpu(LARGE, 4096, 0),))
    assert found[2] == BurstLimits((GrantGpu(LARGE, LARGE_MIB - 4096, 30),))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1Gi", "--gpu-mem-burst is 1Gi, which is 1024 MiB: it must be 2048 MiB, which --gpu-mem guarantees, to 16777215 MiB, or max"),
        ("4gb", "--gpu-mem-burst: '4gb' is not a Kubernetes quantity"),
        ("Max", "it may also be max"),
    ],
)  # fmt: skip
def test_what_is_no_burst_is_refused(ctl: Ctl, text: str, why: str) -> None:
    done = ctl.run("2Gi", "true", options=["--gpu-mem-burst", text])
    assert done.returncode == 2
    assert why in done.stderr


def test_a_burst_above_what_is_there_is_cut_and_reported(ctl: Ctl) -> None:
    done = ctl.run("2Gi", "true", options=["--gpu", 0, "--gpu-mem-burst", "40Gi", *POOL])
    assert done.returncode == 0
    assert f"40960 MiB are requested of GPU {LARGE}, which has {LARGE_MIB} MiB beside the guarantees" in done.stderr


def used_mib(ctl: Ctl) -> list[tuple[int, int]]:
    """Of each run in `ps`: what it has, and how much of it is in host memory."""
    gpus = [entry["gpus"][0] for entry in ctl.ps()]
    return [(gpu["leased_bytes"] >> 20, gpu["away_bytes"] >> 20) for gpu in gpus]


def test_two_runs_that_do_not_fit_together_have_more_than_their_guarantees(ctl: Ctl) -> None:
    ctl.gpus.write_text(f"gpu t4 uuid={LARGE} memory_mib=1024 context_mib=0\n")
    plain = ctl.probe("64Mi")
    burst = ["--gpu-mem-burst", "700Mi", "--host-pool", "1Gi"]
    first, second = ctl.probe("128Mi", burst), ctl.probe("128Mi", burst)
    assert plain.alloc(32) == 0, "its arbiter was replaced by one with bursts"
    assert first.info_mib()[1] == 700
    for run in (first, second):
        assert [run.alloc(100) for _ in range(5)] == [0] * 5
    found = used_mib(ctl)
    assert sum(away for _, away in found) > 0
    assert [has >= 500 for has, _ in found] == [False, True, True]
    shown = ctl.call("ps").stdout
    assert "128-700Mi" in shown
    assert " are in host memory; " in shown
    folders = pool_folder_of(ctl)
    assert folders.is_dir()
    for run in (first, second, plain):
        run.kill()
    assert ctl.call("arbiter", "stop", "--force").returncode == 0
    assert not folders.exists()


def pool_folder_of(ctl: Ctl) -> Path:
    return pool_folder(StateRoot(ctl.machine()))


def test_without_a_copier_a_run_has_its_guarantee_and_a_sentence_says_so(ctl: Ctl) -> None:
    alone = ctl.folder / "alone"
    alone.mkdir()
    shutil.copy(ctl.build / "libtangram.so", alone)
    (alone / "tangram-trial").symlink_to(ctl.build / "tangram-trial")
    (alone / "fake").symlink_to(ctl.build / "fake")
    ctl.env["TANGRAMCTL_LIBRARY"] = str(alone / "libtangram.so")
    probe = ctl.probe("128Mi", ["--gpu", 0, "--gpu-mem-burst", "700Mi"])
    assert probe.info_mib()[1] == 128
    assert limits(ctl, 0) is None
    assert f"no tangram-copier beside {alone}/libtangram.so" in (written := probe.end())
    assert "the run has what --gpu-mem guarantees, and no more" in written


@pytest.mark.parametrize(("limit", "available", "pool"), [(700, 100_000, 1400), (700, 1001, 500), (1, 0, 2)])
def test_a_pool_is_twice_the_limit_and_at_most_half_of_what_is_free(limit: int, available: int, pool: int) -> None:
    assert copiers.pool_mib(limit, available) == pool
