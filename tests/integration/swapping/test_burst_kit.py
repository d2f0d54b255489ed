"""What tests/gpu/kit/burst.py starts: a copier with a pool, and the files and settings of bursts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from arbiter.swap.copier import Copier
from tests.built import shim_build
from tests.gpu.kit import burst
from tests.gpu.kit.machine import MIB, Machine, machine
from tests.integration.copier.harness import state
from vgpu.api.burst import burst_from_text
from vgpu.protocol.copier import State


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TANGRAM_SHIM_BUILD", str(shim_build()))
    with machine(True, fake_options="context_mib=16") as made:
        yield made


def start(here: Machine, pool_mib: int):
    return burst.copier(here.build, here.uuid, here.folder / "copier.sock", here.base, pool_mib, burst.FAKE_POOL_KINDS)


def asked(here: Machine) -> State:
    link = Copier(here.folder / "copier.sock")
    try:
        return state(link)
    finally:
        link.close()


def test_a_copier_is_ready_with_its_pool_and_ends_with_its_context(here: Machine) -> None:
    with start(here, 63) as (made, kind):
        assert kind == "plain"
        seen = asked(here)
        assert (seen.pool_bytes, seen.registered_bytes) == (64 * MIB, 64 * MIB)
        assert made.process.poll() is None
    assert made.process.returncode == 0


def test_a_pool_that_the_machine_has_no_memory_for_is_an_error_with_the_reason(here: Machine) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
    with pytest.raises(RuntimeError, match=r"no memory for a pool of \d+ MiB: plain: "), start(here, 2 * whole):
        pass


def test_a_grant_with_a_burst_has_the_file_that_the_node_writes(here: Machine) -> None:
    here.start_arbiter()
    key = here.grant(1000, burst_mib=3000)
    (limit,) = burst_from_text((here.folder / "grants" / key / "burst").read_text()).gpus
    assert (limit.uuid, limit.mib) == (here.uuid, 3000)
    assert not (here.folder / "grants" / here.grant(1000) / "burst").exists()


def test_the_arbiter_is_told_of_folders_only_if_it_serves_bursts(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burst, "served", lambda: False)
    assert burst.arbiter_settings(here.folder) == {}
    monkeypatch.setattr(burst, "served", lambda: True)
    settings = burst.arbiter_settings(here.folder)
    assert set(settings) == set(burst.SETTINGS)
    assert all(Path(settings[name]).is_dir() for name in ("copiers_dir", "swap_dir"))
