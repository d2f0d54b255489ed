"""MIG instances for slots: the plugin may be killed at each step, and others may use the GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deviceplugin.mig.instances import LATE_S, OFF, Instance, MigInstances, NoRoom
from deviceplugin.mig.record import FILE
from nvml.errors import NvmlError, NvmlHalf, NvmlHung
from tests.examples import examples
from tests.unit.deviceplugin.mig.double import CutRecord, Killed, MigDouble, Steps, mig_gpu
from vgpu.api.errors import Refused
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device

GPU = mig_gpu()
SMALL, HALF, OTHER_HALF, ALL = (
    MigSlot(6, "1g.10gb"),
    MigSlot(4, "3g.40gb"),
    MigSlot(0, "3g.40gb"),
    MigSlot(0, "7g.80gb"),
)


@dataclass
class Machine:
    """A GPU, the node's disk, and the plugin that runs now."""

    folder: Path
    driver: MigDouble = field(default_factory=MigDouble)
    boot: str = "boot-1"
    now_s: float = 0.0
    counted: list[str] = field(default_factory=list)
    plugin: MigInstances = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self, cut_at: int | None = None, *, enabled: bool = True) -> MigInstances:
        """A new process."""
        self.driver.steps = Steps(cut_at)
        record = CutRecord(self.folder, self.boot)
        record.steps = self.driver.steps
        record.load()
        self.plugin = MigInstances(
            self.driver, record, enabled=enabled, count=self.counted.append, clock=lambda: self.now_s, wait=self.wait
        )
        return self.plugin

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def make(self, slot: MigSlot, *held: MigSlot, again: bool = False) -> Instance:
        return self.plugin.make(GPU, slot, held, again=again)

    def settle(self, in_use: Collection[MigSlot]) -> None:
        """What a plugin does that runs on: it removes what no container has."""
        for _ in range(2):
            view = self.plugin.refresh(GPU, in_use)
            for slot in set(view.ours) - set(in_use):
                self.plugin.remove(GPU, slot, in_use)
            self.now_s += LATE_S + 1


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_instance_is_made_once_and_its_name_stays(machine: Machine) -> None:
    made = machine.make(SMALL)
    assert machine.driver.layout() == (SMALL,)
    assert made.uuid == made.answered == machine.driver.at(SMALL).uuids[0]  # type: ignore[union-attr]
    assert machine.make(SMALL) == machine.make(SMALL, again=True) == made
    machine.start()
    assert machine.make(SMALL, again=True) == made
    assert machine.counted == ["made"]


def workload(machine: Machine, in_use: set[MigSlot]) -> None:
    """A small one ends, and its room goes to a larger one beside one that stays. `in_use`: what the kubelet was answered with."""
    in_use.clear()
    for slot in (OTHER_HALF, SMALL):
        machine.make(slot, *in_use)
        in_use.add(slot)
    in_use.discard(SMALL)
    machine.make(HALF, *in_use)
    in_use.add(HALF)


def test_a_plugin_killed_at_any_step_leaks_nothing_and_removes_nothing_in_use(tmp_path: Path) -> None:
    whole: set[MigSlot] = set()
    undisturbed = Machine(tmp_path / "whole")
    workload(undisturbed, whole)
    steps = undisturbed.driver.steps.done
    assert steps > 20
    for cut_at in range(steps):
        machine, in_use = Machine(tmp_path / str(cut_at)), set[MigSlot]()
        machine.start(cut_at)
        with pytest.raises(Killed):
            workload(machine, in_use)
        before = {slot: machine.driver.at(slot) for slot in in_use}
        machine.start()
        machine.settle(in_use)
        assert set(machine.driver.layout()) == in_use, cut_at
        assert {slot: machine.driver.at(slot) for slot in in_use} == before, cut_at
        assert {one.device for one in machine.plugin.record.all()} == {slot_device(GPU.uuid, one) for one in in_use}
        machine.start()
        machine.make(OTHER_HALF, *in_use)
        machine.make(HALF, *in_use, OTHER_HALF)


