"""A node's declared MIG configuration: what its labels say, and plans for GPUs in use, against trying each GPU alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from vgpu.api.mig import MigSlot
from vgpu.api.mig_tables import model_of
from vgpu.api.names import DEFAULT
from vgpu.mig.config import MigEntry
from vgpu.mig.declared import (
    AT_WORK,
    NVIDIA,
    NVIDIA_STATE,
    ON_DEMAND,
    Choice,
    beside_on_demand,
    chosen,
    mode_words,
    plan_node,
)
from vgpu.mig.plan import GpuInstance, GpuState, differences, plan

OURS = DEFAULT.mig_config
TABLE = model_of("NVIDIA H100 80GB HBM3").table
SMALL, HALF, OTHER_HALF = MigSlot(6, "1g.10gb"), MigSlot(4, "3g.40gb"), MigSlot(0, "3g.40gb")
VALUES = st.sampled_from([None, "", "all-balanced", "other"])


@given(ours=VALUES, theirs=VALUES, state=st.sampled_from([None, "success", "failed", "", *AT_WORK]))
@settings(max_examples=examples(200))
def test_a_configuration_is_followed_only_where_the_labels_agree_and_nvidias_manager_rests(ours, theirs, state):
    labels = {OURS: ours, NVIDIA: theirs, NVIDIA_STATE: state, "other/label": "x"}
    found = chosen({key: value for key, value in labels.items() if value is not None}, DEFAULT)
    named = {value for value in (ours, theirs) if value is not None}
    follows = found.name and not found.hold
    assert bool(follows) == (len(named) == 1 and named != {""} and state not in AT_WORK)
    if follows:
        assert (found.name, found.label) == (named.pop(), OURS if ours is not None else NVIDIA)
    assert bool(found.bad) == (len(named) == 2 or named == {""}) or follows
    if not named and not follows:
        assert found == Choice()


def test_labels_that_contradict_are_both_named_with_their_values():
    found = chosen({OURS: "one", NVIDIA: "two"}, DEFAULT)
    for part in (OURS, NVIDIA, "'one'", "'two'"):
        assert part in found.bad
    assert not found.name


def state(index: int, *instances: tuple[MigSlot, str], mig: bool = True, **more: object) -> GpuState:
    there = tuple(GpuInstance(at, slot, used) for at, (slot, used) in enumerate(instances))
    return GpuState(index, f"GPU-{index}", "0x233010de", True, mig, mig, TABLE, there, **more)


def entry(mig: bool = True, **counts: int) -> MigEntry:
    names = {"small": "1g.10gb", "half": "3g.40gb", "all": "7g.80gb"}
    return MigEntry(1, (), None, mig, {names[key]: count for key, count in counts.items()})


@st.composite
def gpus(draw):
    layouts = [(), (SMALL,), (HALF,), (OTHER_HALF, HALF), (OTHER_HALF, SMALL), (MigSlot(0, "7g.80gb"),)]
    found = []
    for index in range(draw(st.integers(1, 4))):
        mig = draw(st.booleans())
        layout = draw(st.sampled_from(layouts)) if mig else ()
        used = [draw(st.sampled_from(["", "pod a/b"])) for _ in layout]
        whole = "" if mig else draw(st.sampled_from(["", "pod a/c"]))
        pending = mig if draw(st.integers(0, 5)) else not mig
        one = replace(state(index, *zip(layout, used, strict=True), mig=mig, in_use=whole), pending=pending)
        counts = draw(st.sampled_from([{}, {"small": 2}, {"half": 1}, {"half": 2}, {"all": 1}, {"half": 3}]))
        wants = draw(st.booleans())
        found.append((one, entry(wants, **(counts if wants else {}))))
    return found


@given(wanted=gpus(), out=st.sets(st.integers(0, 3)))
@settings(max_examples=examples(300))
def test_each_gpu_is_changed_waits_or_the_whole_is_refused(wanted, out):
    found = plan_node(wanted, {f"GPU-{index}": "cordoned" for index in out})
    idle = [
        (replace(one, in_use="", instances=tuple(replace(i, in_use="") for i in one.instances)), want)
        for one, want in wanted
    ]
    never = [one.uuid for one, want in idle if plan(one, want.mig, want.counts).refused]
    assert bool(found.failed) == bool(never)
    if never:
        assert all(uuid in found.failed for uuid in never)
        assert not any((found.apply, found.switch, found.waiting, found.drains))
        return
    for one, want in wanted:
        places = [
            one.uuid in {each.uuid for each in found.apply}, one.uuid in {each.uuid for each in found.switch}, one.uuid in found.waiting,
        ]  # fmt: skip
        assert sum(places) == bool(differences(one, want.mig, want.counts))
    for each in (*found.apply, *found.switch):
        assert not any(i.in_use for i in each.destroy)
        assert each.index not in out
    assert all(each.mode is None for each in found.apply)
    assert all(each.mode is not None for each in found.switch)
    assert found.drains <= found.waiting.keys() - {f"GPU-{index}" for index in out}
    assert found.done == (not any(differences(one, want.mig, want.counts) for one, want in wanted))


def test_instances_on_demand_are_left_to_the_pods_where_only_the_mode_is_declared():
    now = state(0, (SMALL, ""))
    assert plan_node([(beside_on_demand(now, entry(), {SMALL}, enabled=True), entry())], {}).done
    assert plan_node([(beside_on_demand(now, entry(), {SMALL}, enabled=False), entry())], {}).waiting
    wants = entry(half=2)
    found = plan_node([(beside_on_demand(now, wants, {SMALL}, enabled=True), wants)], {})
    assert ON_DEMAND in found.waiting["GPU-0"]
    assert found.drains == {"GPU-0"}
    foreign = state(0, (OTHER_HALF, ""), (SMALL, ""))
    (change,) = plan_node([(beside_on_demand(foreign, entry(), {SMALL}, enabled=True), entry())], {}).apply
    assert [one.slot for one in change.destroy] == [OTHER_HALF]


@pytest.mark.parametrize(("mig", "words"), [(True, "is off, must be on"), (False, "is on, must be off")])
def test_a_mode_that_stays_names_both_modes_and_what_to_do(mig, words):
    (switch,) = plan_node([(state(2, mig=not mig), entry(mig))], {}).switch
    assert words in mode_words(switch)
    assert "GPU 2 (GPU-2)" in mode_words(switch)
    assert "mig apply" in mode_words(switch)
