"""The API server was away, and a pod comes with it."""

from __future__ import annotations

import asyncio

from tests.fake import fake_driver
from tests.fake_api import answer_with
from tests.integration.deviceplugin.plugin_kit import Start, gpus_of, inventory, running, sharing
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]

FAILURES = 5
"""The plugin waits 0.1 to 0.2 s after the first failure and 3.2 to 6.4 s after this many more: longer than a call of the kubelet waits."""


async def test_a_pod_that_comes_right_after_an_outage_is_served(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 4)
        made.api.faults += [answer_with("WATCH", "/pods", 503) for _ in range(FAILURES)]
        made.api.cut()
        async with asyncio.timeout(20):
            await made.logged("lost the API server", failed_in_a_row=FAILURES)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        assert gpus_of(made.kubelet.records["default", "a"]["main", DEFAULT.gpu_mem]) == {inventory(made).gpus[0].uuid}