def test_a_plugin_killed_again_while_it_mends_leaks_nothing(tmp_path: Path) -> None:
    for first, second in [(first, second) for first in range(24) for second in range(6)]:
        machine, in_use = Machine(tmp_path / f"{first}-{second}"), set[MigSlot]()
        machine.start(first)
        with pytest.raises(Killed):
            workload(machine, in_use)
        machine.start(second)
        try:
            machine.settle(in_use)
        except Killed:
            machine.start()
            machine.settle(in_use)
        assert set(machine.driver.layout()) == in_use, (first, second)


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_whatever_happens_what_is_in_use_stays_and_the_rest_goes(
    tmp_path_factory: pytest.TempPathFactory, data
) -> None:  # type: ignore[no-untyped-def]
    machine, in_use = Machine(tmp_path_factory.mktemp("mig")), set[MigSlot]()
    driver, slots = (
        machine.driver,
        [slot for one in machine.driver.table.profiles for slot in machine.driver.table.slots(one.name)],
    )
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["make", "make", "end", "kill", "tidy", "fail"]))
        machine.driver.refuses = "Unknown Error" if what == "fail" else ""
        gone, had = len(driver.destroyed), set(in_use)
        machine.driver.steps.cut_at = (
            machine.driver.steps.done + data.draw(st.integers(0, 9)) if what == "kill" else None
        )
        try:
            if what == "end" and in_use:
                in_use.discard(data.draw(st.sampled_from(sorted(in_use))))
            elif what == "tidy":
                machine.settle(in_use)
            elif what != "end":
                slot = data.draw(st.sampled_from(slots))
                if slot not in in_use:
                    machine.make(slot, *in_use)
                    in_use.add(slot)
        except Refused:
            assert what == "fail" or not driver.table.possible((*in_use, slot))
        except Killed:
            machine.start()
        assert not had & in_use & set(driver.destroyed[gone:])
        assert in_use <= set(driver.layout())
        assert driver.table.possible(driver.layout())
    driver.refuses, driver.steps.cut_at = "", None
    machine.settle(in_use)
    assert set(driver.layout()) == in_use


def test_a_refusal_names_gpu_profile_and_reason_and_the_next_one_works(machine: Machine) -> None:
    machine.driver.refuses = "In use by another client"
    with pytest.raises(
        Refused, match=rf"GPU {GPU.uuid}: .* 3g\.40gb at slice 4 was not made: In use by another client"
    ):
        machine.make(HALF)
    assert (machine.driver.layout(), machine.plugin.record.all()) == ((), ())
    machine.driver.refuses = ""
    machine.make(HALF)
    assert machine.counted == ["failed", "made"]


def test_a_call_that_does_not_return_leaves_an_instance_that_is_found_later(machine: Machine) -> None:
    create = machine.driver.create_mig

    def hang(uuid: str, profile: int, start: int) -> object:
        create(uuid, profile, start)
        raise NvmlHung("no answer within 10 s")

    machine.driver.create_mig = hang  # type: ignore[assignment, method-assign]
    with pytest.raises(Refused, match="no answer within 10 s"):
        machine.make(SMALL)
    assert machine.driver.layout() == (SMALL,)
    machine.settle(())
    assert machine.driver.layout() == ()


def test_no_room_beside_slots_in_use(machine: Machine) -> None:
    machine.make(SMALL)
    with pytest.raises(NoRoom, match=r"no room for a MIG instance 3g\.40gb at slice 4: in use are 1g\.10gb at slice 6"):
        machine.make(HALF, SMALL)
    assert machine.driver.destroyed == []
    machine.make(HALF)
    assert machine.driver.layout() == (HALF,)


def test_nothing_is_made_beside_a_foreign_instance_and_it_is_never_touched(machine: Machine) -> None:
    machine.make(OTHER_HALF)
    foreign = machine.driver.add(SMALL)
    with pytest.raises(Refused, match=r"1 MIG instances that Tangram did not make, the first a 1g\.10gb at slice 6"):
        machine.make(MigSlot(4, "1g.10gb"), OTHER_HALF)
    assert machine.make(OTHER_HALF, again=True).uuid
    machine.settle(())
    assert list(machine.driver.instances.values()) == [foreign], "ours goes, the other one stays"


