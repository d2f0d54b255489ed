"""A pod deleted by force whose processes run on, seen by a real plugin process: in the inventory, in metrics, by the kubelet's next request."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import grpc.aio
import pytest

from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.test_plugin import CORE, MEM, Start, inventory, running, sharing
from vgpu.api.codec import grant_from_text
from vgpu.api.inventory import Orphan

__all__ = ["fake_driver", "running"]

GONE = str(UUID(int=7))
PID = 4242


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A node's /proc, with its first process."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1/cgroup").write_text("0::/init.scope\n")
    return tmp_path


def process_of(proc: Path, uid: str) -> Path:
    made = proc / str(PID)
    (made / "task").mkdir(parents=True)
    (made / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/0f\n")
    (made / "stat").write_text(f"{PID} (python) D 1 1 1\n")
    return made


async def runs(made: Node, name: str, uid: str, units: int = 12, core: int = 60) -> dict[str, Any]:
    """A pod with a running container."""
    plain = sharing(name, inventory(made), 0, units, core).plain()
    plain["metadata"]["uid"] = uid
    made.api.put(plain)
    await made.kubelet.admit(plain)
    made.arbiter_listens(name)
    await made.kubelet.start_container(name, "main")
    return plain


async def orphans_are(made: Node, *uids: str) -> tuple[float, tuple[Orphan, ...]]:
    """Seconds until the annotation names exactly these, and its entries for them."""
    began = time.monotonic()
    async with asyncio.timeout(20):
        while [orphan.uid for orphan in inventory(made).orphans] != list(uids):
            await made.api.news.wait()
    return time.monotonic() - began, inventory(made).orphans


def delete_by_force(made: Node, plain: dict[str, Any]) -> None:
    """The API forgets it, and so does the kubelet; its process does not care."""
    made.api.remove(plain)
    made.kubelet.remove("default", plain["metadata"]["name"])


async def test_a_pod_deleted_by_force_keeps_its_capacity_until_its_last_process_is_gone(
    running: Start, proc: Path
) -> None:
    async with running("--proc-root", str(proc)) as made:
        plain = await runs(made, "a", GONE)
        folder, ids = made.grant_folder("a"), made.kubelet.records["default", "a"]["main", MEM]
        process = process_of(proc, GONE)
        delete_by_force(made, plain)
        took_s, (orphan,) = await orphans_are(made, GONE)
        assert took_s < 2.0
        assert (orphan.key, [(p.uuid, p.mib, p.core_percent) for p in orphan.held]) == (
            "default/a", [(inventory(made).gpus[0].uuid, 12 * 1024, 60)],
        )  # fmt: skip
        _, numbers = await made.get("/metrics")
        (line,) = [line for line in numbers.splitlines() if line.startswith("tangram_deviceplugin_orphan_bytes{")]
        assert 'pod="a"' in line
        assert float(line.split()[-1]) == 12 * 2**30

        late = sharing("late", inventory(made), 0, 12)  # placed before the extender heard of it
        made.api.put(late.plain())
        began = time.monotonic()
        with pytest.raises(
            grpc.aio.AioRpcError, match="counting pod default/a, deleted by force, whose processes still"
        ):
            await made.kubelet.admit(late.plain())
        assert 1.5 < time.monotonic() - began < 8.0
        made.api.remove(late.plain())

        small = sharing("small", inventory(made), 0, 4)
        made.api.put(small.plain())
        await made.kubelet.admit(small.plain())
        assert set(made.kubelet.records["default", "small"]["main", MEM]).isdisjoint(ids)
        assert set(ids) <= made.kubelet.healthy(MEM)  # they stay offered: withdrawn they would count twice
        assert grant_from_text((folder / "grant").read_text()).uid == GONE

        shutil.rmtree(process)
        await orphans_are(made)
        made.api.put(late.plain())
        await made.kubelet.admit(late.plain())
        assert made.grant_folder("late") != folder


async def test_an_orphan_is_known_to_a_plugin_that_was_killed(running: Start, proc: Path) -> None:
    async with running("--proc-root", str(proc)) as made:
        plain = await runs(made, "a", GONE)
        process_of(proc, GONE)
        await made.stop_plugin(kill=True)
        delete_by_force(made, plain)
        await made.start_plugin("--proc-root", str(proc))
        await made.ready()
        await orphans_are(made, GONE)
        assert (made.grant_folder("a") / "grant").exists()


async def test_a_kubelet_that_lost_its_checkpoint_gives_no_devices_of_a_running_container_away(
    running: Start, proc: Path
) -> None:
    async with running("--proc-root", str(proc)) as made:
        plain = await runs(made, "a", GONE, units=4, core=30)
        process_of(proc, GONE)
        plain["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
        made.api.put(plain)
        grant = made.grant_folder("a") / "grant"
        had, inode = made.kubelet.records["default", "a"]["main", MEM], grant.stat().st_ino
        await made.kubelet.stop()
        made.kubelet.records.clear()
        made.kubelet.used.clear()
        made.kubelet.registered.clear()
        await made.kubelet.start()
        await made.ready()
        for number in range(3):
            one = sharing(f"new-{number}", inventory(made), 0, 4, 20)
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
            assert set(made.kubelet.records["default", one.name]["main", MEM]).isdisjoint(had)
        assert len(made.kubelet.healthy(MEM)) == 32
        assert len(made.kubelet.healthy(CORE)) == 200
        assert grant.stat().st_ino == inode
