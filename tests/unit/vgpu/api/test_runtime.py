"""What a container runtime's version says about CDI devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.runtime import LONGEST, CdiSupport, cdi_support, shown

ON, SETTING, NONE, UNKNOWN = CdiSupport.ON, CdiSupport.SETTING, CdiSupport.NONE, CdiSupport.UNKNOWN


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("containerd://2.1.5", ON), ("containerd://2.1.5-k3s1", ON), ("containerd://v2.0.0-rc.1", ON), ("containerd://10.0.1", ON),
        ("containerd://1.7.27", SETTING), ("containerd://1.7.0-bottlerocket", SETTING), ("containerd://1.10.0", SETTING),
        ("containerd://1.6.33", NONE), ("containerd://0.2.3", NONE),
        ("cri-o://1.34.1", ON), ("cri-o://1.23.0", ON), ("cri-o://1.22.9", NONE),
        ("docker://27.3.1", UNKNOWN), ("containerd://0.0.0+unknown", UNKNOWN), ("containerd://", UNKNOWN), ("", UNKNOWN), ("2.1.5", UNKNOWN),
        ("Containerd://2.0.0", UNKNOWN), ("containerd://2", UNKNOWN),
    ],
)  # fmt: skip
def test_a_version_says_whether_devices_come(version: str, support: CdiSupport) -> None:
    assert cdi_support(version) is support


@given(st.integers(0, 30), st.integers(0, 40), st.text(max_size=12))
def test_a_newer_containerd_never_does_less(major: int, minor: int, rest: str) -> None:
    """As the obvious rule says it."""
    obvious = (
        ON if major >= 2 else SETTING if (major, minor) >= (1, 7) else NONE if (major, minor) > (0, 0) else UNKNOWN
    )
    assert cdi_support(f"containerd://{major}.{minor}.{rest}") is obvious


@given(st.text(max_size=300))
def test_any_text_has_an_answer_and_a_bounded_name(text: str) -> None:
    assert cdi_support(text) in CdiSupport
    assert 0 < len(shown(text)) <= max(LONGEST, len("the container runtime"))
