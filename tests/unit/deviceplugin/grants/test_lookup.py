"""The pod of a grant directory when a container is about to start, known by device IDs alone."""

from __future__ import annotations

import pytest

from deviceplugin.allocation import NodePod
from deviceplugin.grants.allocation_record import Record, new_suffix
from deviceplugin.grants.grant_directories import GrantDirectory
from deviceplugin.grants.lookup import containers_of
from tests.unit.deviceplugin.builders import node_pod, share, uuid
from vgpu.api.errors import Refused
from vgpu.api.grant import Grant, GrantGpu

IDS = tuple(f"{uuid(0)}-{slot}" for slot in range(4))


def folder(order: int, pod: str, container: str, place: int, *, granted: bool = False) -> GrantDirectory:
    record = Record(IDS, f"uid-{pod}", "default", pod, container, (uuid(0),), 0.0, place, new_suffix(order))
    grant = Grant("default", pod, f"uid-{pod}", container, (GrantGpu(uuid(0), 4096),)) if granted else None
    return GrantDirectory(record.key, record, grant)


def unreadable(order: int, granted_to: Record | None = None) -> GrantDirectory:
    key = folder(order, "x", "x", 0).key
    grant = None
    if granted_to is not None:
        gpus = (GrantGpu(uuid(0), 4096),)
        grant = Grant("default", granted_to.pod, granted_to.uid, granted_to.container, gpus)
    return GrantDirectory(key, None, grant, "allocation.json has 0 bytes that are no allocation")


def found(
    folders: list[GrantDirectory], one: NodePod, listed: tuple[str, ...], **more: object
) -> list[tuple[int, str]]:
    """(how new the directory is, container), newest first."""
    keys = [each.key for each in folders]
    answer = containers_of(folders, one, 4, listed, **more)  # type: ignore[arg-type]
    return sorted(((keys.index(key), container) for key, container in answer.items()))


def with_setup(name: str) -> NodePod:
    return node_pod(name, 0, share("setup", 4, init=True), share("main", 4), on=[0])


def test_an_init_and_an_app_container_of_the_same_devices_have_a_directory_each() -> None:
    a = with_setup("a")
    folders = [folder(2, "a", "main", 1), folder(1, "a", "setup", 0)]
    assert found(folders, a, ("main",)) == [(0, "main"), (1, "setup")]


def test_the_answer_is_the_same_at_each_start_and_restart() -> None:
    a = with_setup("a")
    folders = [folder(2, "a", "main", 1, granted=True), folder(1, "a", "setup", 0, granted=True)]
    for initialized in (False, True):
        assert found(folders, a, ("main",), initialized=initialized) == [(0, "main"), (1, "setup")]


def test_a_directory_that_was_granted_to_another_pod_and_all_before_it_are_left_alone() -> None:
    folders = [folder(3, "a", "main", 0), folder(2, "b", "main", 0, granted=True), folder(1, "a", "main", 0)]
    a = node_pod("a", 0, share("main", 4), on=[0])
    assert found(folders, a, ("main",)) == [(0, "main")]


def test_a_guess_that_was_wrong_is_put_right_by_the_containers_place() -> None:
    a = node_pod("a", 0, share("prepare", 4, init=True), share("work", 4), on=[0])
    folders = [folder(2, "b", "main", 1), folder(1, "b", "setup", 0)]
    assert found(folders, a, ("work",)) == [(0, "work"), (1, "prepare")]


def test_a_guess_for_a_third_pod_ends_what_is_this_ones() -> None:
    a = node_pod("a", 0, share("main", 4), on=[0])
    folders = [folder(3, "b", "main", 0), folder(2, "c", "main", 0)]
    assert found(folders, a, ("main",)) == [(0, "main")]


def test_guesses_that_differ_from_call_to_call_leave_the_order_of_the_directories() -> None:
    a = with_setup("a")
    folders = [folder(2, "a", "setup", 0), folder(1, "b", "main", 1)]  # the plugin was killed between the two
    records = [one.record for one in folders if one.record is not None]
    assert found(folders, a, ("main",), records=records) == [(0, "main"), (1, "setup")]
    older = folder(0, "c", "main", 0)  # of an admission that failed
    assert found([*folders, older], a, ("main",), records=records) == [(0, "main"), (1, "setup")]


def test_of_two_directories_for_one_container_the_newer_counts() -> None:
    a = node_pod("a", 0, share("main", 4), on=[0])
    assert found([folder(2, "a", "main", 0), folder(1, "a", "main", 0, granted=True)], a, ("main",)) == [(0, "main")]


def test_a_container_of_the_same_size_with_other_devices_needs_no_directory_of_these() -> None:
    a = node_pod("a", 0, share("main", 4), share("other", 4), on=[0])
    assert found([folder(1, "a", "other", 1)], a, ("other",)) == [(0, "other")]
    b = node_pod("b", 0, share("first", 4, init=True), share("second", 4, init=True), share("main", 8), on=[0])
    elsewhere = folder(1, "b", "second", 1).record
    assert found([folder(1, "b", "first", 0)], b, (), records=[elsewhere]) == [(0, "first")]


def test_a_container_whose_directory_is_gone_is_refused_and_so_are_those_that_it_may_be() -> None:
    a = with_setup("a")
    with pytest.raises(
        Refused, match=r"pod default/a: container main with 4 devices has no grant directory: it was removed"
    ):
        found([folder(1, "a", "setup", 0)], a, ("main",))
    with pytest.raises(Refused, match="container setup with 4 devices has no grant directory"):
        found([folder(2, "a", "main", 1)], a, ("main",))
    assert found([folder(2, "a", "main", 1)], a, ("main",), initialized=True) == [(0, "main")]
    with pytest.raises(Refused, match="container setup and main with 4 devices has no grant directory"):
        found([], a, ("main",))


def test_a_newest_directory_of_another_pod_is_named_in_the_refusal() -> None:
    a = node_pod("a", 0, share("main", 4), on=[0])
    taken = folder(2, "b", "main", 0, granted=True)
    with pytest.raises(Refused, match=f"the newest of these devices is {taken.key}, of pod UID uid-b: delete the pod"):
        found([taken], a, ("main",))


def test_a_record_that_cannot_be_read_is_made_good_by_the_grant_beside_it() -> None:
    a = with_setup("a")
    setup = folder(1, "a", "setup", 0).record
    main = folder(2, "a", "main", 1).record
    folders = [unreadable(2, main), unreadable(1, setup)]
    assert found(folders, a, ("main",)) == [(0, "main"), (1, "setup")]
    b = node_pod("b", 0, share("main", 4), on=[0])
    with pytest.raises(Refused, match=r"container main .* that can be read \(allocation.json has 0 bytes"):
        found(folders, b, ("main",))


def test_records_that_cannot_be_read_without_a_grant_are_those_that_are_left_over() -> None:
    a = with_setup("a")
    assert found([folder(2, "a", "main", 1), unreadable(1)], a, ("main",)) == [(0, "main"), (1, "setup")]
    assert found([unreadable(2), unreadable(1)], a, ("main",)) == [(0, "main"), (1, "setup")]
    with pytest.raises(Refused, match="delete the pod, or mend the file"):
        found([unreadable(1)], a, ("main",))


def test_a_directory_of_an_earlier_plugin_is_shared_by_all_and_the_app_containers() -> None:
    a = with_setup("a")
    record = Record(IDS, "uid-a", "default", "a", "setup", (uuid(0),), 0.0)
    assert found([GrantDirectory(record.key, record)], a, ("main",)) == [(0, "main")]
    assert found([GrantDirectory(record.key, record)], a, ()) == [(0, "main")]
