"""Work that can wait begins between the kubelet's calls, waits for them, and is put off for a bounded time only."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from deviceplugin import calls_in_progress as calls
from deviceplugin.calls_in_progress import CallsInProgress
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.service import DevicePluginService
from tests.unit.deviceplugin.builders import KnownPods, inventory, node_pod, share, uuid
from tests.unit.deviceplugin.simulated_plugin import CallRefused, GrpcContext, SilentObserver
from vgpu.api.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as pb


class SteppedClock:
    """Goes on by what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slept = 100.0, list[float]()
        monkeypatch.setattr(calls.asyncio, "sleep", self._sleep)
        monkeypatch.setattr(calls.time, "sleep", self._pass)

    def __call__(self) -> float:
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedClock:
    return SteppedClock(monkeypatch)


async def test_work_begins_at_once_where_the_kubelet_has_not_called(clock: SteppedClock) -> None:
    counted = CallsInProgress(clock)
    await counted.until_idle()
    counted.yield_to_kubelet()
    assert clock.slept == []


async def test_a_lull_begins_some_time_after_the_last_answer(clock: SteppedClock) -> None:
    counted = CallsInProgress(clock)
    with counted.answering():
        pass
    clock.now_s += calls.IDLE_S / 2
    await counted.until_idle()
    assert sum(clock.slept) == pytest.approx(calls.IDLE_S / 2)


async def test_a_node_that_is_never_calm_puts_work_off_for_a_bounded_time(clock: SteppedClock) -> None:
    counted = CallsInProgress(clock)
    with counted.answering():
        await counted.until_idle()
        assert sum(clock.slept) == pytest.approx(calls.IDLE_WAIT_S)
        clock.slept.clear()
        counted.yield_to_kubelet()
        assert calls.YIELD_S <= sum(clock.slept) <= 2 * calls.YIELD_S


async def test_a_call_that_waits_itself_delays_no_other_work(clock: SteppedClock) -> None:
    counted = CallsInProgress(clock)
    with counted.answering():
        with counted.waiting():
            await counted.until_idle()
            counted.yield_to_kubelet()
        assert clock.slept == []
        counted.yield_to_kubelet()
        assert clock.slept


def test_a_thread_goes_on_as_soon_as_the_answer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "YIELD_S", 20.0)
    counted, stopped = CallsInProgress(), threading.Event()
    with counted.answering():
        working = threading.Thread(target=lambda: (counted.yield_to_kubelet(), stopped.set()))
        working.start()
        assert not stopped.wait(0.05)
    assert stopped.wait(10)
    working.join()


async def test_an_answer_a_refusal_and_a_wait_for_the_watch_count_as_what_they_are(tmp_path: Any) -> None:
    (tmp_path / "image.so").write_bytes(b"library")
    counted, offer, silent, pods = CallsInProgress(), Offer(DEFAULT, 1024), SilentObserver(), KnownPods()
    offer.set_inventory(inventory(1))
    seen: list[bool] = []

    async def start(resource: str, ids: Any) -> None:
        seen.append(counted.kubelet_waits)

    grants: Any = GrantDirectories(tmp_path / "state", tmp_path / "image.so", boot="boot")
    grants.install()
    ledger = DeviceLedger(pods, offer.inventory, DEFAULT, pod_wait_s=5.0, waiting=counted.waiting)
    serving = DevicePluginService(
        DEFAULT.gpu_mem, offer=offer, ledger=ledger, grants=grants, prestart=start, state_root=tmp_path / "state",
        observer=silent, answering=counted.answering,
    )  # fmt: skip
    await serving.PreStartContainer(pb.PreStartContainerRequest(), GrpcContext())
    assert seen == [True]
    ids = [f"{uuid(0)}-{slot}" for slot in range(4)]
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    waits = asyncio.ensure_future(serving.Allocate(request, GrpcContext()))
    await asyncio.sleep(0)
    assert (waits.done(), counted.kubelet_waits) == (False, False)
    pods.show(node_pod("a", 0, share("main", 4), on=[0]))
    await waits
    ledger._pod_wait_s = 0.0
    ids.append(f"{uuid(0)}-4")
    with pytest.raises(CallRefused):
        await serving.Allocate(
            pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]), GrpcContext()
        )
    assert not counted.kubelet_waits