def test_an_instance_that_another_program_put_in_place_of_ours_is_foreign(machine: Machine) -> None:
    machine.make(SMALL)
    machine.driver.reset()
    machine.driver.add(SMALL)
    machine.settle(())
    assert machine.driver.layout() == (SMALL,)
    with pytest.raises(Refused, match="did not make"):
        machine.make(HALF)


def test_nothing_is_made_on_a_gpu_with_a_process_of_no_container(machine: Machine) -> None:
    machine.driver.processes[GPU.uuid] = {4711}
    with pytest.raises(Refused, match=r"processes in no MIG instance of a pod, the first is 4711"):
        machine.make(SMALL)
    assert machine.driver.layout() == ()
    machine.driver.processes.clear()
    uuid = machine.make(SMALL).uuid
    machine.driver.processes[uuid] = {12}
    machine.make(OTHER_HALF, SMALL)


def test_a_process_that_ends_in_time_is_waited_for(machine: Machine) -> None:
    machine.driver.processes[GPU.uuid] = {4711}
    began_s = machine.now_s

    def wait(seconds: float) -> None:
        machine.wait(seconds)
        if machine.now_s > began_s + 0.2:
            machine.driver.processes.clear()

    machine.plugin._wait = wait
    machine.make(SMALL)


def test_an_idle_instance_with_a_process_stays(machine: Machine) -> None:
    machine.driver.processes[machine.make(SMALL).uuid] = {12}
    machine.settle(())
    assert machine.driver.layout() == (SMALL,)
    with pytest.raises(Refused, match="the first is 12"):
        machine.make(HALF)
    machine.driver.processes.clear()
    machine.settle(())
    assert machine.driver.layout() == ()


def test_after_a_reboot_a_container_gets_its_instance_again_under_the_old_name(machine: Machine) -> None:
    first = machine.make(SMALL)
    machine.driver.reset()
    machine.boot = "boot-2"
    machine.start()
    machine.plugin.refresh(GPU, {SMALL})
    again = machine.make(SMALL, again=True)
    assert again.answered == first.answered
    assert again.uuid != first.uuid
    machine.make(SMALL)
    assert machine.plugin.record.all()[0].answered == again.uuid, "a new container gets the new name"


def test_an_idle_instance_that_goes_after_a_reset_takes_no_name_of_a_container_with_it(machine: Machine) -> None:
    first = machine.make(SMALL)
    machine.driver.reset()
    machine.make(OTHER_HALF, SMALL)
    machine.driver.reset()
    machine.plugin.remove(GPU, OTHER_HALF, {SMALL})
    assert machine.make(SMALL, again=True).answered == first.answered


def test_after_a_reboot_an_instance_at_a_slot_of_ours_is_foreign(machine: Machine) -> None:
    machine.make(SMALL)
    machine.driver.reset()
    foreign = machine.driver.add(SMALL)
    machine.boot = "boot-2"
    machine.start()
    machine.settle(())
    assert list(machine.driver.instances.values()) == [foreign]


def test_a_slot_that_nobody_was_answered_with_is_not_made_for_a_restart(machine: Machine) -> None:
    with pytest.raises(Refused, match="is gone and is not in the record: the pod has to be replaced"):
        machine.make(SMALL, again=True)


def test_a_record_that_cannot_be_read_stops_everything_and_is_kept(machine: Machine) -> None:
    machine.make(SMALL)
    path = machine.folder / FILE
    path.write_bytes(b"{}")
    machine.start()
    with pytest.raises(Refused, match="cannot be read"):
        machine.make(HALF)
    machine.settle(())
    assert machine.driver.layout() == (SMALL,)
    assert path.read_bytes() == b"{}"


