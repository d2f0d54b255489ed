"""Class and level of a placed pod: what annotations may change, which pods may be latency-critical, and how grants follow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deviceplugin.grants.grant_directories import GrantDirectories, Record
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.service_class import ServiceClassUpdater, service_class_of
from kube.objects import Pod
from tests.builders import PodBuilder, pod
from tests.unit.deviceplugin.builders import uuid
from vgpu.api.codec import assignment_to_json
from vgpu.api.contract import grant_for
from vgpu.api.grant import AssignedGpu, Assignment, Grant
from vgpu.api.names import CLASSES, DEFAULT, LEVELS

LC, STANDARD, BE = CLASSES
words = st.sampled_from([*CLASSES, "", "Latency-Critical", "urgent", "0", "\x00" * 3, "x" * 300])
numbers = st.sampled_from([*map(str, LEVELS), "", "5", "-1", "2 ", "two", "9" * 99])


def placed(service_class: str = STANDARD, level: int = 2, name: str = "a", /, **annotations: str) -> PodBuilder:
    assignment = Assignment({"main": (AssignedGpu(uuid(0), 0, 4096),)}, service_class=service_class, level=level)
    text = assignment_to_json(assignment)
    return pod(name).asking(mib=4096).on("n1").annotated(**annotations).assigned(text=text)


@given(st.sampled_from(CLASSES), st.sampled_from(LEVELS), st.none() | words, st.none() | numbers, st.booleans())
def test_whatever_is_written_the_terms_are_valid_and_latency_critical_only_where_it_may_be(
    service_class: str, level: int, word: str | None, number: str | None, may: bool
) -> None:
    assignment = Assignment({}, service_class=service_class, level=level)
    annotations = {DEFAULT.service_class: word, DEFAULT.level: number}
    written = {key: text for key, text in annotations.items() if text is not None}
    found = service_class_of(written, assignment, "serving", DEFAULT, ["serving"] if may else ["other"])
    usable = word in CLASSES and (may or word != LC)
    fallback = service_class if may or service_class != LC else STANDARD
    assert found.service_class == (word if usable else fallback)
    assert found.level == (int(number) if number in map(str, LEVELS) else level)
    refused = (word is not None and not usable) + (number is not None and number not in map(str, LEVELS))
    assert len(found.ignored) == refused


def test_the_sentences_name_value_and_range() -> None:
    assignment = Assignment({}, service_class=STANDARD, level=1)
    wrong = service_class_of({DEFAULT.service_class: "urgent", DEFAULT.level: "9"}, assignment, "n", DEFAULT, ["*"])
    assert wrong.ignored == (
        "annotation tangram.sh/class is 'urgent': it must be one of latency-critical, standard, best-effort; class standard applies",
        "annotation tangram.sh/level is '9': it must be one of 0, 1, 2, 3, 4; level 1 applies",
    )
    (note,) = service_class_of({DEFAULT.service_class: LC}, assignment, "n", DEFAULT, ["b", "a"]).ignored
    assert "namespace n may not have (those that may: a, b); class standard applies" in note


@pytest.mark.parametrize("edit", [{"class": "nonsense"}, {"level": "nonsense"}])
def test_a_pod_whose_class_was_edited_to_nonsense_is_a_pod_still(edit: dict[str, str]) -> None:
    made = NodePods(DEFAULT, 1024)
    made.on_change(None, placed(BE, 3, **edit).build())
    (node_pod,) = made.node_pods()
    assert (node_pod.assignment.service_class, node_pod.assignment.level, len(node_pod.ignored)) == (BE, 3, 1)


@dataclass
class NodeWithClasses:
    folder: Path
    urgent: tuple[str, ...] = ("*",)
    reported: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pods = NodePods(DEFAULT, 1024, self.urgent)
        self.grants = GrantDirectories(self.folder, self.folder / "none")
        self.class_updater = ServiceClassUpdater(self.pods, self.grants, self)

    def class_ignored(self, pod: Pod, note: str) -> None:
        self.reported.append((pod.key, note))

    def runs(self, one: PodBuilder, unit: str = "x") -> str:
        """The pod's container has this device and its grant."""
        self.pods.on_change(None, one.build())
        node_pod = self.pods.node_pod(one.build().uid)
        assert node_pod is not None
        record = Record((unit,), node_pod.uid, node_pod.namespace, node_pod.name, "main", (uuid(0),), 0.0)
        self.grants.folder(record.key).mkdir(parents=True)
        self.grants.update(record)
        about = {"namespace": node_pod.namespace, "pod": node_pod.name, "uid": node_pod.uid}
        self.grants.write(
            record.key, replace(grant_for(node_pod.assignment, "main", **about), over_limit_action="kill", clear=True)
        )
        self.class_updater.once()
        return record.key

    def edited(self, one: PodBuilder) -> None:
        self.pods.on_change(one.build(), one.build())
        self.class_updater.once()

    def grant(self, key: str) -> Grant:
        found = self.grants.read(key)
        assert found is not None
        return found


def test_a_running_pods_grant_follows_its_annotations_and_keeps_the_rest(tmp_path: Path) -> None:
    node = NodeWithClasses(tmp_path)
    key, other = node.runs(placed(BE)), node.runs(placed(BE, 2, "b"), "y")
    before = node.grant(key)
    node.edited(placed(BE, **{"class": LC, "level": "0"}))
    assert node.grant(key) == replace(before, service_class=LC, level=0)
    assert node.grant(other).service_class == BE
    node.edited(placed(BE))
    assert node.grant(key) == before, "without annotations it is what it was placed as"


def test_what_does_not_count_changes_nothing_and_is_reported_once(tmp_path: Path) -> None:
    node = NodeWithClasses(tmp_path, urgent=("serving",))
    key = node.runs(placed(BE))
    for _ in range(3):
        node.edited(placed(BE, **{"class": LC}))
    assert node.grant(key).service_class == BE
    assert [(pod, "may not have" in note) for pod, note in node.reported] == [("default/a", True)]
    node.edited(placed(BE, **{"class": STANDARD}))
    assert node.grant(key).service_class == STANDARD


def test_a_plugin_that_was_away_follows_what_was_edited_meanwhile(tmp_path: Path) -> None:
    key = NodeWithClasses(tmp_path).runs(placed(BE))
    fresh = NodeWithClasses(tmp_path)
    fresh.edited(placed(BE, **{"class": STANDARD}))
    assert fresh.grant(key).service_class == STANDARD


def test_a_grant_that_could_not_be_written_is_written_at_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = NodeWithClasses(tmp_path)
    key = node.runs(placed(BE))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(node.grants, "write", full)
        with pytest.raises(OSError, match="No space"):
            node.edited(placed(BE, **{"class": STANDARD}))
    node.class_updater.once()
    assert node.grant(key).service_class == STANDARD


def test_a_grant_of_another_pod_with_the_same_devices_is_left_alone(tmp_path: Path) -> None:
    node = NodeWithClasses(tmp_path)
    key = node.runs(placed(BE))
    node.grants.write(key, replace(node.grant(key), uid="uid-of-another"))
    node.edited(placed(BE, **{"class": STANDARD}))
    assert node.grant(key).service_class == BE
