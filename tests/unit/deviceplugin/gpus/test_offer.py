"""What a node offers while some of its GPUs are withdrawn: a withdrawal costs no running pod a device, and new pods none of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.gpus.offer import CORDONS, Offer
from vgpu.api.contract import devices
from vgpu.api.inventory import WITHDRAWN, Gpu, GpuCondition, Inventory, MigInstance, Withdrawal
from vgpu.api.names import DEFAULT

LOST = GpuCondition("OffTheBus", "unhealthy", 1, "XID 79")
HOT = GpuCondition("ThermalSlowdown", "degraded", 1, "87 degrees")


def because(reason: Withdrawal, message: str = "") -> GpuCondition:
    return GpuCondition(reason, WITHDRAWN, 7, message)


@dataclass(frozen=True)
class State:
    """Of one GPU."""

    mig: bool
    healthy: bool
    conditions: tuple[GpuCondition, ...]
    reasons: frozenset[Withdrawal]
    used: frozenset[int]
    """Which of its first device IDs containers have, of each resource."""

    def gpu(self, at: int) -> Gpu:
        instances = tuple(MigInstance(f"MIG-{UUID(int=9 * at + of)}", "1g.10gb", 1024, of, 0) for of in range(3))
        return Gpu(
            f"GPU-{UUID(int=at)}", at, "h100", 4096, healthy=self.healthy, mig=self.mig,
            instances=instances if self.mig else (),
        )  # fmt: skip


STATES = st.builds(
    State, st.booleans(), st.booleans(), st.sampled_from([(), (LOST,), (HOT,), (LOST, HOT)]),
    st.frozensets(st.sampled_from(list(Withdrawal)), max_size=2), st.frozensets(st.integers(0, 3)),
)  # fmt: skip


@given(st.lists(STATES, min_size=1, max_size=3))
def test_ids_in_use_stay_as_healthy_as_their_gpu_and_others_of_a_withdrawn_gpu_leave(states: list[State]) -> None:
    gpus = [state.gpu(at) for at, state in enumerate(states)]
    used: dict[str, set[str]] = {}
    for state, gpu in zip(states, gpus, strict=True):
        for resource, ids in devices(Inventory((gpu,)), DEFAULT).items():
            used.setdefault(resource, set()).update(one.id for at, one in enumerate(ids) if at in state.used)
    offer = Offer(DEFAULT, 1024)
    offer.in_use = lambda resource: used.get(resource, ())
    for reason in Withdrawal:
        of = {gpu.uuid: because(reason) for state, gpu in zip(states, gpus, strict=True) if reason in state.reasons}
        offer.set_withdrawn(str(reason), of)
    offer.set_inventory(
        Inventory(tuple(gpus)), {gpu.uuid: state.conditions for state, gpu in zip(states, gpus, strict=True)}
    )
    for state, gpu in zip(states, gpus, strict=True):
        fit = state.healthy and LOST not in state.conditions
        found = offer.inventory().gpu(gpu.uuid)
        assert found is not None
        assert (found.healthy, found.offered) == (fit, fit and not state.reasons)
        others = {Withdrawal.NOT_SELECTED, Withdrawal.CLASH, Withdrawal.UNKNOWN} & state.reasons
        waits = {Withdrawal.TESTING} if others else set()  # for them: it is no reason yet
        assert {one.reason for one in found.withdrawn} == state.reasons - waits
        for resource, every in devices(Inventory((gpu,)), DEFAULT).items():
            has = {one.id: one.healthy for one in offer.devices(resource) if one.uuid in {each.uuid for each in every}}
            assert has == {one.id: fit for one in every if not state.reasons or one.id in used[resource]}


def two() -> tuple[Offer, Gpu, Gpu]:
    one, other = (Gpu(f"GPU-{UUID(int=at)}", at, "t4", 2048) for at in range(2))
    offer = Offer(DEFAULT, 1024)
    offer.set_inventory(Inventory((one, other)))
    return offer, one, other


def withdrawn(offer: Offer) -> list[list[str]]:
    return [[one.reason for one in gpu.withdrawn] for gpu in offer.inventory().gpus]


def test_each_part_of_the_program_withdraws_for_itself() -> None:
    offer, one, other = two()
    offer.set_withdrawn("owners", {one.uuid: because(Withdrawal.CLASH), other.uuid: because(Withdrawal.UNKNOWN)})
    offer.set_withdrawn(CORDONS, {one.uuid: because(Withdrawal.CORDONED)})
    assert withdrawn(offer) == [["GpuClash", "Cordoned"], ["OwnerUnknown"]]
    assert [gpu.cordon for gpu in offer.inventory().gpus] == ["cordoned", ""]
    offer.set_withdrawn("owners", {})
    assert withdrawn(offer) == [["Cordoned"], []]
    offer.set_withdrawn(CORDONS, {})
    assert [gpu.offered for gpu in offer.inventory().gpus] == [True, True]


def test_what_is_said_again_and_ids_that_are_still_in_use_are_no_change() -> None:
    offer, one, _ = two()
    used = {f"{one.uuid}-0"}
    offer.in_use = lambda resource: used if resource == DEFAULT.gpu_mem else ()
    offer.set_withdrawn("owners", {one.uuid: because(Withdrawal.CLASH)})
    version = offer.version
    offer.set_withdrawn("owners", {one.uuid: because(Withdrawal.CLASH)})
    offer.refresh()
    assert offer.version == version
    used.clear()
    offer.refresh()
    assert offer.version == version + 1
    assert not any(device.uuid == one.uuid for device in offer.devices(DEFAULT.gpu_mem))
    assert offer.resources(), "a resource stays registered"


def test_a_gpu_that_is_held_back_is_never_offered_between() -> None:
    offer, one, _ = two()
    offer.set_conditions({one.uuid: (LOST,)})
    seen: list[tuple[bool, bool]] = []

    def hold_back(before: Inventory, after: Inventory) -> Mapping[str, GpuCondition]:
        was, now = before.gpus[0], after.gpus[0]
        seen.append((was.healthy, now.healthy))
        return {one.uuid: because(Withdrawal.TESTING)} if now.healthy and not was.healthy else {}

    offer.hold_back = hold_back
    version = offer.version
    offer.set_conditions({})
    assert (offer.version, withdrawn(offer), seen) == (version + 1, [["SelfTest"], []], [(False, True)])
    offer.set_withdrawn(CORDONS, {})
    assert offer.inventory().gpus[0].offered


def test_a_resource_that_only_a_withdrawn_gpu_has_is_not_offered_at_the_start() -> None:
    cut = Gpu(f"GPU-{UUID(int=1)}", 0, "h100", 4096, mig=True, instances=(MigInstance("MIG-1", "1g.10gb", 1024, 1, 0),))
    offer = Offer(DEFAULT, 1024)
    offer.set_withdrawn("owners", {cut.uuid: because(Withdrawal.NOT_SELECTED)})
    offer.set_inventory(Inventory((cut,)))
    assert (offer.probed, offer.resources()) == (True, ())
