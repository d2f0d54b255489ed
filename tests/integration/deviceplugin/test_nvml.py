"""NVML that hangs or goes, seen from outside a real plugin process: the kubelet, /readyz, and an arbiter that queries it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from nvml.client import NvmlClient
from nvml.errors import NvmlAway
from tests.built import REPOSITORY
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, running
from vgpu.api.codec import inventory_from_json
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]

GPU = DEFAULT.gpu
TIMEOUT_S = 60.0


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


def ready_page(made: Node, status: int, text: str) -> Callable[[], Awaitable[bool]]:
    async def shows() -> bool:
        found, body = await made.get("/readyz")
        return found == status and text in body

    return shows


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children(made: Node) -> list[int]:
    """Pids of the plugin's NVML processes."""
    assert made.process is not None
    found = []
    for task in Path(f"/proc/{made.process.pid}/task").iterdir():
        with suppress(FileNotFoundError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return [pid for pid in found if b"\0nvml\0" in command_of(pid)]


def command_of(pid: int) -> bytes:
    """Its arguments; empty when it has ended. For a moment those of its parent, of which it is a copy."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


async def only_child(made: Node) -> int:
    """Once there is one."""

    async def one() -> bool:
        return len(children(made)) == 1

    await until(one)
    (child,) = children(made)
    return child


async def test_a_call_that_never_returns_makes_gpus_unhealthy_with_the_reason_and_they_recover(running: Start) -> None:
    async with running("--nvml-call-s", "1") as made:
        await until(ready_page(made, 200, "ok"))
        made.driver.ctl("fault", "hang", "nvmlDeviceGetMemoryInfo", "seconds=1000")
        begun_s = time.monotonic()
        await made.kubelet.until(lambda: not made.kubelet.healthy(GPU))
        assert time.monotonic() - begun_s < 20
        await until(ready_page(made, 503, "did not return within 1 s"))
        made.driver.ctl("fault", "none")
        await until(ready_page(made, 200, "ok"))
        await made.kubelet.until(lambda: len(made.kubelet.healthy(GPU)) == 2)
        _, metrics = await made.get("/metrics")
        assert 'tangram_deviceplugin_nvml_processes_ended_total{reason="hung"}' in metrics
        assert await only_child(made), "those that hung are gone"


async def test_a_start_of_nvml_that_never_returns_is_survived(running: Start) -> None:
    async with running("--nvml-start-s", "5") as made:  # enough on a busy machine for one that returns
        made.driver.ctl("fault", "hang", "nvmlInitWithFlags", "seconds=1000")
        child = await only_child(made)
        os.kill(child, signal.SIGKILL)
        await made.kubelet.until(lambda: not made.kubelet.healthy(GPU))
        await until(ready_page(made, 503, "the start of NVML did not return within 5 s"))
        made.driver.ctl("fault", "none")
        await until(ready_page(made, 200, "ok"))
        await made.kubelet.until(lambda: len(made.kubelet.healthy(GPU)) == 2)


async def test_a_child_that_is_killed_is_back_before_a_gpu_is_unhealthy(running: Start) -> None:
    async with running() as made:
        for _ in range(2):
            await until(ready_page(made, 200, "ok"))
            child = await only_child(made)
            os.kill(child, signal.SIGKILL)

            async def replaced(killed: int = child) -> bool:
                return bool(children(made)) and killed not in children(made)

            await until(replaced)
        await until(ready_page(made, 200, "ok"))
        assert len(made.kubelet.healthy(GPU)) == 2
        assert not [line for line in made.log if line["event"] == "health changed"]

        async def counted() -> bool:
            return (
                'tangram_deviceplugin_nvml_processes_ended_total{reason="died"} 2.0' in (await made.get("/metrics"))[1]
            )

        await until(counted)  # once a second


async def test_while_nvml_is_released_nothing_has_a_gpu_open_and_the_kubelet_gets_none(running: Start) -> None:
    async with running() as made:
        released = made.state / "plugin/nvml.released"
        released.touch()
        await made.kubelet.until(lambda: not made.kubelet.healthy(GPU))
        assert children(made) == []
        await until(ready_page(made, 503, f"NVML is released, as the file {released} exists"))
        released.unlink()
        await made.kubelet.until(lambda: len(made.kubelet.healthy(GPU)) == 2)


def request_until_nobody_answers(client: NvmlClient, uuid: str) -> None:
    while True:
        client.nvml.processes(uuid)


async def test_other_programs_query_nvml_and_the_plugin_ends_in_time_while_nvml_hangs(running: Start) -> None:
    async with running("--nvml-call-s", "60") as made:
        assert made.api.inventory
        uuid = inventory_from_json(made.api.inventory).gpus[0].uuid
        client = NvmlClient(made.state / "plugin/nvml.sock", 3)
        assert client.nvml.processes(uuid) == ()
        made.driver.ctl("process", 0, 4242, 512, "other")
        assert [held.pid for held in client.nvml.processes(uuid)] == [4242]
        made.driver.ctl("fault", "hang", "nvmlDeviceGetMemoryInfo", "seconds=1000")
        with pytest.raises(NvmlAway, match="no answer within 3 s"):
            await asyncio.to_thread(request_until_nobody_answers, client, uuid)
        child = await only_child(made)
        begun_s = time.monotonic()
        await made.stop_plugin()
        assert time.monotonic() - begun_s < 8, "of ten that the pod has"
        assert not exists(child)
        client.close()


async def test_an_arbiter_without_a_plugin_serves_and_reports_what_is_not_enforced(
    running: Start, tmp_path: Path
) -> None:
    async with running() as made:
        command = [
            sys.executable, "-m", "arbiter", "--grants-dir", str(made.folder / "grants"), "--metrics-port", "0",
            "--metrics-host", "127.0.0.1", "--nvml-socket", str(made.state / "plugin/nvml.sock"),
        ]  # fmt: skip
        log = tmp_path / "arbiter.log"
        with log.open("wb") as opened:
            arbiter = subprocess.Popen(command, cwd=REPOSITORY, stderr=opened)  # noqa: ASYNC220

        async def logged(text: str) -> None:
            async def shows() -> bool:
                return text in log.read_text()

            await until(shows)

        try:
            await logged('"NVML is open"')
            await made.stop_plugin(kill=True)
            await logged('"contexts are not measured"')
            assert arbiter.poll() is None
            await made.start_plugin()
            await logged('"was": "')
            before = log.read_text().count('"NVML is open"')

            async def again() -> bool:
                return log.read_text().count('"NVML is open"') > max(1, before - 1)

            await until(again)
        finally:
            arbiter.terminate()
            assert arbiter.wait(10) == 0
