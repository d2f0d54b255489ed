"""Burst limits on a node: what the GPU can give, how the files follow the annotations, and what is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.allocation import NodePod
from deviceplugin.grants.grant_directories import GrantDirectories, Record
from deviceplugin.pods.burst import IGNORED, LIMITED, BurstUpdater, Guarantees
from deviceplugin.pods.node_pods import NodePods
from kube.objects import Pod
from tests.builders import PodBuilder, pod
from tests.unit.deviceplugin.builders import inventory, node_pod, share, uuid
from vgpu.api.burst import BurstLimits, burst_from_text
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import BURST, grant_for
from vgpu.api.grant import AssignedGpu, Assignment, GrantGpu
from vgpu.api.names import DEFAULT

GPU_MIB = 16 * 1024
FREE: Mapping[str, str] = {"*": "max"}


def placed(name: str = "a", gib: int = 4, core: int = 0, gpus: int = 1, /, **annotations: str) -> PodBuilder:
    pieces = tuple(AssignedGpu(uuid(row), row, gib * 1024, core) for row in range(gpus))
    counted = {"gpu_count": str(gpus)} if gpus > 1 else {}
    one = pod(name).asking(mib=gib * 1024 * gpus, core=core * gpus).on("n1").annotated(**counted, **annotations)
    return one.assigned(text=assignment_to_json(Assignment({"main": pieces}))).with_phase("Running")


@dataclass
class NodeWithBursts:
    folder: Path
    burst_max: Mapping[str, str] | None = field(default_factory=lambda: FREE)
    reported: list[tuple[str, str, str]] = field(default_factory=list)
    overcommit: float | None = None

    def __post_init__(self) -> None:
        self.pods = NodePods(DEFAULT, 1024, burst_max=self.burst_max)
        self.grants = GrantDirectories(self.folder, self.folder / "none")
        self.updater = BurstUpdater(self.pods, self.grants, inventory, self, overcommit=self.overcommit)

    def burst_reduced(self, pod: Pod, reason: str, note: str) -> None:
        self.reported.append((pod.key, reason, note))

    def shown(self, one: PodBuilder) -> NodePod:
        """The watch brings the pod as it is now."""
        self.pods.on_change(self.pods.pod(one.build().uid), one.build())
        self.updater.once()
        found = self.pods.node_pod(one.build().uid)
        assert found is not None
        return found

    def gone(self, one: PodBuilder) -> None:
        self.pods.on_change(one.build(), None)
        self.updater.once()

    def runs(self, one: PodBuilder) -> str:
        """The pod's container has a device and its grant. Answers the key of its directory."""
        self.pods.on_change(None, one.build())
        found = self.pods.node_pod(one.build().uid)
        assert found is not None
        record = Record((f"device of {found.name}",), found.uid, found.namespace, found.name, "main", (uuid(0),), 0.0)
        self.grants.folder(record.key).mkdir(parents=True)
        self.grants.update(record)
        grant = grant_for(found.assignment, "main", namespace=found.namespace, pod=found.name, uid=found.uid)
        self.grants.write(record.key, grant)
        self.updater.files.write(record.key, self.updater.limits(found).get("main"))
        self.updater.once()
        return record.key

    def limits(self, key: str) -> BurstLimits | None:
        path = self.grants.folder(key) / BURST
        return burst_from_text(path.read_text()) if path.exists() else None

    def mib(self, key: str) -> int | None:
        """The memory limit on the first GPU."""
        limits = self.limits(key)
        return limits.gpus[0].mib if limits else None


