"""Which container may have memory that NVML lists for no process, by the processes that have a GPU open."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from arbiter.memory import device_openers as openers
from arbiter.memory.device_openers import DeviceOpeners, Opener, OpenerSearch
from nvml.errors import NvmlAway, NvmlError
from nvml.messages import MOST_MAPS, AnyReply, AnyRequest, DescriptorsReply, DescriptorsRequest
from nvml.queries import Nvml
from tests.unit.arbiter.conftest import GPU, OTHER_GPU, wait_for
from vgpu.api.cgroup import NOWHERE, CgroupOwner
from vgpu.memory.attribution import Owner, Owners

X, Y, Z = "c0" * 32, "d1" * 32, "e2" * 32
OWNERS = Owners([Owner("a", "A", X), Owner("b", "B", Y), Owner("c1", "C"), Owner("c2", "C")])
PLACES = {
    11: CgroupOwner("A", X),
    12: CgroupOwner("A", X),
    21: CgroupOwner("B", Y),
    31: CgroupOwner("C", Z),
    41: NOWHERE,
    51: CgroupOwner("other", Z),
}
ALL = frozenset({"a", "b", "c1", "c2"})


@dataclass
class Plugin:
    """Answers which processes have a GPU open."""

    opens: dict[int, bool | None] = field(default_factory=dict)
    requested: list[tuple[int, ...]] = field(default_factory=list)
    away: bool = False
    times: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def call_all(self, requests: Sequence[AnyRequest]) -> list[AnyReply]:
        (request,) = requests
        assert isinstance(request, DescriptorsRequest)
        self.times.release()
        if self.away:
            raise NvmlAway("there is no plugin")
        self.requested.append(tuple(pid for pid, _ in request.processes))
        return [DescriptorsReply(tuple(self.opens.get(pid, False) for pid, _ in request.processes))]


@dataclass
class SearchedNode:
    """A node with a process for each of PLACES."""

    proc: Path
    plugin: Plugin = field(default_factory=Plugin)
    ended: set[int] = field(default_factory=set)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        for pid in PLACES:
            (self.proc / str(pid)).mkdir()
        (self.proc / "self").mkdir()
        self.openers = DeviceOpeners(
            Nvml(self.plugin),
            PLACES.__getitem__,
            lambda pid: 0 if pid in self.ended else 7,
            self.proc,
            lambda: self.now_s,
        )

    def search(self, times: int = 2, known: frozenset[int] = frozenset(), **keys: frozenset[str]) -> dict[str, Opener]:
        of = {GPU: keys.get("keys", ALL)} | ({OTHER_GPU: keys["other"]} if "other" in keys else {})
        self.openers.want(OpenerSearch(of, OWNERS, known))
        for _ in range(times):
            self.openers.search()
        return dict(self.openers.found)


@pytest.fixture
def node(tmp_path: Path) -> SearchedNode:
    return SearchedNode(tmp_path)


def test_a_search_for_memory_that_is_gone_does_not_count_for_memory_that_appears(node: SearchedNode) -> None:
    node.plugin.opens = {11: True}
    assert node.search(1) == {}
    node.openers.want(OpenerSearch())
    assert node.search(1) == {}
    assert node.search(1) == {GPU: Opener("a", (11,))}


def test_the_only_container_with_such_processes_is_named_after_two_searches(node: SearchedNode) -> None:
    node.plugin.opens = {11: True, 12: True, 21: False}
    assert node.search(1) == {}
    assert node.search(1) == {GPU: Opener("a", (11, 12))}
    assert sorted(node.plugin.requested[0]) == [11, 12, 21, 31], "processes of no container there are not searched"
    node.plugin.opens = {}
    assert node.search(1) == {}


@pytest.mark.parametrize(
    ("opens", "why"),
    [
        ({11: True, 21: True}, "two containers have"),
        ({11: True, 21: None}, "one is unknown"),
        ({31: True}, "its pod has two grants and no ID"),
        ({41: True, 51: True}, "a process without a grant there does not count"),
    ],
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_no_container_is_named_if(node: SearchedNode, opens: dict[int, bool | None], why: str) -> None:
    node.plugin.opens = opens
    assert node.search() == {}, why


def test_a_process_that_nvml_lists_or_that_is_connected_is_no_candidate(node: SearchedNode) -> None:
    node.plugin.opens = {11: True, 21: True}
    assert node.search(known=frozenset({21})) == {GPU: Opener("a", (11,))}
    assert all(21 not in pids for pids in node.plugin.requested)


def test_a_process_that_has_ended_meanwhile_is_no_secret(node: SearchedNode) -> None:
    node.plugin.opens = {11: True, 21: None}
    node.ended.add(21)
    assert node.search() == {GPU: Opener("a", (11,))}


def test_each_gpu_has_its_own_containers(node: SearchedNode) -> None:
    node.plugin.opens = {11: True, 21: True}
    found = node.search(keys=frozenset("a"), other=frozenset("b"))
    assert found == {GPU: Opener("a", (11,)), OTHER_GPU: Opener("b", (21,))}
    node.openers.want(OpenerSearch({GPU: frozenset("b")}, OWNERS))
    assert node.openers.found == {}, "the container has no share there any more"


def test_the_processes_of_one_call_and_of_a_search_are_limited(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openers, "MOST_MAPS", 3)
    node.search(1)
    assert [len(pids) for pids in node.plugin.requested] == [3, 1]
    assert {pid for pids in node.plugin.requested for pid in pids} == {11, 12, 21, 31}
    assert MOST_MAPS >= 3
    monkeypatch.setattr(openers, "MOST_SEARCHED", 3)
    with pytest.raises(NvmlError, match="have 4 processes: at most 3 are searched"):
        node.search(1)
    monkeypatch.setattr(openers, "MOST_PIDS", 3)
    with pytest.raises(NvmlError, match="more than 3 processes"):
        node.search(1)


def test_a_search_that_takes_too_long_reports_the_rest_as_unknown(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openers, "MOST_MAPS", 2)
    node.plugin.opens = {11: True}
    assert node.search() == {GPU: Opener("a", (11,))}
    monkeypatch.setattr(openers, "SEARCH_S", 0.0)
    assert node.search() == {}


def test_the_thread_searches_while_a_search_is_wanted_and_survives_a_plugin_that_is_away(
    node: SearchedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openers, "EVERY_S", 0.01)
    node.plugin.opens = {11: True}
    node.openers.start()
    try:
        node.openers.want(OpenerSearch({GPU: ALL}, OWNERS))
        wait_for(lambda: node.openers.found)
        node.plugin.away = True
        wait_for(lambda: not node.openers.found)
        node.plugin.away = False
        wait_for(lambda: node.openers.found)
        node.openers.want(OpenerSearch())
        assert node.openers.found == {}
    finally:
        node.openers.close()
    assert not node.openers._reader.alive
