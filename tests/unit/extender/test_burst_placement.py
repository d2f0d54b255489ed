"""The extender counts guarantees: a burst is a preference of placement, and no part of what a pod has, needs or is preempted for."""

from __future__ import annotations

import pytest

from extender.bind import Binder
from extender.filter import filter_nodes
from extender.protocol import FilterArgs, FilterResult
from extender.settings import Settings
from extender.state import State
from extender.watch_intake import WatchIntake
from tests.builders import PodBuilder, gpu, node, pod, share
from tests.unit.extender.extender_parts import ExtenderParts
from vgpu.api.names import DEFAULT

FULL_MIB = 81_920
NODES = ("n1", "n2")


def cluster(*, bursts: bool = True) -> State:
    """n1: one GPU of 80 GiB, n2: one of 40."""
    state = State(lambda: 0.0, names=DEFAULT, bursts=bursts)
    for built in (node("n1").with_gpus(1), node("n2").with_gpus(1, mib=FULL_MIB // 2)):
        WatchIntake(state).node_changed(None, built.build())
    return state


def filtered(state: State, built: PodBuilder) -> FilterResult:
    return filter_nodes(state, FilterArgs(built.build(), NODES))


def bursting(name: str, text: str) -> PodBuilder:
    return pod(name).asking(mib=8192).annotated(gpu_mem_burst=text)


def free_mib(state: State, name: str) -> int:
    return int(state.fleet.free_mib[0, state.fleet.column[name]])


@pytest.mark.parametrize(
    ("text", "bursts", "chosen"),
    [("60Gi", True, "n1"), ("60Gi", False, "n2"), ("30Gi", True, "n2"), ("90Gi", True, "n2"), ("max", True, "n2"), ("nonsense", True, "n2")],
)  # fmt: skip
def test_a_pod_goes_where_its_limit_has_room_and_is_counted_with_its_guarantee(
    text: str, chosen: str, *, bursts: bool
) -> None:
    state = cluster(bursts=bursts)
    assert filtered(state, bursting("a", text)).node_names == [chosen]
    assert free_mib(state, chosen) == {"n1": FULL_MIB, "n2": FULL_MIB // 2}[chosen] - 8192


def test_as_many_pods_fit_as_their_guarantees_let_in() -> None:
    state = cluster()
    answers = [filtered(state, bursting(f"p{at}", "40Gi")).node_names for at in range(16)]
    assert sorted(map(str, answers)) == ["['n1']"] * 10 + ["['n2']"] * 5 + ["[]"]
    assert (free_mib(state, "n1"), free_mib(state, "n2")) == (0, 0)


@pytest.mark.parametrize(("bursts", "chosen"), [(True, 1), (False, 0)])
async def test_bind_chooses_a_gpu_with_room_on_the_node_that_kube_scheduler_chose(*, bursts: bool, chosen: int) -> None:
    settings = Settings(burst_enabled=bursts, _cli_parse_args=False)  # type: ignore[call-arg]
    parts = ExtenderParts(settings, n1=2)
    parts.report(pod("other").asking(mib=30 * 1024).on("n1").assigned(share(gpu(0), 30 * 1024)))
    one = bursting("a", "70Gi").annotated(placement="scheduler")
    parts.report(one)
    parts.server.answer = lambda method, *_: one.json() if method == "GET" else b"{}"
    binder = Binder(parts.state, parts.server, timeout_s=1, lifted=parts.preemption.lifted)
    assert await binder.bind(parts.binding(one, "n1")) == "bound"
    allocation = parts.state.allocations.get(one.build().uid)
    assert allocation is not None
    assert allocation.assignment.containers["main"] == (share(gpu(chosen), 8192),)


def test_what_preemption_reads_of_a_pod_is_the_same_with_and_without_a_burst() -> None:
    state, plain = cluster(), pod("a").asking(mib=8192, core=20)
    bursts = plain.annotated(gpu_mem_burst="max", gpu_core_burst="100", gpu_mem_burst_wait="5")
    assert state.request_of(bursts.build()) == state.request_of(plain.build())