def test_a_container_has_its_limits_from_its_start_and_they_follow_the_annotations(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    key = node.runs(placed("a", 4, 30, gpu_mem_burst="8Gi"))
    assert node.limits(key) == BurstLimits((GrantGpu(uuid(0), 8192, 30),), 30)
    node.shown(placed("a", 4, 30, gpu_mem_burst="12Gi", gpu_core_burst="100", gpu_mem_burst_wait="5"))
    assert node.limits(key) == BurstLimits((GrantGpu(uuid(0), 12 * 1024, 100),), 5)
    node.shown(placed("a", 4, 30, gpu_mem_burst="4Gi"))
    assert node.limits(key) is None
    node.shown(placed("a", 4, 30, **{"gpu_mem_burst.main": "max"}))
    assert node.mib(key) == GPU_MIB
    node.shown(placed("a", 4, 30))
    assert node.limits(key) is None
    assert node.reported == []
    assert (node.grants.folder(key) / "grant").exists()


def test_the_file_is_for_readers_of_every_user_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    folder = node.grants.folder(node.runs(placed(gpu_mem_burst="8Gi")))
    node.shown(placed(gpu_mem_burst="9Gi"))
    assert (folder / BURST).stat().st_mode & 0o777 == 0o444
    assert {path.name for path in folder.iterdir()} == {"allocation.json", "grant", BURST}


def test_guarantees_of_those_that_were_there_limit_a_burst_with_one_event_and_later_ones_do_not(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    node.runs(placed("a", 6))
    key = node.runs(placed("b", 4, gpu_mem_burst="12Gi"))
    for later in ("c", "d"):
        node.runs(placed(later, 2))
    assert node.mib(key) == GPU_MIB - 6 * 1024
    assert node.reported == [
        ("default/b", LIMITED, f"container main: 12288 MiB are requested of GPU {uuid(0)}, which has 10240 MiB beside the guarantees of other containers: that is the limit")
    ]  # fmt: skip
    node.gone(placed("a", 6))
    assert node.mib(key) == 12 * 1024


def test_max_is_what_the_gpu_can_give_without_an_event(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    node.runs(placed("a", 6))
    key = node.runs(placed("b", 4, gpu_mem_burst="max"))
    assert (node.mib(key), node.reported) == (GPU_MIB - 6 * 1024, [])


def test_a_container_of_two_gpus_bursts_on_both_or_on_none(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    node.runs(placed("a", 12))  # on the first GPU
    key = node.runs(placed("b", 4, 0, 2, gpu_mem_burst="max"))
    assert node.limits(key) is None
    assert [(name, reason) for name, reason, _ in node.reported] == [("default/b", LIMITED)]
    node.gone(placed("a", 12))
    assert node.limits(key) == BurstLimits((GrantGpu(uuid(0), GPU_MIB), GrantGpu(uuid(1), GPU_MIB)))


@pytest.mark.parametrize(
    ("annotations", "why"),
    [
        ({"gpu_mem_burst": "3Gi"}, "is 3Gi, which is 3072 MiB: for container main it must be 4096 MiB, its guarantee"),
        ({"gpu_mem_burst": "much"}, "'much' is not a Kubernetes quantity"),
        ({"gpu_mem_burst": "9Gi"}, "a container of namespace default may have 8Gi at most (chart value burst.max)"),
        ({"gpu_mem_burst.mian": "8Gi"}, "names container 'mian'"),
        ({"gpu_mem_burst": "8Gi", "gpu_mem_burst_wait": "long"}, "whole number of seconds"),
    ],
)
def test_annotations_that_got_past_the_webhook_leave_the_guarantee_and_are_reported_once(
    tmp_path: Path, annotations: dict[str, str], why: str
) -> None:
    node = NodeWithBursts(tmp_path, {"default": "8Gi"})
    key = node.runs(placed("a", gpu_mem_burst="8Gi"))
    assert node.mib(key) == 8192
    for _ in range(3):
        found = node.shown(placed("a", **annotations))
    assert (node.limits(key), found.bursts) == (None, {})
    ((name, reason, note),) = node.reported
    assert (name, reason) == ("default/a", IGNORED)
    assert why in note
    assert note.endswith("; the pod runs at its guarantee")
    node.shown(placed("a", gpu_mem_burst="7Gi"))
    assert node.mib(key) == 7 * 1024


def test_a_limit_that_the_containers_own_annotation_hid_from_admission_does_not_count(tmp_path: Path) -> None:
    """Admission checks the annotation that applies, and the policy those that an edit changes: here the one that applies is removed."""
    node = NodeWithBursts(tmp_path, {"default": "8Gi"})
    key = node.runs(placed("a", **{"gpu_mem_burst": "max", "gpu_mem_burst.main": "6Gi"}))
    assert (node.mib(key), node.reported) == (6 * 1024, [])
    node.shown(placed("a", gpu_mem_burst="max"))
    assert node.limits(key) is None
    assert [reason for _, reason, _ in node.reported] == [IGNORED]


def test_a_plugin_that_was_away_follows_what_changed_meanwhile(tmp_path: Path) -> None:
    first = NodeWithBursts(tmp_path)
    keys = [first.runs(placed(name, 4, gpu_mem_burst="8Gi")) for name in "abc"]
    fresh = NodeWithBursts(tmp_path)
    for one in (placed("a", 4), placed("b", 4, gpu_mem_burst="6Gi"), placed("c", 4, gpu_mem_burst="8Gi")):
        fresh.pods.on_change(None, one.build())
    fresh.updater.once()
    assert [fresh.mib(key) for key in keys] == [None, 6 * 1024, 8192]


def test_a_node_without_bursts_removes_their_files_and_reads_no_annotation(tmp_path: Path) -> None:
    key = NodeWithBursts(tmp_path).runs(placed(gpu_mem_burst="8Gi"))
    off = NodeWithBursts(tmp_path, None)
    off.shown(placed(gpu_mem_burst="nonsense"))
    assert (off.limits(key), off.reported) == (None, [])


def test_a_directory_of_another_pod_with_the_same_devices_is_left_alone(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path)
    key = node.runs(placed(gpu_mem_burst="8Gi"))
    grant = node.grants.read(key)
    assert grant is not None
    node.grants.write(key, replace(grant, uid="uid-of-another"))
    node.shown(placed(gpu_mem_burst="9Gi"))
    assert node.mib(key) == 8192


def test_a_file_that_could_not_be_written_is_written_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeWithBursts(tmp_path)
    key = node.runs(placed(gpu_mem_burst="8Gi"))

    def full(*_: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(node.updater.files, "write", full)
        with pytest.raises(OSError, match="No space"):
            node.shown(placed())
    node.updater.once()
    assert node.limits(key) is None


pods = st.lists(
    st.tuples(
        st.sampled_from(["", "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"]), st.integers(1, 6), st.integers(1, 6)
    ),
    min_size=1,
    max_size=5,
)


def made(at: int, started: str, app: int, init: int) -> NodePod:
    """A pod with an init container and an app container on one GPU."""
    requests = share("init", init, init=True), share("main", app)
    return replace(node_pod(f"p{at}", at, *requests, on=[0]), started=started)


@given(pods)
def test_room_is_the_gpu_less_every_other_guarantee_of_those_that_started_before(
    all_of: list[tuple[str, int, int]],
) -> None:
    node_pods = [made(at, *one) for at, one in enumerate(all_of)]
    guarantees = Guarantees(node_pods, inventory())
    order = sorted(node_pods, key=lambda one: (one.started == "", one.started, one.uid))
    for place, one in enumerate(order):
        before = sum(max(part.mib for part in other.requests) for other in order[:place])
        peak = max(part.mib for part in one.requests)
        for part in one.requests:
            assert guarantees.room_mib(one, part.container) == {uuid(0): GPU_MIB - before - (peak - part.mib)}


@given(pods, st.integers(1, 6))
def test_a_pod_that_starts_later_lowers_nobodys_room(all_of: list[tuple[str, int, int]], more: int) -> None:
    node_pods = [made(at, *one) for at, one in enumerate(all_of) if one[0]]
    before, after = (
        Guarantees(known, inventory())
        for known in (node_pods, [*node_pods, made(9, "2026-01-01T00:00:02Z", more, more), made(8, "", more, more)])
    )
    for one in node_pods:
        assert before.room_mib(one, "main") == after.room_mib(one, "main")


def settled(name: str, text: str, limit_gib: int = 0) -> PodBuilder:
    """A pod with 4 GiB whose assignment says what it may have in all."""
    part = AssignedGpu(uuid(0), 0, 4096, limit_mib=limit_gib * 1024)
    one = placed(name, 4, gpu_mem_burst=text)
    return one.assigned(text=assignment_to_json(Assignment({"main": (part,)})))


def test_with_a_bound_a_limit_is_at_most_what_was_settled_whatever_the_annotations_say(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path, overcommit=1.5)
    key = node.runs(settled("a", "10Gi", 10))
    assert (node.mib(key), node.reported) == (10 * 1024, [])
    for text, mib in (("6Gi", 6 * 1024), ("10Gi", 10 * 1024), ("max", 10 * 1024)):
        node.shown(settled("a", text, 10))
        assert node.mib(key) == mib
    node.shown(settled("a", "12Gi", 10))
    assert node.mib(key) == 10 * 1024
    assert node.reported == [
        ("default/a", LIMITED, f"container main: 12288 MiB is requested of GPU {uuid(0)}, and 10240 MiB were settled when the pod was placed, so that the limits on the GPU keep to burst.overcommit: that is the limit")
    ]  # fmt: skip


def test_with_a_bound_a_pod_of_before_has_its_guarantee_and_is_told(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path, overcommit=1.0)
    key = node.runs(settled("a", "max"))
    node.shown(settled("a", "max"))
    assert node.limits(key) is None
    ((_, reason, note),) = node.reported
    assert reason == LIMITED
    assert "as much as possible is requested" in note
    assert "4096 MiB were settled" in note


def test_a_bound_that_was_lowered_lowers_the_limits_of_the_last_ones(tmp_path: Path) -> None:
    node = NodeWithBursts(tmp_path, overcommit=1.0)
    first = node.runs(settled("a", "max", 12))
    second = node.runs(settled("b", "max", 12))
    assert (node.mib(first), node.limits(second)) == (12 * 1024, None)
    plain = NodeWithBursts(tmp_path / "plain")
    keys = [plain.runs(settled(name, "max", 12)) for name in "ab"]
    assert [plain.mib(key) for key in keys] == [16 * 1024, 12 * 1024], "without a bound it counts for nothing"
