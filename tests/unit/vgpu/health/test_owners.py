"""Which GPUs device IDs of others name, and what follows."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.inventory import Gpu, Inventory, MigInstance
from vgpu.health.foreign import DRA_DRIVER, ForeignDevice, may_be_gpu, offered_by_others
from vgpu.health.owners import LAST_ANSWER_S, RETURN_S, Owners, Source
from vgpu.health.selection import selection_from_list

UUIDS = [f"GPU-{at:08x}-0000-4000-8000-000000000000" for at in range(4)]
MIG = "MIG-00000000-0000-4000-8000-00000000000a"
OTHER_MIG = "MIG-00000000-0000-4000-8000-00000000000b"
NODE = Inventory(
    (
        Gpu(UUIDS[0], 0, "T4", 1000),
        Gpu(UUIDS[1], 1, "T4", 1000),
        Gpu(UUIDS[2], 2, "A100", 1000, mig=True, instances=(MigInstance(MIG, "1g.5gb", 100, 7, 0),)),
    )
)
EVERY = {0, 1, 2}


def named(resource: str, device_id: str) -> set[int]:
    device = ForeignDevice(resource, device_id)
    found = offered_by_others([device], NODE)
    assert bool(found) <= may_be_gpu(device), "a device that names a GPU must pass the filter"
    return {gpu.index for gpu in NODE.gpus if gpu.uuid in found}


@pytest.mark.parametrize(
    ("resource", "device_id", "indexes"),
    [
        ("nvidia.com/gpu", UUIDS[1], {1}),
        ("nvidia.com/gpu", f"{UUIDS[1]}::7", {1}),
        ("nvidia.com/gpu.shared", f"{UUIDS[0]}::0", {0}),
        ("nvidia.com/mig-1g.5gb", MIG, {2}),
        ("nvidia.com/mig-1g.5gb.shared", f"{MIG}::1", {2}),
        ("nvidia.com/mig-1g.5gb", f"MIG-{UUIDS[2]}/7/0", {2}),
        ("nvidia.com/mig-1g.5gb", OTHER_MIG, {2}),
        ("nvidia.com/gpu", "1", {1}),
        ("nvidia.com/gpu", "1::3", {1}),
        ("nvidia.com/mig-1g.5gb", "2:0", {2}),
        ("nvidia.com/gpu", "nvidia0", {0}),
        ("nvidia.com/gpu", "nvidia0/vgpu3", {0}),
        ("nvidia.com/gpu", "nvidia2/gi1", {2}),
        ("nvidia.com/gpu", "9", EVERY),
        ("nvidia.com/gpu", "gpu-one", EVERY),
        ("nvidia.com/gpu", "", EVERY),
        ("nvidia.com/gpu", UUIDS[3], set()),
        ("example.com/gpu", UUIDS[0], {0}),
        ("other.example/gpu-mem", f"{UUIDS[0]}-12", {0}),
        ("example.com/gpu", "0", set()),
        ("nvidia.com/hostdev", "0000:03:00.0", set()),
        ("nvidia.com/GA102GL_A10", "1", set()),
        ("nvidia.com/gpumanager", "1", set()),
        (DRA_DRIVER, UUIDS[2], {2}),
    ],
)
def test_every_form_of_id_names_its_gpu(resource: str, device_id: str, indexes: set[int]) -> None:
    assert named(resource, device_id) == indexes


def test_a_device_of_the_dra_driver_without_a_uuid_may_be_any_gpu() -> None:
    assert set(offered_by_others([ForeignDevice(DRA_DRIVER, "gpu-zero")], NODE)) == set(UUIDS[:3])


def owners(*selectors: str) -> Owners:
    return Owners(selection_from_list(selectors or ("all",)))


def why(known: Owners, at_s: float) -> dict[int, str]:
    found = known.withdrawn(NODE, at_s, at_s)
    assert all(one.state == "withdrawn" for one in found.values())
    return {gpu.index: found[gpu.uuid].reason for gpu in NODE.gpus if gpu.uuid in found}


GPU_0, GPU_1 = (ForeignDevice("nvidia.com/gpu", uuid) for uuid in UUIDS[:2])


def test_nothing_is_offered_until_both_sources_have_answered() -> None:
    known = owners()
    assert why(known, 0) == dict.fromkeys(EVERY, "OwnerUnknown")
    known.failed(Source.SLICES, "403")
    known.answered(Source.KUBELET, [], 1)
    (message,) = {one.message for one in known.withdrawn(NODE, 1, 1).values()}
    assert message == "the node's ResourceSlices did not answer yet: whether another plugin offers it is not known"
    known.answered(Source.SLICES, [], 2)
    assert why(known, 2) == {}
    assert not known.failing


def test_a_clash_withdraws_at_once_names_the_others_and_keeps_its_time() -> None:
    known = owners()
    known.answered(Source.SLICES, [ForeignDevice(DRA_DRIVER, UUIDS[0])], 10)
    known.answered(Source.KUBELET, [GPU_0], 10)
    assert why(known, 10) == {0: "GpuClash"}
    known.answered(Source.KUBELET, [GPU_0, GPU_1], 15)
    found = known.withdrawn(NODE, 15, 1_000)
    assert found[UUIDS[0]].message == "it is also offered or in use as gpu.nvidia.com, nvidia.com/gpu"
    assert [found[uuid].since_s for uuid in UUIDS[:2]] == [10, 1_000]
    assert known.withdrawn(NODE, 16, 500)[UUIDS[1]].since_s == 1_000, "the time of day was set back"


@pytest.mark.parametrize("return_s", [RETURN_S, 15.0])
def test_a_gpu_comes_back_after_some_time_without_a_clash(return_s: float) -> None:
    known = Owners(selection_from_list(("all",)), return_s)
    known.answered(Source.SLICES, [], 0)
    known.answered(Source.KUBELET, [GPU_0], 0)
    assert why(known, 0) == {0: "GpuClash"}
    known.answered(Source.SLICES, [], return_s)
    assert why(known, return_s) == {0: "GpuClash"}, "the kubelet was not asked since"
    known.answered(Source.KUBELET, [], return_s - 1)
    assert why(known, return_s) == {0: "GpuClash"}
    known.answered(Source.KUBELET, [], return_s)
    assert why(known, return_s) == {}


def test_the_last_answer_counts_for_five_minutes() -> None:
    known = owners()
    known.answered(Source.SLICES, [], 0)
    known.answered(Source.KUBELET, [GPU_1], 0)
    known.failed(Source.KUBELET, "hangs")
    known.answered(Source.SLICES, [], LAST_ANSWER_S)
    assert why(known, LAST_ANSWER_S) == {1: "GpuClash"}
    assert why(known, LAST_ANSWER_S + 1) == {0: "OwnerUnknown", 1: "GpuClash", 2: "OwnerUnknown"}
    known.answered(Source.KUBELET, [GPU_1], LAST_ANSWER_S + 2)
    assert why(known, LAST_ANSWER_S + 2) == {1: "GpuClash"}


def test_a_watch_that_is_silent_counts_from_when_it_was_last_heard() -> None:
    known = owners()
    known.answered(Source.SLICES, [], 150, heard_s=10)
    known.answered(Source.KUBELET, [], LAST_ANSWER_S)
    assert why(known, LAST_ANSWER_S + 10) == {}
    assert why(known, LAST_ANSWER_S + 11) == dict.fromkeys(EVERY, "OwnerUnknown")


def test_a_gpu_that_is_not_selected_clashes_with_nobody() -> None:
    known = owners("index=1")
    known.answered(Source.SLICES, [], 0)
    known.answered(Source.KUBELET, [GPU_0], 0)
    assert why(known, 0) == {0: "NotSelected", 2: "NotSelected"}
    assert why(owners("index=1"), 0)[0] == "NotSelected", "that does not depend on an answer"


def test_labels_that_are_not_known_yet_select_nothing_and_known_ones_stand() -> None:
    known = owners("label=pool=ours")
    for source in Source:
        known.answered(source, [], 0)
    assert why(known, 0) == dict.fromkeys(EVERY, "OwnerUnknown")
    known.know_labels({"pool": "ours"})
    assert why(known, 0) == {}
    known.know_labels(None)
    assert why(known, 0) == {}
    known.know_labels({})
    assert why(known, 0) == dict.fromkeys(EVERY, "NotSelected")


@dataclass
class Slow:
    """The same from the whole history: for each GPU, is it free of others now?"""

    history: list[tuple[Source, frozenset[int] | None, int]] = field(default_factory=list)

    def offered(self, now_s: int) -> set[int]:
        answers = {
            source: [(of, at_s) for who, of, at_s in self.history if who is source and of is not None]
            for source in Source
        }
        if any(not of or now_s - of[-1][1] > LAST_ANSWER_S for of in answers.values()):
            return set()
        known_s = min(of[-1][1] for of in answers.values())

        def clashes(gpu: int) -> bool:
            if any(gpu in of[-1][0] for of in answers.values()):
                return True
            seen = [at_s for of in answers.values() for gpus, at_s in of if gpu in gpus]
            return bool(seen) and known_s - max(seen) < RETURN_S

        return {gpu for gpu in range(2) if not clashes(gpu)}


@given(
    st.lists(
        st.tuples(st.sampled_from(Source), st.none() | st.frozensets(st.sampled_from([0, 1])), st.integers(1, 200)),
        max_size=30,
    )
)
def test_what_is_offered_follows_from_the_history_of_answers(
    steps: list[tuple[Source, frozenset[int] | None, int]],
) -> None:
    known, slow, now_s = owners(), Slow(), 0
    for source, gpus, passed_s in steps:
        now_s += passed_s
        slow.history.append((source, gpus, now_s))
        if gpus is None:
            known.failed(source, "no answer")
        else:
            known.answered(source, [(GPU_0, GPU_1)[gpu] for gpu in gpus], now_s)
        withdrawn = known.withdrawn(NODE, now_s, now_s)
        assert {at for at in range(2) if UUIDS[at] not in withdrawn} == slow.offered(now_s)
