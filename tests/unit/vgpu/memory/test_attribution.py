"""Which grant a process counts against: by cgroup first, and by its mount among what that leaves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.cgroup import NOWHERE, CgroupOwner
from vgpu.memory.attribution import Owner, Owners, divided

X, Y, Z = "c0" * 32, "d1" * 32, "e2" * 32
"""IDs of containers."""
KNOWN = Owners([Owner("a", "A", X), Owner("b1", "B", Y), Owner("b2", "B", Z)])
"""Pod A with one container, pod B with two."""
NEW = Owners([Owner("a", "A"), Owner("b1", "B"), Owner("b2", "B", Z)])
"""Nobody knows two of the containers yet."""

CASES = {
    "the container of its cgroup": (KNOWN, CgroupOwner("B", Z), None, ("b2",)),
    "one grant, and no ID yet": (NEW, CgroupOwner("A", X), None, ("a",)),
    "several grants, and no ID yet": (NEW, CgroupOwner("B", Y), None, ("b1", "b2")),
    "a container of the pod that has no grant": (KNOWN, CgroupOwner("B", X), None, ("b1", "b2")),
    "the pod's own cgroup": (KNOWN, CgroupOwner("B"), None, ("b1", "b2")),
    "a mount of the pod's decides where the ID does not": (NEW, CgroupOwner("B", Y), "b1", ("b1",)),
    "a mount of a sibling's does not, where the ID does": (KNOWN, CgroupOwner("B", Z), "b1", ("b2",)),
    "a mount of another pod's never does": (KNOWN, CgroupOwner("A", X), "b1", ("a",)),
    "another pod's container ID never does": (KNOWN, CgroupOwner("A", Y), None, ("a",)),
    "a pod without a grant": (KNOWN, CgroupOwner("C", X), None, ()),
    "no pod, and a mount": (KNOWN, NOWHERE, "b1", ("b1",)),
    "no pod, and a mount of no grant": (KNOWN, NOWHERE, "x", ()),
    "nothing": (KNOWN, NOWHERE, None, ()),
}


@pytest.mark.parametrize(("owners", "place", "shown", "keys"), CASES.values(), ids=CASES)
def test_the_cgroup_decides_and_the_mount_where_it_leaves_several(
    owners: Owners, place: CgroupOwner, shown: str | None, keys: tuple[str, ...]
) -> None:
    assert owners.of(place, shown) == keys


@given(st.sampled_from("AB"), st.sampled_from([X, Y, Z, ""]), st.sampled_from(["a", "b1", "b2", "x", None]))
def test_no_process_counts_against_the_grant_of_another_pod(pod: str, container: str, shown: str | None) -> None:
    for owners in (KNOWN, NEW):
        found = owners.of(CgroupOwner(pod, container), shown)
        assert found
        assert all(key.startswith(pod.lower()) for key in found)


@given(st.integers(0, 1000), st.dictionaries(st.sampled_from("abcd"), st.integers(-100, 500), min_size=1))
def test_grants_that_count_as_one_are_exceeded_together_or_not_at_all(held: int, free: dict[str, int]) -> None:
    parts = divided(held, free)
    assert sum(parts.values()) == held
    assert all(part >= 0 for part in parts.values())
    exceeded = any(part > max(0, free[key]) for key, part in parts.items())
    assert exceeded == (held > sum(max(0, one) for one in free.values()))


def test_without_a_grant_on_that_gpu_nothing_is_charged() -> None:
    assert divided(5, {}) == {}
