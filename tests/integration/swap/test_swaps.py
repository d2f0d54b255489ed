"""Containers that use more than the GPU has together: by arbiter, copier and library, as on a node."""

from __future__ import annotations

import subprocess

from tests.built import fake_build, shim_build
from tests.integration.swap.conftest import BurstNode, two
from tests.integration.swap.polling import until


def smi(node: BurstNode, name: str) -> list[int]:
    """Total, used and free MiB that nvidia-smi shows in a container."""
    words = ["--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits"]
    return [int(word) for word in shown(node, name, *words).split(",")]


def shown(node: BurstNode, name: str, *words: str) -> str:
    """What nvidia-smi prints in a container."""
    env = node.driver.env(
        LD_PRELOAD=str(shim_build() / "libtangram.so"), TANGRAM_GRANT=str(node.grants / name / "grant")
    )
    program = fake_build() / "nvidia-smi"
    return subprocess.run([program, *words], env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def listed_mib(node: BurstNode, name: str, pid: int) -> int:
    """What nvidia-smi lists for a process in a container."""
    row = next((line.split() for line in shown(node, name).splitlines() if f" {pid} " in line), None)
    return int(row[-2].removesuffix("MiB")) if row else 0


def test_nvidia_smi_shows_the_limit_and_counts_memory_in_host_memory_as_used(small: BurstNode) -> None:
    small.grant("none", 24, 200)
    until(lambda: smi(small, "none") == [200, 0, 200])  # its guarantee, until the copier is ready
    first, _ = two(small)
    away_mib = small.away_mib("first")
    for name in ("first", "second"):
        total, used, free = smi(small, name)
        assert total == 200
        assert away_mib <= used
        assert total - used - free in (0, 1), "each is rounded down"
    until(lambda: listed_mib(small, "first", first.process.pid) >= away_mib + 8)  # with its context of 8 MiB
    assert first.do("memory()")[1] == 200, "as CUDA shows it"


def test_an_idle_container_gives_way_and_comes_back_whole(node: BurstNode) -> None:
    first, second = node.run("first"), node.run("second")
    assert first.do("fill(600, 1)") == 0
    free, total = first.do("memory()")
    assert total == 900
    assert 0 < free <= 300
    assert second.do("fill(600, 2)") == 0, "the first is idle: it gives way"
    assert second.do("wrong()") == 0
    assert first.do("wrong()") == 0, "it comes back as soon as it works"
    assert second.do("wrong()") == 0
    assert node.swaps_out() >= 2
    assert node.misuses() == ""
