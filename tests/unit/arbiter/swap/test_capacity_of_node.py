"""What the swap policy counts as the memory of a GPU: all that the driver leaves, less what others use, and the copier's context once and always."""

from __future__ import annotations

from pathlib import Path

from arbiter.memory.meter import MemoryReading, SeenProcess
from arbiter.node_swapping import NodeSwapping
from tests.unit.arbiter.swap.node_kit import GPU, GRAIN, SimulatedNode
from vgpu.memory.capacity import READINGS

MIB = 2**20
USABLE = 64 * GRAIN
COPIER, TRAINING, DISPLAY = 7, 8, 9


def capacity(node: SimulatedNode) -> int:
    (facts,) = node.swaps.gpus()
    return facts.capacity_bytes


def reading(used: dict[int, int]) -> MemoryReading:
    """NVML lists these processes. Only the training is a container's."""
    seen = {pid: SeenProcess(1, "k" if pid == TRAINING else None, 1) for pid in used}
    return MemoryReading(0.0, {GPU: used}, seen, used={GPU: sum(used.values())}, usable={GPU: USABLE})


def measured(node: SimulatedNode, used: dict[int, int]) -> int:
    swapping = NodeSwapping(node.swaps, {}, lambda: node.now_s)
    for _ in range(READINGS):
        swapping.measure(reading(used))
    return capacity(node)


def test_the_copiers_context_is_subtracted_once_from_the_moment_it_is_stated(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, capacity=64)
    node.copier.context_mib = 3
    assert capacity(node) == USABLE, "before a copier has stated its context: nobody gets more than guarantees then"
    node.settle(1.0)
    assert capacity(node) == USABLE - 3 * MIB
    assert measured(node, {COPIER: 3 * MIB, TRAINING: 9 * MIB}) == USABLE - 3 * MIB, "NVML lists the context, too"
    assert measured(node, {COPIER: 4 * MIB, DISPLAY: 2 * MIB}) == USABLE - 6 * MIB, "what NVML lists is more"
    node.close()


def test_the_context_is_kept_free_while_there_is_no_copier(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, capacity=64)
    node.copier.context_mib = 3
    node.settle(1.0)
    node.copier.kill()
    assert measured(node, {TRAINING: 9 * MIB}) == USABLE - 3 * MIB
    node.close()
