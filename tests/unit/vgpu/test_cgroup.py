"""Which pod a process belongs to, by every form in which the kernel and the kubelet write it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.cgroup import pods_of

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
    assert pods_of(text) == pods


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    assert pods_of(text) == ()
