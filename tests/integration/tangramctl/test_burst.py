"""`run --gpu-mem-burst`: the limits that stand beside the grant, by the rules of a pod's."""

from __future__ import annotations

import pytest

from tests.integration.tangramctl.conftest import LARGE, LARGE_MIB, Ctl
from vgpu.api.burst import BurstLimits, burst_from_text
from vgpu.api.contract import BURST
from vgpu.api.grant import GrantGpu


def limits(ctl: Ctl, at: int) -> BurstLimits | None:
    """Of the run that is so many in `ps`."""
    file = ctl.machine() / "grants" / ctl.ps()[at]["key"] / BURST
    return burst_from_text(file.read_text()) if file.exists() else None


def test_a_run_may_burst_to_what_is_written_or_to_what_others_are_not_granted(ctl: Ctl) -> None:
    ctl.probe("2Gi", ["--gpu", 0])
    ctl.probe("2Gi", ["--gpu", 0, "--gpu-mem-burst", "4Gi"])
    ctl.probe("2Gi", ["--gpu", 0, "--gpu-core", 30, "--gpu-mem-burst", "max"])
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
    done = ctl.run("2Gi", "true", options=["--gpu", 0, "--gpu-mem-burst", "40Gi"])
    assert done.returncode == 0
    assert f"40960 MiB are requested of GPU {LARGE}, which has {LARGE_MIB} MiB beside the guarantees" in done.stderr
