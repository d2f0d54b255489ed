"""On which GPUs memory can be moved, and why not; and what processes state of their memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from arbiter.swap.host_pool import HostPool
from arbiter.swap.pool_status import missing_pool
from arbiter.swap.ready_gpus import ANSWERS_WITHIN_S, ReadyGpus
from tests.unit.arbiter.swap.node_kit import BOOT, GPU, GRAIN, SimulatedNode, contract
from tests.unit.arbiter.swap.pair import Pair
from vgpu.api.host_pool import STATUS, PoolGpu, PoolStatus, to_text


@dataclass
class Pool:
    ready: bool = False
    answered: bool = False


def test_a_gpu_is_ready_while_its_pool_is(node: SimulatedNode) -> None:
    node.copier.ready = False
    node.settle(3.0)
    assert not node.swaps.ready(GPU)
    assert node.swaps.changed_gpus() == {GPU}
    assert node.swaps.changed_gpus() == frozenset()
    assert "the copier has prepared" in node.swaps.missing(GPU)
    node.copier.ready = True
    node.settle(2.0)
    assert node.swaps.ready(GPU), "within 2 s"
    assert node.swaps.changed_gpus() == {GPU}
    assert node.swaps.missing(GPU) == ""
    node.copier.kill()
    node.settle(2.0)
    assert not node.swaps.ready(GPU)
    assert node.swaps.changed_gpus() == {GPU}
    assert node.swaps.missing(GPU) != ""


@pytest.mark.parametrize("there", [True, False])
def test_no_limits_are_sent_before_a_copier_has_answered_or_there_is_none(node: SimulatedNode, there: bool) -> None:
    """Otherwise each restart of the arbiter would lower the limits of what runs for a moment."""
    node.copier.there = there
    node.join("a", contract(4, 16))
    process = node.process("a")
    assert process.limits == {}
    node.settle(1.0)
    assert node.swaps.changed_gpus() == {GPU}
    node.swaps.change("a", contract(4, 16))
    node.settle()
    assert process.limits == {0: (4 * GRAIN, 16 * GRAIN)}


def test_a_gpu_whose_memory_was_never_read_has_no_limits_above_guarantees(node: SimulatedNode) -> None:
    """Requests for its memory need no decision, so all limits together could be more than it has."""
    node.swaps._reports.capacity_bytes.clear()
    node.swaps._reports._usable_bytes.clear()
    node.join("a", contract(4, 16))
    node.settle(3.0)
    assert not node.swaps.decides(GPU)
    assert not node.swaps.ready(GPU)
    assert not node.swaps.knows_limits(GPU)
    assert node.swaps.missing(GPU) == "the memory of the GPU was not read yet"
    assert node.swaps.deadline_s() != node.now_s, "nothing to do until then"
    node.swaps.add_gpu(GPU, 16 * GRAIN)
    node.settle(1.0)
    assert node.swaps.decides(GPU) == node.swaps.ready(GPU) is True
    assert node.swaps.changed_gpus() == {GPU}


def test_a_copier_that_does_not_answer_is_waited_for_no_longer_than_that() -> None:
    now_s, pool = 10.0, Pool()
    gpus = ReadyGpus({"GPU-a": cast("HostPool", pool)}, {"GPU-a"}, lambda: now_s)
    gpus.turn()
    assert not gpus.known("GPU-a")
    assert gpus.deadline_s() == now_s + ANSWERS_WITHIN_S
    now_s += ANSWERS_WITHIN_S
    gpus.turn()
    assert (gpus.known("GPU-a"), gpus.ready("GPU-a"), gpus.changed()) == (True, False, {"GPU-a"})
    assert gpus.deadline_s() > 1e9
    pool.ready = True
    gpus.turn()
    assert (gpus.ready("GPU-a"), gpus.changed()) == (True, {"GPU-a"})


def test_what_processes_state_is_reported_once(node: SimulatedNode) -> None:
    pair = Pair(node)
    pair.to_away()
    stated = node.swaps.stated()
    assert {(one.name, one.pid) for one in stated} == {("big", pair.big.pid), ("small", pair.small.pid)}
    for process in (pair.big, pair.small):
        assert node.swaps.process_elastic_bytes(process.name, process.pid, GPU) == node.leased(process.name)
    assert node.swaps.stated() == []


def test_the_reason_is_the_one_of_the_host_pool(tmp_path: Path) -> None:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert missing_pool(tmp_path, GPU, BOOT) == ""
    gpus = (PoolGpu(GPU, reason="memory cannot be registered"), PoolGpu("GPU-b", ready=True))
    (tmp_path / STATUS).write_bytes(to_text(PoolStatus(boot_id=BOOT, written_s=now_s, gpus=gpus)))
    assert missing_pool(tmp_path, GPU, BOOT) == "memory cannot be registered"
    assert missing_pool(tmp_path, "GPU-b", BOOT) == ""
    (tmp_path / STATUS).write_bytes(b"{")
    assert missing_pool(tmp_path, GPU, BOOT) == ""
    (tmp_path / STATUS).unlink()
    os.mkfifo(tmp_path / STATUS)
    assert missing_pool(tmp_path, GPU, BOOT) == ""
