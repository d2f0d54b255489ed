"""Which processes a socket serves: the container that the node mounted it for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from arbiter import host
from tests.unit.arbiter.conftest import ArbiterNode, a_grant
from vgpu.api.contract import CONTAINER_DIR, EARLIER_CONTAINER_DIR
from vgpu.protocol import wire

ROOT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


def mounted(root: str, at: str = CONTAINER_DIR) -> str:
    return f"{ROOT}40 22 8:1 {root} {at} ro,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The arbiter's reading of the mountinfo of a connecting process."""

    def seen(text: str) -> None:
        monkeypatch.setattr(host, "_read", lambda _pid, name: text.encode() if name == "mountinfo" else b"")

    return seen


@pytest.fixture
def on_a_node(node: ArbiterNode) -> ArbiterNode:
    node.limits = replace(node.limits, mount_needed=True)
    node.start()
    node.allocate("k", a_grant())
    return node


@pytest.mark.parametrize(
    ("mountinfo", "shown"),
    [
        (mounted("/var/lib/tangram/grants/k"), True),
        (mounted("/grants/k"), True),
        (mounted("/k"), True),
        (mounted("/var/lib/tangram/grants/k", EARLIER_CONTAINER_DIR), True),
        (mounted("/var/lib/tangram/grants/k", "/var/run/tangram"), True),
        (mounted("/var/lib/tangram/grants/k", "/newroot/run/tangram"), True),
        (mounted("/var/lib/tangram/grants/kk"), False),
        (mounted("/var/lib/tangram/grants"), False),
        (mounted("/var/lib/tangram/lib/k"), False),
        (ROOT, False),
        ("", False),
        ("nonsense", False),
    ],
)
def test_a_grant_is_shown_wherever_it_is_mounted(mountinfo: str, *, shown: bool) -> None:
    assert host.shows(mountinfo, "grants", "k") == shown


def test_a_container_that_has_the_grant_is_served(on_a_node: ArbiterNode, see: Callable[[str], None]) -> None:
    see(mounted(f"/x/{on_a_node.folder.name}/k"))
    assert on_a_node.process().lease(1).refused == 0


@pytest.mark.parametrize("text", [ROOT, "", mounted("/var/lib/tangram")], ids=["nothing", "gone", "a hostPath above"])
def test_one_that_has_no_mount_of_it_is_refused_with_a_sentence(
    on_a_node: ArbiterNode, see: Callable[[str], None], text: str
) -> None:
    see(text)
    process = on_a_node.connect()
    answer = process.receive()
    assert isinstance(answer, wire.Error)
    assert answer.code == 2
    assert answer.text.startswith(f"process {os.getpid()} has no mount of grant k: this socket is for the")
    assert process.hung_up()


def test_one_of_another_container_is_refused_with_or_without_the_rule(
    node: ArbiterNode, see: Callable[[str], None]
) -> None:
    node.start()
    node.allocate("k", a_grant())
    see(mounted(f"/x/{node.folder.name}/other"))
    assert node.connect().receive() == wire.Error(2, "this socket is another container's: yours is in other")


def test_without_the_rule_no_mount_is_needed(node: ArbiterNode, see: Callable[[str], None]) -> None:
    node.start()
    node.allocate("k", a_grant())
    see(ROOT)
    assert node.process().lease(1).refused == 0


def test_of_a_process_that_cannot_be_seen_nothing_is_known(see: Callable[[str], None]) -> None:
    see(ROOT)
    assert host.rejection_reason(0, "grants", "k", mount_needed=True) is None
