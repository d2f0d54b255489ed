"""Containers that may burst above 1000 MiB of the one GPU that they see, and their programs.

Two kinds: of a node whose arbiter serves leases and sends limits (`bursting_stage`), and of a node whose arbiter is the test's (`peer_stage`, `arbiter`).
`true_mib` of a stage is the driver's own count of a process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.integration.shim.conftest import GPUS, Stage, Worker, a_node
from tests.integration.shim.swapping_arbiter import SwappingArbiter, swapping_arbiter
from vgpu.api.burst import BurstLimits, burst_to_text
from vgpu.api.grant import GrantGpu

ANCHOR_MIB = 2
"""The page of the allocation by which cuMemFree waits as the driver's does (anchor.c)."""
SENDS_LIMITS = "import tests.integration.shim.burst_limits\n"
"""What an arbiter executes before it starts."""
SAME = (
    "MEMORY_TYPE",
    "HOST_POINTER",
    "SYNC_MEMOPS",
    "IS_MANAGED",
    "DEVICE_ORDINAL",
    "MAPPED",
    "ALLOWED_HANDLE_TYPES",
    "ACCESS_FLAGS",
    "MEMPOOL_HANDLE",
    "IS_LEGACY_CUDA_IPC_CAPABLE",
)
"""Attributes that all plain allocations of one GPU have in common."""
_keys = itertools.count()


@pytest.fixture(scope="module")
def bursting_node(build: Path) -> Iterator[Stage]:
    """Its arbiter sends limits of bursts (burst_limits.py)."""
    with a_node(build, prelude=SENDS_LIMITS) as made:
        made.start_arbiter("--grace-ms", "0")
        yield made


@pytest.fixture
def bursting_stage(bursting_node: Stage) -> Iterator[Stage]:
    """A container of that node with 1000 MiB of the first GPU, of which 999 are guaranteed. It may burst once it has its file."""
    stage = Stage(bursting_node.build, bursting_node.folder, f"e{next(_keys)}")
    stage.grant((GPUS[0], 1000))
    yield stage
    stage.close()


@pytest.fixture
def peer_stage(bare_stage: Stage) -> Stage:
    """A container that may burst, whose arbiter is the test's."""
    bare_stage.grant((GPUS[0], 1000))
    burst(bare_stage)
    return bare_stage


def arbiter(stage: Stage, **how: object) -> AbstractContextManager[SwappingArbiter]:
    """The test as the arbiter of a container."""
    return swapping_arbiter(stage.folder / "grants" / stage.key, **how)


def burst(stage: Stage, mib: int = 16000, *, wait_s: int = 30, text: str = "", key: str = "") -> None:
    """Writes the container's file `burst`: a limit on the first GPU, or this text."""
    folder = stage.folder / "grants" / (key or stage.key)
    (folder / ".burst").write_text(text or burst_to_text(BurstLimits((GrantGpu(GPUS[0], mib),), wait_s)))
    (folder / ".burst").rename(folder / "burst")


def worker(stage: Stage, key: str = "", **env: str) -> Worker:
    """A program that sees one GPU."""
    return stage.worker(key=key, CUDA_VISIBLE_DEVICES="0", **env)


def elastic(stage: Stage) -> Worker:
    """A program in a container that may burst."""
    burst(stage)
    return worker(stage)


def plain(stage: Stage) -> Worker:
    """A program in a container that may not."""
    stage.grant((GPUS[0], 1000), key="plain")
    return worker(stage, "plain")


def is_elastic(gpu: Worker, at: int) -> bool:
    """The library gives numbers of its own to buffers of elastic memory."""
    number: int = gpu.must(f"attributes({at}, 'BUFFER_ID')")[0]
    return bool(number >> 62)
