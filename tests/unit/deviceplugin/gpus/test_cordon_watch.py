"""The device plugin carries out cordons: what is let go of, tried, and offered again, with pods, NVML and the self-test as the test says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from deviceplugin.gpus import cordon_watch
from deviceplugin.gpus.cordon_watch import CordonWatch, OpenedGpus
from deviceplugin.gpus.offer import Offer
from deviceplugin.gpus.untested import UntestedGpus
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.usage_records import UsageRecord
from kube.objects import Pod
from nvml.descriptors import opens
from nvml.withheld import read_withheld
from tests.builders import cordoned, pod
from vgpu.api.codec import assignment_to_json
from vgpu.api.cordon import Cordon, cordons_to_json
from vgpu.api.grant import AssignedGpu, Assignment
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, Withdrawal
from vgpu.api.names import DEFAULT
from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict
from vgpu.health.cordons import Opened
from vgpu.health.node_health import NodeHealth

ONE = Gpu("GPU-00000000-0000-0000-0000-000000000001", 0, "NVIDIA T4", 16_384, pci="00000000:17:00.0")
TWO = Gpu("GPU-00000000-0000-0000-0000-000000000002", 1, "NVIDIA T4", 16_384, minor=1, pci="00000000:29:00.0")
WORKS = TrialVerdict(TrialOutcome.WORKS)


class Watched:
    """A node with two GPUs. Its NVML closes what it must at once, unless `open` has it."""

    def __init__(self, folder: Path, *, tests: bool = True, look_s: float = 30.0) -> None:
        self.path = folder / "nvml.withheld"
        self.offer, self.pods, self.health = Offer(DEFAULT, 1024), NodePods(DEFAULT, 1024), NodeHealth()
        self.synced = True
        self.pods.attach(self._no_change, lambda: self.synced)
        self.open: set[str] = set()
        self.gone: list[UsageRecord] = []
        self.verdicts: asyncio.Queue[TrialVerdict] = asyncio.Queue()
        self.tried: list[str] = []
        self.prepared: list[str] = []
        self.watch = CordonWatch(
            self.offer, self.pods, lambda: self.gone, self.path, self._opened, self._try_out if tests else None, self._tested,
            before_offer=self._before_offer, untested=UntestedGpus(folder / "gpus.untested"), failed=self.health.failed_test, look_s=look_s,
        )  # fmt: skip
        for uuid, owed in self.watch.load().items():
            if owed.failed:
                self.health.remember_failed(uuid, owed.failed, owed.since_s)
        self.offer.hold_back = self.watch.hold_back
        self.offer.set_inventory(Inventory((ONE, TWO)))

    async def _no_change(self) -> None:
        await asyncio.Event().wait()

    def _opened(self, gpus: Collection[Gpu]) -> Opened:
        out = read_withheld(self.path)
        return Opened(frozenset(g.uuid for g in gpus if g.uuid not in self.open and g.pci[4:] in out))

    async def _try_out(self, uuid: str) -> TrialVerdict:
        self.tried.append(uuid)
        return await self.verdicts.get()

    def _tested(self, uuid: str, why: str) -> None:
        if self.health.tested(uuid, why, 7.0):
            self.offer.set_conditions(self.health.conditions)

    async def _before_offer(self, uuid: str) -> None:
        assert not [one for one in self.offer.inventory().gpus if one.uuid == uuid and one.offered]
        self.prepared.append(uuid)

    def order(self, *gpus: Gpu) -> None:
        self.watch.node_seen(cordons_to_json({one.uuid: Cordon() for one in gpus}))

    def cordons(self) -> list[str]:
        return [one.cordon for one in self.offer.inventory().gpus]

    async def step(self) -> list[str]:
        """One round, and what then can be done of the self-tests."""
        await self.watch.once()
        for _ in range(5):
            await asyncio.sleep(0)
        return self.cordons()

    async def cordon_and_uncordon(self, gpu: Gpu) -> None:
        """It is tried from now on."""
        self.order(gpu)
        await self.step()
        self.order()
        await self.step()


def on(name: str, gpu: Gpu) -> Pod:
    assigned = AssignedGpu(gpu.uuid, gpu.index, 8192)
    return msgspec.convert(pod(name).asking(mib=8192).on("n1").assigned(assigned).plain(), Pod)


async def test_a_gpu_is_let_go_of_when_its_last_pod_is_gone_and_no_process_has_it_open(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.open.add(ONE.uuid)
    first = on("a", ONE)
    made.pods.on_change(None, first)
    made.order(ONE)
    assert await made.step() == ["cordoned", ""]
    assert not read_withheld(made.path)
    made.pods.on_change(first, None)
    assert await made.step() == ["cordoned", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.open.clear()
    assert await made.step() == ["released", ""]


async def test_a_gpu_is_kept_open_while_processes_of_a_pod_that_left_the_api_may_use_it(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    first = on("a", ONE)
    made.pods.on_change(None, first)
    made.order(ONE)
    made.pods.on_change(first, None)
    made.gone.append(UsageRecord(first.uid, "d", "a", (AssignedGpu(ONE.uuid, ONE.index, 8192),)))
    assert await made.step() == ["cordoned", ""]
    assert not read_withheld(made.path), "no check of processes has made it an orphan yet"
    made.gone.clear()
    assert await made.step() == ["released", ""]


@pytest.mark.parametrize(
    ("text", "states"),
    [
        ('{"v": 99}', ["cordoned", "cordoned"]),
        ("no assignment", ["cordoned", "cordoned"]),
        (assignment_to_json(Assignment({"main": (AssignedGpu(TWO.uuid, 1, 8),)})), ["released", "cordoned"]),
    ],
    ids=["newer", "damaged", "of-another-size"],
)
async def test_a_pod_whose_assignment_cannot_be_served_counts_as_having_its_gpus_or_any(
    tmp_path: Path, text: str, states: list[str]
) -> None:
    made = Watched(tmp_path)
    plain = on("a", TWO).plain()
    plain["metadata"]["annotations"][DEFAULT.assignment] = text
    made.pods.on_change(None, msgspec.convert(plain, Pod))
    assert made.pods.unreadable()
    made.order(ONE, TWO)
    assert await made.step() == states
    assert len(read_withheld(made.path)) == states.count("released")


async def test_a_gpu_that_is_uncordoned_is_offered_after_its_self_test(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.order(ONE)
    assert await made.step() == ["released", ""]
    made.order()
    assert await made.step() == ["testing", ""]
    assert not read_withheld(made.path)
    assert made.tried == [ONE.uuid]
    assert not made.offer.inventory().gpus[0].offered
    assert made.prepared == []
    made.verdicts.put_nowait(WORKS)
    assert await made.step() == ["", ""]
    assert made.prepared == [ONE.uuid], "before it is offered"
    assert made.offer.inventory().gpus[0].offered


@pytest.mark.parametrize("outcome", [TrialOutcome.FAULTY, TrialOutcome.HUNG])
async def test_a_gpu_that_fails_its_self_test_stays_withdrawn_with_the_reason(
    tmp_path: Path, outcome: TrialOutcome
) -> None:
    made = Watched(tmp_path)
    await made.cordon_and_uncordon(ONE)
    made.verdicts.put_nowait(TrialVerdict(outcome, "memory does not keep what is copied to it: first at byte 4"))
    await made.step()
    gpu = made.offer.inventory().gpus[0]
    assert (gpu.offered, gpu.state, gpu.cordon) == (False, "unhealthy", "")
    assert gpu.conditions == (
        GpuCondition(
            "SelfTestFailed",
            "unhealthy",
            7,
            "the self-test failed: memory does not keep what is copied to it: first at byte 4",
        ),
    )
    for device in made.offer.devices(DEFAULT.gpu_mem):
        assert device.healthy == (device.uuid != ONE.uuid)
    assert await made.step() == ["", ""], "it is not tried again and again"
    assert made.tried == [ONE.uuid]
    for verdict, offered in ((TrialVerdict(TrialOutcome.CANNOT_RUN), False), (WORKS, True)):
        await made.cordon_and_uncordon(ONE)
        made.verdicts.put_nowait(verdict)
        await made.step()
        assert made.offer.inventory().gpus[0].offered == offered, "a cordon and an uncordon try it again"


@pytest.mark.parametrize("outcome", [TrialOutcome.CANNOT_RUN, TrialOutcome.NO_SUSPEND])
async def test_a_test_that_says_nothing_about_the_gpu_does_not_withdraw_it(
    tmp_path: Path, outcome: TrialOutcome
) -> None:
    made = Watched(tmp_path)
    await made.cordon_and_uncordon(ONE)
    made.verdicts.put_nowait(TrialVerdict(outcome, "no context fits"))
    await made.step()
    assert made.offer.inventory().gpus[0].offered


async def test_without_self_tests_a_gpu_is_offered_as_soon_as_it_answers(tmp_path: Path) -> None:
    made = Watched(tmp_path, tests=False)
    made.order(ONE)
    await made.step()
    made.offer.set_inventory(Inventory((replace(ONE, healthy=False), TWO)))
    made.order()
    assert await made.step() == ["testing", ""]
    made.offer.set_inventory(Inventory((ONE, TWO)))
    assert await made.step() == ["", ""]


async def test_a_gpu_in_mig_mode_is_offered_without_a_self_test_unless_it_failed_one_before(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.offer.set_inventory(Inventory((replace(ONE, mig=True), TWO)))
    for failed, offered in ((False, True), (True, False)):
        if failed:
            made._tested(ONE.uuid, "the self-test failed")
        made.order(ONE)
        assert await made.step() == ["released", ""]
        made.order()
        await made.step()
        assert await made.step() == ["", ""]
        assert made.offer.inventory().gpus[0].offered == offered
    assert not made.tried


async def test_a_cordon_during_the_self_test_keeps_the_gpu_withdrawn(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    await made.cordon_and_uncordon(ONE)
    made.order(ONE)
    made.verdicts.put_nowait(WORKS)
    assert (await made.step())[0] != ""
    assert await made.step() == ["released", ""]


async def test_a_cordoned_gpu_that_was_away_comes_back_cordoned(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.order(ONE)
    await made.step()
    made.offer.set_inventory(Inventory((TWO,)))
    assert await made.step() == [""]
    made.offer.set_inventory(Inventory((ONE, TWO)))
    assert made.cordons() == ["cordoned", ""], "at once"
    assert await made.step() == ["released", ""]


async def test_a_gpu_that_is_uncordoned_while_it_is_away_is_tried_when_it_comes_back(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.order(ONE)
    await made.step()
    made.offer.set_inventory(Inventory((TWO,)))
    made.order()
    await made.step()
    assert made.tried == []
    made.offer.set_inventory(Inventory((ONE, TWO)))
    assert made.cordons() == ["testing", ""]
    await made.step()
    assert made.tried == [ONE.uuid]
    made.offer.set_inventory(Inventory((TWO,)))
    made.verdicts.put_nowait(TrialVerdict(TrialOutcome.FAULTY, "it is not there"))
    await made.step()
    made.offer.set_inventory(Inventory((ONE, TWO)))
    assert made.cordons() == ["testing", ""]
    assert not made.health.conditions
    made.verdicts.put_nowait(WORKS)
    await made.step()
    assert await made.step() == ["", ""]


ILL = (GpuCondition("OffTheBus", "unhealthy", 1, "XID 79"),)


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_unhealthy_gpu_that_leaves_is_tried_when_it_is_back(tmp_path: Path, *, restarted: bool) -> None:
    made = Watched(tmp_path)
    made.offer.set_conditions({ONE.uuid: ILL})
    made.offer.set_inventory(Inventory((TWO,)), {})
    await made.step()
    for _ in range(2 if restarted else 0):
        made = Watched(tmp_path)
        made.offer.set_inventory(Inventory((TWO,)), {})
        await made.step()
    made.offer.set_inventory(Inventory((ONE, TWO)), {})
    assert made.cordons() == ["testing", ""], "at once"
    await made.step()
    assert made.tried == [ONE.uuid]
    made.verdicts.put_nowait(WORKS)
    assert await made.step() == ["", ""]
    await made.step()
    assert Watched(tmp_path).watch.load() == {}


async def test_a_failed_self_test_of_a_gpu_that_is_away_stands_after_a_restart(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    await made.cordon_and_uncordon(ONE)
    made.verdicts.put_nowait(TrialVerdict(TrialOutcome.FAULTY, "byte 4"))
    await made.step()
    made.offer.set_inventory(Inventory((TWO,)))
    await made.step()
    made = Watched(tmp_path)
    made.offer.set_inventory(Inventory((ONE, TWO)), made.health.conditions)
    await made.step()
    made.verdicts.put_nowait(TrialVerdict(TrialOutcome.CANNOT_RUN, "no context fits"))
    await made.step()
    gpu = made.offer.inventory().gpus[0]
    assert ([one.reason for one in gpu.conditions], gpu.offered) == (["SelfTestFailed"], False)


async def test_a_damaged_list_of_gpus_that_are_away_is_no_end_of_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "gpus.untested").write_bytes(b"{")
    made = Watched(tmp_path)
    assert await made.step() == ["", ""]
    assert made.watch.load() == {}


async def test_a_gpu_that_another_plugin_offers_is_not_called_tried_and_is_tried_once_it_is_ours(
    tmp_path: Path,
) -> None:
    for clash_first in (True, False):
        made = Watched(tmp_path)
        clash = {ONE.uuid: GpuCondition(Withdrawal.CLASH, WITHDRAWN, 1, "nvidia.com/gpu")}
        if clash_first:
            made.offer.set_withdrawn("owners", clash)
        made.offer.set_conditions({ONE.uuid: ILL})
        made.offer.set_conditions({})
        made.offer.set_withdrawn("owners", clash)
        await made.step()
        assert await made.step() == ["", ""]
        assert [one.reason for one in made.offer.inventory().gpus[0].withdrawn] == ["GpuClash"]
        made.offer.set_withdrawn("owners", {})
        assert made.cordons() == ["testing", ""], "at once"
        made.verdicts.put_nowait(WORKS)
        await made.step()
        assert await made.step() == ["", ""]
        assert made.tried == [ONE.uuid]


async def test_a_process_that_cannot_be_looked_at_releases_nothing_and_stops_nothing(tmp_path: Path) -> None:
    made, ends = Watched(tmp_path, look_s=0.05), threading.Event()
    looked = made.watch._opened

    def hang(_: Collection[Gpu]) -> Opened:
        ends.wait(30)
        return Opened(closed=frozenset({ONE.uuid}))

    made.watch._opened = hang
    made.order(ONE)
    assert await made.step() == ["cordoned", ""]
    made.order(ONE, TWO)
    assert await made.step() == ["cordoned", "cordoned"]
    made.watch._opened = looked
    made.open.add(ONE.uuid)
    late = made.watch._looking
    assert late is not None
    ends.set()
    await late
    assert await made.step() == ["cordoned", "released"], "what was seen late is out of date"


async def test_a_list_that_cannot_be_read_keeps_the_cordons_of_before(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.order(ONE)
    await made.step()
    made.watch.node_seen("{}")
    assert await made.step() == ["released", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}


async def test_a_plugin_that_starts_beside_a_list_that_cannot_be_read_keeps_what_was_published(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.path.write_text("0000:17:00.0\n")
    made.watch.node_seen("no list")
    made.watch.remember(Inventory((cordoned(ONE, "released"), TWO)))
    assert await made.step() == ["released", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.order()
    assert await made.step() == ["testing", ""]
    assert not read_withheld(made.path)
    made.verdicts.put_nowait(WORKS)
    await made.step()


async def test_a_released_gpu_that_nvml_never_opened_stays_released_when_the_api_server_is_back(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.path.write_text("0000:17:00.0\n")
    made.offer.set_inventory(Inventory((TWO,)))  # nobody told this program of the other
    await made.step()
    made.order(ONE)
    await made.step()
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.order(ONE, TWO)
    await made.step()
    assert read_withheld(made.path) == {"0000:17:00.0", "0000:29:00.0"}
    made.order(ONE)
    await made.step()
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.order()
    await made.step()
    assert not read_withheld(made.path)
    made.verdicts.put_nowait(WORKS)
    await made.step()


async def test_a_released_gpu_is_not_opened_before_it_is_known_who_has_gpus(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.path.write_text("0000:17:00.0\n")
    made.synced = False
    made.order(ONE)
    assert await made.step() == ["cordoned", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.pods.on_change(None, on("a", ONE))
    made.synced = True
    await made.step()
    assert not read_withheld(made.path), "a pod has it"


async def test_a_plugin_that_starts_before_its_pods_are_known_opens_nothing_that_was_let_go_of(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.path.write_text("0000:17:00.0\n")
    made.pods.attach(made._no_change, lambda: False)
    made.order(ONE)
    assert await made.step() == ["cordoned", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}
    made.pods.attach(made._no_change, lambda: True)
    assert await made.step() == ["released", ""]
    assert read_withheld(made.path) == {"0000:17:00.0"}


async def test_a_gpu_that_recovers_while_processes_are_looked_at_is_tried_all_the_same(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.offer.set_conditions({TWO.uuid: (GpuCondition("OffTheBus", "unhealthy", 1, "XID 79"),)})
    made.order(ONE)
    loop, opened = asyncio.get_running_loop(), made.watch._opened
    recovers = asyncio.Event()

    def look(gpus: Collection[Gpu]) -> Opened:
        asyncio.run_coroutine_threadsafe(recover(), loop).result(20)
        return opened(gpus)

    async def recover() -> None:
        made.offer.set_conditions({})
        recovers.set()

    made.watch._opened = look
    assert await made.step() == ["released", "testing"]
    assert recovers.is_set()
    assert made.tried == [TWO.uuid]
    made.verdicts.put_nowait(WORKS)
    await made.step()


async def test_a_gpu_that_recovers_and_is_not_selected_does_not_wait_for_a_self_test(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.offer.set_withdrawn("owners", {TWO.uuid: GpuCondition(Withdrawal.NOT_SELECTED, WITHDRAWN, 1)})
    made.offer.set_conditions({TWO.uuid: (GpuCondition("OffTheBus", "unhealthy", 1, "XID 79"),)})
    made.offer.set_conditions({})
    assert await made.step() == ["", ""]
    assert not made.tried
    assert not made.offer.inventory().gpus[1].offered


class OpenedNvml:
    """NVML without a process."""

    pid = None

    def __init__(
        self, withheld: Collection[str], on_bus: Collection[str] | None, abandoned_pids: tuple[int, ...] = ()
    ) -> None:
        self.abandoned_pids = abandoned_pids
        self.withheld = frozenset(withheld)
        self.on_bus = None if on_bus is None else frozenset(on_bus)


@pytest.mark.parametrize(
    ("withheld", "on_bus", "expected"),
    [
        ((), ("0000:17:00.0",), Opened()),
        (("0000:17:00.0",), ("0000:17:00.0",), Opened(closed=frozenset({ONE.uuid}))),
        (("0000:17:00.0",), ("0000:17:00.0", "0000:29:00.0"), Opened(closed=frozenset({ONE.uuid}))),
        ((), None, Opened(stuck=frozenset({ONE.uuid}))),
        ((), ("0000:29:00.0",), Opened(stuck=frozenset({ONE.uuid}))),
    ],
)
def test_a_gpu_is_closed_when_nvml_leaves_it_out_and_stuck_where_its_address_is_not_known(
    tmp_path: Path, withheld: tuple[str, ...], on_bus: tuple[str, ...] | None, expected: Opened
) -> None:
    assert OpenedGpus(OpenedNvml(withheld, on_bus), tmp_path).of([ONE]) == expected


@pytest.mark.parametrize(("minor", "closed"), [(3, False), (5, True)])
def test_a_gpu_is_not_closed_while_a_process_that_cannot_be_killed_has_it_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minor: int, *, closed: bool
) -> None:
    """The process is the test itself, and its GPUs are /dev/null (1, 3) and /dev/zero (1, 5)."""
    monkeypatch.setattr(cordon_watch, "opens", partial(opens, major=1))
    nvml = OpenedNvml(("0000:17:00.0",), ("0000:17:00.0",), (os.getpid(),))
    with Path("/dev/null").open():
        found = OpenedGpus(nvml, tmp_path).of([replace(ONE, minor=minor)])
    assert found == Opened(closed=frozenset({ONE.uuid} if closed else ()))


def test_a_gpu_is_not_closed_while_an_abandoned_process_is_closing_its_files(tmp_path: Path) -> None:
    """The kernel shows no descriptors of a process that has begun to end, like those of one that is not waited for."""
    with subprocess.Popen(["/bin/true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        nvml = OpenedNvml(("0000:17:00.0",), ("0000:17:00.0",), (ended.pid,))
        assert OpenedGpus(nvml, tmp_path).of([ONE]) == Opened()


async def test_gpus_that_are_closed_for_another_reason_are_left_out_too_and_are_no_cordon(tmp_path: Path) -> None:
    made = Watched(tmp_path)
    made.order()
    made.watch.withheld_by_others = lambda: frozenset({TWO.uuid})
    await made.watch.once()
    assert read_withheld(made.path) == {TWO.pci[4:]}
    assert not any(one.cordon for one in made.offer.inventory().gpus)
    made.order(ONE)
    await made.watch.once()
    assert read_withheld(made.path) == {ONE.pci[4:], TWO.pci[4:]}
    made.watch.withheld_by_others = frozenset
    await made.watch.once()
    assert read_withheld(made.path) == {ONE.pci[4:]}
