"""Work that can wait begins between the kubelet's calls, gives way to them, and is put off for a bounded time only."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from deviceplugin import calls_in_progress as calls
from deviceplugin.calls_in_progress import Calls
from deviceplugin.device_ledger import Ledger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.directories import Grants
from deviceplugin.service import Service
from tests.unit.deviceplugin.builders import KnownPods, inventory, node_pod, share, uuid
from tests.unit.deviceplugin.simulated import Context, Nobody, Refusal
from vgpu.api.names import DEFAULT
from vgpu_pb import deviceplugin_pb2 as pb


class Clock:
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
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_work_begins_at_once_where_the_kubelet_has_not_called(clock: Clock) -> None:
    counted = Calls(clock)
    await counted.lull()
    counted.give_way()
    assert clock.slept == []


async def test_a_lull_begins_some_time_after_the_last_answer(clock: Clock) -> None:
    counted = Calls(clock)
    with counted.answering():
        pass
    clock.now_s += calls.LULL_S / 2
    await counted.lull()
    assert sum(clock.slept) == pytest.approx(calls.LULL_S / 2)


async def test_a_node_that_is_never_calm_puts_work_off_for_a_bounded_time(clock: Clock) -> None:
    counted = Calls(clock)
    with counted.answering():
        await counted.lull()
        assert sum(clock.slept) == pytest.approx(calls.LULL_AT_MOST_S)
        clock.slept.clear()
        counted.give_way()
        assert calls.GIVE_WAY_S <= sum(clock.slept) <= 2 * calls.GIVE_WAY_S


async def test_a_call_that_waits_itself_is_in_nobodys_way(clock: Clock) -> None:
    counted = Calls(clock)
    with counted.answering():
        with counted.waiting():
            await counted.lull()
            counted.give_way()
        assert clock.slept == []
        counted.give_way()
        assert clock.slept


def test_a_thread_goes_on_as_soon_as_the_answer_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GIVE_WAY_S", 20.0)
    counted, stopped = Calls(), threading.Event()
    with counted.answering():
        working = threading.Thread(target=lambda: (counted.give_way(), stopped.set()))
        working.start()
        assert not stopped.wait(0.05)
    assert stopped.wait(10)
    working.join()


async def test_an_answer_a_refusal_and_a_wait_for_the_watch_count_as_what_they_are(tmp_path: Any) -> None:
    (tmp_path / "image.so").write_bytes(b"library")
    counted, offer, nobody, pods = Calls(), Offer(DEFAULT, 1024), Nobody(), KnownPods()
    offer.set_inventory(inventory(1))
    seen: list[bool] = []

    async def start(resource: str, ids: Any) -> None:
        seen.append(counted.kubelet_waits)

    grants: Any = Grants(tmp_path / "state", tmp_path / "image.so", boot="boot")
    grants.install()
    ledger = Ledger(pods, offer.inventory, DEFAULT, patience_s=5.0, waiting=counted.waiting)
    serving = Service(
        DEFAULT.gpu_mem, offer=offer, ledger=ledger, grants=grants, prestart=start, state_root=tmp_path / "state",
        observer=nobody, answering=counted.answering,
    )  # fmt: skip
    await serving.PreStartContainer(pb.PreStartContainerRequest(), Context())
    assert seen == [True]
    ids = [f"{uuid(0)}-{slot}" for slot in range(4)]
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    waits = asyncio.ensure_future(serving.Allocate(request, Context()))
    await asyncio.sleep(0)
    assert (waits.done(), counted.kubelet_waits) == (False, False)
    pods.show(node_pod("a", 0, share("main", 4), on=[0]))
    await waits
    ledger._patience_s = 0.0
    ids.append(f"{uuid(0)}-4")
    with pytest.raises(Refusal):
        await serving.Allocate(
            pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]), Context()
        )
    assert not counted.kubelet_waits
