"""A reservation whose Binding the API server accepted, and that the watch has not shown: it lives until the watch has shown all that was before."""

from __future__ import annotations

import pytest

from extender.state import State
from extender.watch_intake import WatchIntake
from tests.builders import PodBuilder, gpu, node, pod, share
from vgpu.api.names import DEFAULT
from vgpu.scheduling.placement import Placement
from vgpu.scheduling.reservations import WatchProgress

FULL_MIB = 81_920
LONG_S = 100_000.0


class BoundPodState:
    """One node with one GPU, a pod bound to it at 10 s, and a watch that shows what a test sets."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.shown = WatchProgress(heard_s=10.0, listed_s=0.0)
        self.state = State(lambda: self.now_s, names=DEFAULT, shown=lambda: self.shown)
        WatchIntake(self.state).node_changed(None, node("n1").with_gpus(1).build())
        self.pod: PodBuilder = pod("a").asking(mib=FULL_MIB)
        self.uid = self.pod.build().uid
        request = self.state.request_of(self.pod.build())
        found = self.state.place(request, ["n1"])
        assert isinstance(found, Placement)
        self.state.reserve(self.uid, "default/a", request, found)
        self.state.on("bind", self.uid)

    def held(self) -> bool:
        self.state.expire()
        return int(self.state.fleet.free_mib[0, 0]) == 0


@pytest.fixture
def cluster() -> BoundPodState:
    return BoundPodState()


def test_no_time_ends_it_while_the_watch_is_silent(cluster: BoundPodState) -> None:
    cluster.state.on("accepted", cluster.uid)
    cluster.now_s = LONG_S
    assert cluster.held()


def test_a_list_from_before_it_was_bound_proves_nothing(cluster: BoundPodState) -> None:
    cluster.state.on("accepted", cluster.uid)
    cluster.now_s, cluster.shown = LONG_S, WatchProgress(heard_s=LONG_S, listed_s=10.0)
    assert cluster.held()


def test_a_later_list_without_it_ends_it(cluster: BoundPodState) -> None:
    cluster.state.on("accepted", cluster.uid)
    cluster.now_s, cluster.shown = 20.0, WatchProgress(heard_s=20.0, listed_s=11.0)
    assert not cluster.held()


def test_a_later_list_with_it_does_not_also_where_it_cannot_be_decoded(cluster: BoundPodState) -> None:
    cluster.state.on("accepted", cluster.uid)
    has = lambda key, uid: (key, uid) == ("default/a", cluster.uid)  # noqa: E731
    cluster.now_s, cluster.shown = 20.0, WatchProgress(heard_s=20.0, listed_s=11.0, has=has)
    assert cluster.held()


def test_the_watch_that_shows_it_has_the_last_word(cluster: BoundPodState) -> None:
    cluster.state.on("accepted", cluster.uid)
    bound = cluster.pod.on("n1").assigned(share(gpu(0), FULL_MIB))
    WatchIntake(cluster.state).pod_changed(None, bound.build())
    cluster.now_s, cluster.shown = 20.0, WatchProgress(heard_s=20.0, listed_s=11.0)
    assert cluster.held()
    WatchIntake(cluster.state).pod_changed(bound.build(), None)
    assert not cluster.held()


@pytest.mark.parametrize(("heard_s", "held"), [(10.0, True), (69.9, True), (70.0, False)])
def test_doubt_ends_when_the_write_cannot_happen_any_more_and_the_watch_has_received_something_since(
    cluster: BoundPodState, heard_s: float, held: bool
) -> None:
    cluster.state.on("no answer", cluster.uid)
    cluster.now_s, cluster.shown = 100.0, WatchProgress(heard_s=heard_s)
    assert cluster.held() is held
