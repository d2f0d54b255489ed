"""Limits that were set are known to the next arbiter, so that a container is not over its limit for what it leased under one."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import structlog.testing

from arbiter.memory.highest_limits import AGAIN_S, HighestLimits
from arbiter.memory.node_share import NodeShare
from tests.unit.arbiter.memory.test_node_share import GPU, MIB, a_grant, limits


@pytest.fixture
def grants(tmp_path: Path) -> Path:
    (tmp_path / "grants/k").mkdir(parents=True)
    return tmp_path / "grants"


def test_they_are_known_after_a_restart_while_the_container_is_there(grants: Path) -> None:
    file = grants.with_name("limits.json")
    HighestLimits(file, grants).set("k", GPU, 500)
    again = HighestLimits(file, grants)
    again.set("k", GPU, 300)
    assert again.of("k", GPU) == 500
    again.set("gone", GPU, 700)
    assert HighestLimits(file, grants).of("gone", GPU) == 0
    again.forget("k")
    assert HighestLimits(file, grants).of("k", GPU) == 0


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"containers":{"k":3}}', b'{"containers":{},"version":2}', b"\xff" * 9]
)
def test_a_file_that_cannot_be_read_raises_no_limit(grants: Path, content: bytes) -> None:
    file = grants.with_name("limits.json")
    file.write_bytes(content)
    assert HighestLimits(file, grants).of("k", GPU) == 0


@pytest.mark.parametrize("content", [b'{"containers":{},"version":2}', b'{"limits":{},"version":2}'])
def test_a_file_of_a_later_version_is_reported(grants: Path, content: bytes) -> None:
    file = grants.with_name("limits.json")
    file.write_bytes(content)
    with structlog.testing.capture_logs() as logs:
        assert HighestLimits(file, grants).of("k", GPU) == 0
    (log,) = logs
    assert (log["event"], log["file"]) == ("earlier limits of containers are not known", str(file))
    assert log["reason"] == "its content is of version 2: this program reads version 1"


def test_a_file_that_cannot_be_written_ends_nothing(grants: Path) -> None:
    kept = HighestLimits(grants.with_name("none") / "limits.json", grants)
    kept.set("k", GPU, 500)
    assert kept.of("k", GPU) == 500


def test_a_file_that_could_not_be_written_is_written_later(grants: Path) -> None:
    """A disk may be full for a while; after the next restart the container would be over its limit."""
    now_s, file = 10.0, grants.with_name("none") / "limits.json"
    kept = HighestLimits(file, grants, lambda: now_s)
    kept.set("k", GPU, 500)
    file.parent.mkdir()
    kept.set("k", GPU, 500)
    assert not file.exists(), "not at each reading of the GPU"
    now_s += AGAIN_S
    kept.set("k", GPU, 500)
    assert HighestLimits(file, grants).of("k", GPU) == 500


def test_where_bursts_are_switched_off_a_container_keeps_what_it_leased_under_its_limit_and_no_more(
    grants: Path,
) -> None:
    file = grants.with_name("limits.json")
    HighestLimits(file, grants).set("k", GPU, 400 * MIB)
    share = NodeShare("k", None, HighestLimits(file, grants))
    share.begin(a_grant(100), None)
    for claimed, lawful in ((50, 100), (250, 250), (900, 400)):
        assert share.lawful_bytes(a_grant(100), None, [(claimed * MIB, 0)]) == [lawful * MIB]
    share.begin(a_grant(100), None)
    assert share.lawful_bytes(a_grant(100), None, [(250 * MIB, 0)]) == [100 * MIB], "another container's directory"


def test_a_container_that_never_had_a_higher_limit_gets_none_by_what_it_states(grants: Path) -> None:
    share = NodeShare("k", None, HighestLimits(grants.with_name("limits.json"), grants))
    share.begin(a_grant(100), limits(900))
    assert share.lawful_bytes(a_grant(100), limits(900), [(900 * MIB, 0)]) == [100 * MIB]
