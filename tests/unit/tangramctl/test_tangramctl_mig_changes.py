"""Plans are carried out whole: a step that fails at any place leaves every GPU as it was."""

from __future__ import annotations

import pytest

from nvml.errors import NvmlError, NvmlHalf
from nvml.messages import MigInstanceFacts
from tangramctl.mig_changes import MigFailed, carry_out
from vgpu.api.mig import MigSlot
from vgpu.api.mig_tables import model_of
from vgpu.mig.plan import GpuInstance, GpuState, plan

TABLE = model_of("NVIDIA H100 80GB HBM3").table


class Machine:
    """GPUs with instances; the call with this number fails."""

    def __init__(
        self, fails_at: int | None, layouts: dict[str, tuple[MigSlot, ...] | None], *, reset: bool = False
    ) -> None:
        self.fails_at, self.calls, self.reset = fails_at, 0, reset
        self.gpus = {uuid: None if slots is None else dict(enumerate(slots)) for uuid, slots in layouts.items()}
        self.next = 100

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise NvmlError("In use by another client (19)", 19)

    def set_mig_mode(self, uuid: str, on: bool) -> bool:
        self._step()
        if self.reset:
            return False
        self.gpus[uuid] = {} if on else None
        return True

    def create_mig(self, uuid: str, profile: int, start: int) -> MigInstanceFacts:
        self._step()
        name = next(one.name for one in TABLE.profiles if one.number == profile)
        slot = MigSlot(start, name)
        assert TABLE.fits(tuple(sorted(self.gpus[uuid].values())), slot)
        self.next += 1
        self.gpus[uuid][self.next] = slot
        return MigInstanceFacts(self.next, name, start, ("MIG-x",), True)

    def destroy_mig(self, uuid: str, instance: int) -> None:
        self._step()
        del self.gpus[uuid][instance]

    def state(self, index: int, uuid: str) -> GpuState:
        there = self.gpus[uuid]
        instances = tuple(GpuInstance(number, slot) for number, slot in (there or {}).items())
        on = there is not None
        return GpuState(index, uuid, "0x0", True, on, on, TABLE, instances)

    def layouts(self) -> dict[str, list[MigSlot] | None]:
        return {uuid: None if there is None else sorted(there.values()) for uuid, there in self.gpus.items()}


LAYOUTS = {
    "a": (MigSlot(0, "3g.40gb"), MigSlot(4, "1g.10gb"), MigSlot(5, "1g.10gb")),
    "b": None,
    "c": (MigSlot(0, "7g.80gb"),),
}
WANTED = {"a": (True, {"4g.40gb": 1, "1g.10gb": 1}), "b": (True, {"2g.20gb": 3}), "c": (False, {})}


def plans(machine: Machine):
    return [plan(machine.state(at, uuid), *WANTED[uuid]) for at, uuid in enumerate(WANTED)]


def steps() -> int:
    machine = Machine(None, LAYOUTS)
    carry_out(plans(machine), machine, lambda _: TABLE)
    return machine.calls


def test_all_plans_are_carried_out():
    machine = Machine(None, LAYOUTS)
    carry_out(plans(machine), machine, lambda _: TABLE)
    assert not any(one.changes for one in plans(machine))
    assert machine.gpus["c"] is None


@pytest.mark.parametrize("at", range(1, steps() + 1))
def test_a_step_that_fails_leaves_every_gpu_as_it_was(at):
    machine = Machine(at, LAYOUTS)
    before = machine.layouts()
    with pytest.raises(MigFailed, match=r"In use by another client \(19\); the layout is as before"):
        carry_out(plans(machine), machine, lambda _: TABLE)
    assert machine.layouts() == before


def test_what_cannot_be_undone_is_named():
    machine = Machine(2, {"a": LAYOUTS["a"]})
    found = [plan(machine.state(0, "a"), True, {"7g.80gb": 1})]

    def no_table(uuid: str) -> object:
        raise NvmlError("the driver is gone")

    with pytest.raises(
        MigFailed, match=r"could not be undone: \S+ at slice \d of GPU 0 is destroyed \(the driver is gone\)"
    ):
        carry_out(found, machine, no_table)


def test_a_mode_that_needs_a_reset_is_an_error_that_says_so():
    machine = Machine(None, {"b": None}, reset=True)
    with pytest.raises(MigFailed, match="only with a reset of the GPU"):
        carry_out([plan(machine.state(0, "b"), True, {})], machine, lambda _: TABLE)


def test_an_instance_that_is_left_half_is_named_and_the_layout_is_not_called_as_before():
    machine = Machine(None, LAYOUTS)

    def half(*_):
        raise NvmlHalf("its compute instance is removed, and the GPU instance is not")

    machine.destroy_mig = half
    with pytest.raises(MigFailed, match=r"could not be undone: .*what of this instance is there") as failed:
        carry_out(plans(machine), machine, lambda _: TABLE)
    assert "as before" not in str(failed.value)