def test_switched_off_it_makes_nothing_keeps_what_is_in_use_and_removes_the_rest(machine: Machine) -> None:
    for slot in (SMALL, OTHER_HALF):
        machine.make(slot, SMALL)
    machine.start(enabled=False)
    assert machine.plugin.concerns(GPU)
    with pytest.raises(Refused, match=r"node\.migOnDemand") as refused:
        machine.make(MigSlot(4, "1g.10gb"), SMALL)
    assert OFF in str(refused.value)
    machine.settle({SMALL})
    assert machine.driver.layout() == (SMALL,)
    machine.settle(())
    assert not machine.plugin.concerns(GPU)


def test_a_gpu_out_of_mig_mode_and_a_model_without_a_table_make_nothing(tmp_path: Path) -> None:
    off = Machine(tmp_path / "off")
    off.driver.on = False
    with pytest.raises(Refused, match="its MIG mode is off"):
        off.make(SMALL)
    profiles = off.driver.table.profiles
    unknown = Machine(tmp_path / "unknown")
    reply = unknown.driver.mig(GPU.uuid)
    unknown.driver.mig = lambda _: type(reply)("0x1", "NVIDIA X9", True, True, True, profiles)  # type: ignore[method-assign]
    with pytest.raises(Refused, match="placements of model 'NVIDIA X9' are not in Tangram's tables"):
        unknown.make(SMALL)


def test_a_disk_that_refuses_the_record_makes_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine.plugin.record, "_write", full)
    with pytest.raises(OSError, match="No space"):
        machine.make(SMALL)
    assert machine.driver.created == []


def test_an_instance_in_the_way_that_the_driver_does_not_remove_is_an_error_and_stays_ours(machine: Machine) -> None:
    machine.make(SMALL)

    def busy(*_: object) -> None:
        raise NvmlError("In use by another client", 19)

    destroy, machine.driver.destroy_mig = machine.driver.destroy_mig, busy  # type: ignore[method-assign]
    with pytest.raises(NvmlError, match="In use"):
        machine.make(HALF)
    machine.driver.destroy_mig = destroy  # type: ignore[method-assign]
    machine.make(HALF)
    assert machine.driver.layout() == (HALF,)


def test_an_instance_that_was_made_half_and_could_not_be_removed_is_not_taken_for_anothers(machine: Machine) -> None:
    create = machine.driver.create_mig

    def half(uuid: str, profile: int, start: int) -> object:
        made = create(uuid, profile, start)
        machine.driver.instances[made.number] = replace(made, uuids=(), complete=False)
        raise NvmlHalf("no compute instance; that half cannot be removed")

    machine.driver.create_mig = half  # type: ignore[assignment, method-assign]
    with pytest.raises(Refused, match="was not made: no compute instance"):
        machine.make(SMALL)
    machine.driver.create_mig = create  # type: ignore[method-assign]
    machine.make(HALF)
    assert machine.driver.layout() == (HALF,)


def test_an_instance_that_was_removed_half_is_not_taken_for_anothers(machine: Machine) -> None:
    made = machine.driver.at(machine.make(SMALL) and SMALL)
    assert made is not None

    def half(*_: object) -> None:
        machine.driver.instances[made.number] = replace(made, uuids=(), complete=False)
        raise NvmlHalf("its compute instance is removed, and the GPU instance is not")

    destroy, machine.driver.destroy_mig = machine.driver.destroy_mig, half  # type: ignore[method-assign]
    with pytest.raises(NvmlHalf):
        machine.plugin.remove(GPU, SMALL, ())
    machine.driver.destroy_mig = destroy  # type: ignore[method-assign]
    machine.make(HALF)
    assert machine.driver.layout() == (HALF,)


def test_a_call_that_nobody_waits_for_any_more_does_nothing(machine: Machine) -> None:
    machine.make(SMALL)
    with pytest.raises(Refused, match=r"1g\.10gb at slice 4 .* is wanted no more"):
        machine.plugin.make(GPU, MigSlot(4, "1g.10gb"), (), given_up=lambda: True)
    assert machine.driver.layout() == (SMALL,)
