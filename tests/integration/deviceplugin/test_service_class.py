"""A plugin process follows the class of a running pod: the class in the grant, and the Events for its user."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.test_plugin import Start, inventory, running, sharing
from vgpu.api.codec import grant_from_text

__all__ = ["fake_driver", "running"]


async def started(made: Node) -> Path:
    """A pod that runs; its grant."""
    one = sharing("a", inventory(made), 0, 4)
    made.api.put(one.plain())
    await made.kubelet.admit(one.plain())
    folder = made.arbiter_listens("a")
    await made.kubelet.start_container("a", "main")
    return folder / "grant"


async def edit(made: Node, version: int, **annotations: str) -> None:
    made.api.put(sharing("a", inventory(made), 0, 4).annotated(**annotations).at_version(version).plain())


async def becomes(grant: Path, service_class: str, level: int) -> float:
    """Seconds until the grant has it."""
    began = time.monotonic()
    async with asyncio.timeout(10):
        while True:
            found = grant_from_text(grant.read_text())  # noqa: ASYNC240
            if (found.service_class, found.level) == (service_class, level):
                return time.monotonic() - began
            await asyncio.sleep(0.01)


async def test_the_grant_follows_an_edit_within_two_seconds_and_nonsense_is_reported(running: Start) -> None:
    async with running("--latency-critical-namespaces", '["serving"]') as made:
        grant = await started(made)
        assert await becomes(grant, "standard", 2) < 2
        await edit(made, 2, **{"class": "best-effort", "level": "4"})
        assert await becomes(grant, "best-effort", 4) < 2
        await edit(made, 3, **{"class": "latency-critical", "level": "7"})
        assert await becomes(grant, "standard", 2) < 2
        async with asyncio.timeout(10):
            while len(made.api.events) < 2:
                await made.api.news.wait()
        notes = sorted(event["note"] for event in made.api.events)
        assert {event["reason"] for event in made.api.events} == {"ClassIgnored"}
        assert "namespace default may not have (those that may: serving)" in notes[0]
        assert "tangram.sh/level is '7': it must be one of 0, 1, 2, 3, 4" in notes[1]
