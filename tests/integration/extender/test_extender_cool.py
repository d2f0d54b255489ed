"""Policy `cool` from the node's annotation to the pod's Binding: among equal GPUs the one of the cooler class."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.builders import NodeBuilder, gpu, node, pod
from tests.fake_api import FakeApi
from tests.integration.extender.scheduler import running
from vgpu.api.codec import assignment_from_json
from vgpu.api.inventory import HeatClass

MIB = 8192


def with_heat(name: str, *classes: HeatClass, version: int = 1) -> NodeBuilder:
    """A node of equal GPUs, by their heat classes."""
    gpus = (replace(gpu(at, 81_920, name), heat=heat) for at, heat in enumerate(classes))
    return node(name).with_inventory(*gpus).at_version(version)


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    async with FakeApi() as server:
        server.put(with_heat("n1", "hot", "normal").plain())
        server.put(with_heat("n2", "normal", "cool").plain())
        yield server


def bound(api: FakeApi) -> list[tuple[str, str]]:
    """Node and GPU of each Binding."""
    return [
        (one["target"]["name"], assigned.uuid)
        for one in api.bindings
        for assigned in assignment_from_json(one["metadata"]["annotations"]["tangram.sh/assignment"]).held()
    ]


async def test_the_cooler_gpu_among_equals_is_bound_and_a_class_that_changed_is_followed(api: FakeApi) -> None:
    uuids = {name: [gpu(at, 81_920, name).uuid for at in range(2)] for name in ("n1", "n2")}
    async with running(api) as scheduler:
        for name, asking in (("a", {"gpus": 1}), ("b", {"mib": MIB, "core": 10})):
            built = pod(name).asking(**asking).annotated(placement="cool")  # type: ignore[arg-type]
            api.put(built.plain())
            (chosen,) = (await scheduler.filter(built, "n1", "n2"))["NodeNames"]
            assert await scheduler.bind(built, chosen) == ""
            api.put(with_heat("n1", "cool", "hot", version=2).plain())
            fleet = scheduler.extender.state.fleet
            seen = lambda fleet=fleet: fleet.inventory["n1"].gpus[0].heat == "cool" or None  # noqa: E731
            assert await scheduler.extender.nodes.wait_for(seen, timeout_s=10)
    assert bound(api) == [("n2", uuids["n2"][1]), ("n1", uuids["n1"][0])]


async def test_binpack_does_not_look_at_heat(api: FakeApi) -> None:
    built = pod("a").asking(mib=MIB, core=10).annotated(placement="binpack")
    api.put(built.plain())
    async with running(api) as scheduler:
        assert (await scheduler.filter(built, "n1", "n2"))["NodeNames"] == ["n1"]
        assert await scheduler.bind(built, "n1") == ""
    assert bound(api) == [("n1", gpu(0, 81_920, "n1").uuid)]
