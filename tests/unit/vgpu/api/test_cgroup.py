"""Which pod a process belongs to, by every form in which the kernel and the kubelet write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.cgroup import NOWHERE, CgroupOwner, depth_of, is_container_id, place_of

A = "1b2c3d4e-0a1b-4c5d-8e9f-001122334455"
B = "9f8e7d6c-5b4a-4321-9876-aabbccddeeff"
STATIC = "0123456789abcdef0123456789abcdef"
A_, B_ = A.replace("-", "_"), B.replace("-", "_")

FORMS = {
    "version 2, systemd, burstable": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{A_}.slice/cri-containerd-0f.scope\n",
        (A,),
    ),
    "version 2, systemd, guaranteed": (f"0::/kubepods.slice/kubepods-pod{A_}.slice/crio-0f.scope\n", (A,)),
    "version 2, systemd, under a root of the kubelet's own": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{A_}.slice/cri-containerd-0f.scope\n",
        (A,),
    ),
    "version 2, cgroupfs": (f"0::/kubepods/burstable/pod{A}/0f\n", (A,)),
    "version 2, seen from a cgroup namespace, systemd": (
        f"0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod{A_}.slice/cri-containerd-0f.scope\n",
        (A,),
    ),
    "version 2, seen from a cgroup namespace, cgroupfs": (f"0::/../../pod{A}/0f\n", (A,)),
    "version 2, the pod's own cgroup": (f"0::/kubepods/pod{A}\n", (A,)),
    "version 2, a static pod": (f"0::/kubepods/burstable/pod{STATIC}/0f\n", (STATIC,)),
    "version 1, systemd": (
        f"12:memory:/kubepods.slice/kubepods-pod{A_}.slice/docker-0f.scope\n"
        f"11:cpu,cpuacct:/kubepods.slice/kubepods-pod{A_}.slice/docker-0f.scope\n1:name=systemd:/init.scope\n",
        (A,),
    ),
    "version 1, cgroupfs": (f"4:devices:/kubepods/besteffort/pod{A}/0f\n3:cpuset:/\n", (A,)),
    "version 1 and 2 at once": (f"4:devices:/kubepods/pod{A}/0f\n0::/system.slice/containerd.service\n", (A,)),
    "a path with a colon": (f"0::/kubepods/pod{A}/0f/a:b\n", (A,)),
    "a node that runs inside a pod": (f"0::/kubepods/pod{B}/0f/kubelet/kubepods/burstable/pod{A}/1e\n", (B, A)),
    "a container's own cgroup, named like another pod's": (f"0::/kubepods/pod{A}/0f/pod{B}\n", (A, B)),
    "the node's own process": ("0::/system.slice/kubelet.service\n", ()),
    "a name that only begins like it": (f"0::/kubepods/podium{A}/x\n0::/pod{A}x/\n", ()),
    "no UID": ("0::/kubepods/pod-1/x\n0::/kubepods.slice/kubepods-podabc.slice\n", ()),
    "capital letters": (f"0::/kubepods/pod{A.upper()}/x\n", ()),
    "nothing": ("", ()),
    "no cgroup line": (f"pod{A}\n/kubepods/pod{A}\n", ()),
}


@pytest.mark.parametrize(("text", "pods"), FORMS.values(), ids=FORMS)
def test_the_pod_stands_in_the_name_of_its_cgroup(text: str, pods: tuple[str, ...]) -> None:
    assert tuple(place_of(text, depth).pod for depth in range(len(pods))) == pods
    assert place_of(text, len(pods)) == NOWHERE


C, D = "c0" * 32, "d1" * 32
"""IDs of containers."""
AT = CgroupOwner(A, C)
SLICE = "0::/kubepods.slice"
BURSTABLE, BEST_EFFORT = (f"{SLICE}/kubepods-{c}.slice/kubepods-{c}-pod{A_}.slice" for c in ("burstable", "besteffort"))

PLACES = {
    "version 2, systemd, containerd, Guaranteed": (f"{SLICE}/kubepods-pod{A_}.slice/cri-containerd-{C}.scope", AT),
    "version 2, systemd, containerd, Burstable": (f"{BURSTABLE}/cri-containerd-{C}.scope", AT),
    "version 2, systemd, containerd, BestEffort": (f"{BEST_EFFORT}/cri-containerd-{C}.scope", AT),
    "version 2, systemd, CRI-O": (f"{BURSTABLE}/crio-{C}.scope", AT),
    "version 2, systemd, CRI-O with crun": (f"{BURSTABLE}/crio-{C}.scope/container", AT),
    "version 2, systemd, CRI-O's monitor": (f"{BURSTABLE}/crio-conmon-{C}.scope", CgroupOwner(A)),
    "version 2, systemd, cri-dockerd": (f"{BURSTABLE}/docker-{C}.scope", AT),
    "version 2, cgroupfs, containerd, Guaranteed": (f"0::/kubepods/pod{A}/{C}", AT),
    "version 2, cgroupfs, containerd, Burstable": (f"0::/kubepods/burstable/pod{A}/{C}", AT),
    "version 2, cgroupfs, containerd, BestEffort": (f"0::/kubepods/besteffort/pod{A}/{C}", AT),
    "version 2, cgroupfs, CRI-O": (f"0::/kubepods/burstable/pod{A}/crio-{C}", AT),
    "version 1, systemd, containerd": (
        f"12:memory:/kubepods.slice/kubepods-pod{A_}.slice/cri-containerd-{C}.scope\n1:name=systemd:/init.scope",
        AT,
    ),
    "version 1, systemd, CRI-O": (f"9:pids:/kubepods.slice/kubepods-pod{A_}.slice/crio-{C}.scope", AT),
    "version 1, cgroupfs, containerd": (f"4:devices:/kubepods/besteffort/pod{A}/{C}\n3:cpuset:/", AT),
    "version 1, cgroupfs, CRI-O": (f"4:devices:/kubepods/pod{A}/crio-{C}", AT),
    "version 1, one hierarchy with the pod alone": (f"4:rdma:/kubepods/pod{A}\n3:cpu:/kubepods/pod{A}/{C}", AT),
    "versions 1 and 2 at once": (f"4:devices:/kubepods/pod{A}/{C}\n0::/system.slice/containerd.service", AT),
    "a systemd path that runc took for a cgroupfs one": (
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{A_}.slice:cri-containerd:{C}",
        AT,
    ),
    "a kubelet with a root of its own, as kind's": (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{A_}.slice/cri-containerd-{C}.scope",
        AT,
    ),
    "kind in a docker container, version 1": (f"4:pids:/docker/{D}/kubelet/kubepods/burstable/pod{A}/{C}", AT),
    "a reader in a cgroup namespace, systemd": (f"0::/../../kubepods-besteffort-pod{A_}.slice/crio-{C}.scope", AT),
    "a reader in a cgroup namespace, another class": (
        f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{A_}.slice/cri-containerd-{C}.scope",
        AT,
    ),
    "a reader in a cgroup namespace, cgroupfs": (f"0::/../../pod{A}/{C}", AT),
    "a reader in the same pod": (f"0::/../cri-containerd-{C}.scope", NOWHERE),
    "a static pod": (f"0::/kubepods/burstable/pod{STATIC}/{C}", CgroupOwner(STATIC, C)),
    "a static pod, systemd": (f"{SLICE}/kubepods-pod{STATIC}.slice/crio-{C}.scope", CgroupOwner(STATIC, C)),
    "systemd inside the container": (f"{BURSTABLE}/cri-containerd-{C}.scope/system.slice/sshd.service", AT),
    "docker inside the container": (f"{BURSTABLE}/cri-containerd-{C}.scope/docker/{D}", AT),
    "a cgroup that is gone": (f"0::/kubepods/pod{A}/{C} (deleted)", AT),
    "the pod's own cgroup": (f"0::/kubepods/pod{A}", CgroupOwner(A)),
    "a container that is no hexadecimal": (f"0::/kubepods/pod{A}/{C[:-1]}g", CgroupOwner(A)),
    "a lie: another pod's name in one's own cgroup": (f"0::/kubepods/pod{A}/{C}/kubepods/pod{B}/{D}", AT),
    "a lie: another container's name": (f"0::/kubepods/pod{A}/{C}/{D}", AT),
    "a lie: a name in the pod's cgroup, not a container's": (f"0::/kubepods/pod{A}/init/pod{B}/{D}", CgroupOwner(A)),
    "a lie: one hierarchy of several": (f"4:a:/kubepods/pod{A}/{C}/pod{B}/{D}\n3:b:/kubepods/pod{A}/{C}", AT),
    "the node's own process": ("0::/system.slice/kubelet.service", NOWHERE),
    "nothing": ("", NOWHERE),
}


@pytest.mark.parametrize(("text", "place"), PLACES.values(), ids=PLACES)
def test_a_process_is_in_the_container_whose_id_stands_behind_its_pod(text: str, place: CgroupOwner) -> None:
    assert place_of(f"{text}\n" if text else "") == place


OUTER = f"0::/kubepods/burstable/pod{B}/{D}/kubelet/kubepods"


@pytest.mark.parametrize(
    ("own", "text", "place"),
    [
        (f"{OUTER}/pod{STATIC}/{C}", f"{OUTER}/burstable/pod{A}/{C}", AT),
        (f"{OUTER}/pod{STATIC}/{C}", f"{OUTER}/burstable/pod{A}/{C}/pod{STATIC}/{D}", AT),
        (f"{OUTER}/pod{STATIC}/{C}", f"0::/kubepods/burstable/pod{B}/{D}", NOWHERE),
        (f"0::/kubepods/pod{B}/{D}", f"0::/kubepods/pod{A}/{C}/pod{B}/{D}", AT),
        ("0::/", f"0::/../../pod{A}/{C}/pod{B}/{D}", AT),
        ("", f"0::/kubepods/pod{A}/{C}", AT),
    ],
    ids=["a pod of the node", "its lie", "the outer node's", "an outermost node", "a namespace", "unknown"],
)
def test_on_a_node_that_runs_inside_a_pod_the_nodes_own_pods_count(own: str, text: str, place: CgroupOwner) -> None:
    assert place_of(text, depth_of(own)) == place


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    assert place_of(text) == NOWHERE
    assert depth_of(text) == 0


@given(st.lists(st.sampled_from([f"pod{B}", D, f"crio-{D}.scope", f"kubepods-pod{B_}.slice", "..", "x"]), max_size=8))
def test_whatever_a_container_makes_in_its_cgroup_it_stays_where_it_is(names: list[str]) -> None:
    assert place_of("/".join((f"0::/kubepods/pod{A}/{C}", *names)) + "\n") == AT


@pytest.mark.parametrize(
    ("text", "known"), [(C, True), (C[:-1], False), (f"{C}0", False), (C.upper(), False), ("", False)]
)
def test_an_id_has_64_hexadecimal_digits(text: str, *, known: bool) -> None:
    assert is_container_id(text) == known
