"""Requests above the guarantee that the host pool has no room for: what it can never hold fails at once, what waits is shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.swap.conftest import BurstNode, until

POOL_MIB = 128
OUT_OF_MEMORY = 2
SOON_S = 10
"""Much less than the 30 s that a request may wait, and more than a busy machine takes to refuse."""


@pytest.fixture
def scarce() -> Iterator[BurstNode]:
    """A node with a GPU of 1 GiB and a host pool of 128 MiB."""
    made = BurstNode(pool_mib=POOL_MIB)
    yield made
    print(made.log())  # of a test that failed
    made.close()


def pool_full(node: BurstNode, name: str, *, brief: bool = False) -> str:
    found = next((one for one in node.document(brief=brief).containers if one.key == name), None)
    return found.swap.pool_full if found is not None and found.swap is not None else ""


def test_what_the_pool_can_never_hold_fails_at_once_with_the_sizes(
    scarce: BurstNode, capfd: pytest.CaptureFixture[str]
) -> None:
    program = scarce.run("first")
    assert program.do("memory()")[1] == 900, "the limit is what the program sees"
    for mib in (600, 600, 400):
        code, seconds = program.do(f"alloc({mib})")
        assert code == OUT_OF_MEMORY
        assert seconds < SOON_S
    said = [line for line in capfd.readouterr().err.splitlines() if "host pool" in line]
    assert len(said) == 1, "a program tries again and again"
    assert "an allocation of 600 MiB" in said[0]
    assert "its guarantee is 100 MiB" in said[0]
    assert "host pool of 128 MiB" in said[0]
    (logged,) = (line for line in scarce.log().splitlines() if "memory refused" in line)
    assert "guarantee of 100 MiB and all 128 MiB of the GPU's host pool" in logged
    assert program.do("fill(200, 1)") == 0, "guarantee and pool have room for that"
    assert program.do("alloc(60)")[0] == OUT_OF_MEMORY, "with what it has, that is more than both"
    assert program.do("wrong()") == 0


def test_a_request_that_waits_for_the_pool_is_shown_and_gets_what_another_frees(scarce: BurstNode) -> None:
    first, second = scarce.run("first"), scarce.run("second", wait_s=600)
    assert first.do("fill(200, 1)") == 0
    assert pool_full(scarce, "second") == ""
    second.send("fill(150, 2)")
    until(lambda: pool_full(scarce, "second"))
    assert "of 128 MiB are left" in pool_full(scarce, "second")
    assert pool_full(scarce, "second", brief=True), "the device plugin reads the brief document"
    labels = 'container="main",namespace="default",pod="second"'
    assert scarce.metrics()[f"tangram_container_host_pool_waiting{{{labels}}}"] == 1
    assert first.do("free_all()") is None
    assert second.answer() == 0
    assert pool_full(scarce, "second") == ""
    assert scarce.metrics()[f"tangram_container_host_pool_waiting{{{labels}}}"] == 0
    assert scarce.log().count("memory above the guarantee waits") == 1
    assert second.do("wrong()") == 0
