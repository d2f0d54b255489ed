"""An operator takes one GPU out of service: a plugin process lets running pods stay, takes no new ones, and closes the GPU when nobody has it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from aiohttp import web

from tests.fake import fake_driver
from tests.fake_api import answer_with
from tests.integration.deviceplugin.harness import NODE, Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, published, running, sharing, unprobed, until
from vgpu.api.cordon import Cordon, cordons_to_json
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running", "unprobed"]

MEM, GPU = DEFAULT.gpu_mem, DEFAULT.gpu


@pytest.fixture
def unharmed(unprobed: Start) -> Start:
    @asynccontextmanager
    async def start(*options: str) -> AsyncIterator[Node]:
        async with unprobed(*options) as made:
            yield made
            assert not made.kubelet.harmed, "no cordon makes a device in use unhealthy"

    return start


def order(made: Node, *uuids: str) -> None:
    """What `tangramctl cordon` writes."""
    thing = made.api.objects["/api/v1/nodes"][NODE]
    text = cordons_to_json({uuid: Cordon("fan", 1) for uuid in uuids})
    annotations = thing["metadata"].setdefault("annotations", {})
    annotations.pop(DEFAULT.cordoned_gpus, None)
    annotations |= {DEFAULT.cordoned_gpus: text} if text else {}
    made.api.put(thing)


def of(made: Node, resource: str, uuid: str) -> set[str]:
    return {one for one in made.kubelet.healthy(resource) if one.startswith(uuid)}


async def run_on(made: Node, name: str, gpu: int, units: int = 8) -> dict[str, object]:
    pod = sharing(name, inventory(made), gpu, units, 30).plain()
    made.api.put(pod)
    await made.kubelet.admit(pod)
    made.arbiter_listens(name)
    await made.kubelet.start_container(name, "main")
    return pod


async def test_a_cordoned_gpu_keeps_its_pod_takes_no_other_and_is_closed_when_the_pod_is_gone(unharmed: Start) -> None:
    async with unharmed("--self-test", "false") as made:
        first, second = (gpu.uuid for gpu in await published(made, lambda gpus: len(gpus) == 2))
        pod = await run_on(made, "stays", 0)
        order(made, first)
        await published(made, lambda gpus: gpus[0].cordon == "cordoned")
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 8)
        assert not of(made, GPU, first), "what no container has is withdrawn"
        assert len(of(made, MEM, second)) == 16
        await made.kubelet.start_container("stays", "main")  # it may restart
        made.api.remove(pod)
        made.kubelet.remove("default", "stays")
        (gone, _) = await published(made, lambda gpus: gpus[0].cordon == "released" and not gpus[0].healthy)
        assert (gone.uuid, gone.state) == (first, "unmonitored")
        assert (made.state / "plugin/nvml.withheld").read_text() == "0000:" + gone.pci.partition(":")[2].lower() + "\n"
        await made.kubelet.until(lambda: not of(made, MEM, first))
        assert (await run_on(made, "other", 1))["metadata"]
        order(made)
        await published(made, lambda gpus: not any(gpu.cordon for gpu in gpus) and all(gpu.healthy for gpu in gpus))
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 16)
        await until(lambda: any(one["reason"] == "GpuUncordoned" for one in made.api.events))
        reasons = [one["reason"] for one in made.api.events]
        assert [one for one in reasons if one in ("GpuCordoned", "GpuReleased", "GpuUncordoned")] == [
            "GpuCordoned",
            "GpuReleased",
            "GpuUncordoned",
        ]
        assert "GpuUnhealthy" not in reasons


async def test_a_pod_that_was_placed_before_the_cordon_is_refused(unharmed: Start) -> None:
    async with unharmed("--self-test", "false") as made:
        first = inventory(made).gpus[0].uuid
        pod = sharing("late", inventory(made), 0, 8, 30).plain()
        order(made, first)
        await published(made, lambda gpus: bool(gpus[0].cordon))
        made.api.put(pod)
        with pytest.raises(grpc.aio.AioRpcError):
            await made.kubelet.admit(pod)


async def test_ids_in_use_of_a_cordoned_gpu_are_healthy_from_the_first_list_of_a_plugin_that_starts(
    unharmed: Start,
) -> None:
    """Also where the API server does not list pods: the kubelet's own list is enough."""
    async with unharmed("--self-test", "false") as made:
        first = inventory(made).gpus[0].uuid
        await run_on(made, "stays", 0)
        order(made, first)
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 8)
        for hang in (False, True):
            await made.stop_plugin(kill=True)
            if hang:
                made.api.faults.append(lambda request, _: _never() if "/pods" in request.path else None)
            await made.start_plugin("--probe-s", "3600", "--self-test", "false")
            await made.kubelet.until(lambda: len(of(made, MEM, first)) == 8)
            await made.ready()
        assert not made.kubelet.harmed


async def _never() -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("late", [False, True])
async def test_a_plugin_that_starts_while_a_gpu_is_out_does_not_open_it_and_knows_it_still(
    unharmed: Start, late: bool
) -> None:
    async with unharmed("--self-test", "false") as made:
        first = inventory(made).gpus[0].uuid
        order(made, first)
        await published(made, lambda gpus: gpus[0].cordon == "released")
        await made.stop_plugin(kill=True)
        if late:
            made.api.faults.append(answer_with("GET", f"/nodes/{NODE}", 404))
        await made.start_plugin("--probe-s", "3600", "--self-test", "false")
        await until(lambda: not made.api.faults)
        await made.ready()
        gpus = await published(made, lambda gpus: len(gpus) == 2 and gpus[0].cordon == "released")
        assert gpus[0].uuid == first
        assert (made.state / "plugin/nvml.withheld").read_text() != ""
        order(made)
        await published(made, lambda gpus: all(gpu.offered for gpu in gpus))


async def test_an_order_that_comes_while_the_plugin_is_away_is_carried_out_and_an_uncordoned_gpu_is_tried(
    unharmed: Start,
) -> None:
    async with unharmed() as made:
        first = inventory(made).gpus[0].uuid
        await made.stop_plugin(kill=True)
        order(made, first)
        await made.start_plugin("--probe-s", "3600")
        await made.ready()
        await published(made, lambda gpus: gpus[0].cordon == "released")
        await made.stop_plugin(kill=True)
        order(made)
        await made.start_plugin("--probe-s", "3600")
        await made.logged("a GPU was tried", gpu_uuid=first)
        await published(made, lambda gpus: all(gpu.offered for gpu in gpus))
        assert (made.state / "plugin/nvml.withheld").read_text() == ""
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 16)


async def test_since_survives_a_restart_of_the_plugin(unharmed: Start) -> None:
    async with unharmed() as made:
        made.driver.ctl("reading", 0, "slowdowns", 0x40)
        (hot, _) = await published(made, lambda gpus: bool(gpus[0].conditions))
        thing = made.api.objects["/api/v1/nodes"][NODE]
        key = DEFAULT.inventory
        earlier = thing["metadata"]["annotations"][key].replace(
            f'"since_s":{hot.conditions[0].since_s}', f'"since_s":{hot.conditions[0].since_s - 5000}'
        )
        await made.stop_plugin(kill=True)
        thing["metadata"]["annotations"][key] = earlier
        made.api.put(thing)
        began_s = time.time()
        await made.start_plugin("--probe-s", "3600")
        await made.ready()
        (still, _) = await published(made, lambda gpus: bool(gpus[0].conditions))
        await made.stop_plugin()
        assert still.conditions[0].since_s == hot.conditions[0].since_s - 5000 < began_s


async def test_ids_in_use_are_as_healthy_as_their_gpu_and_it_is_tried_when_it_is_back(unharmed: Start) -> None:
    """The kubelet shows in a pod's status that its GPU is unhealthy. That it is tried before new pods get it, is no news to its pods."""
    async with unharmed() as made:
        first = inventory(made).gpus[0].uuid
        await run_on(made, "stays", 0)
        made.driver.xid(0, 79)
        await made.kubelet.until(lambda: not of(made, MEM, first))
        assert len([one for one in made.kubelet.devices[MEM] if one.startswith(first)]) == 16
        made.driver.recover(0)
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 8)
        await made.kubelet.until(lambda: len(of(made, MEM, first)) == 16)
        await made.logged("a GPU was tried", gpu_uuid=first)
        assert {one[: len(first)] for one in made.kubelet.harmed} == {first}
        made.kubelet.harmed.clear()


FAULTY = """\
#!{python}
import os, socket, sys
if os.environ.get("TANGRAM_TRIAL_CHECK_MIB"):
    socket.socket(fileno=int(sys.argv[1])).send(b"faulty memory does not keep what is copied to it: first at byte 4")
"""
"""In the place of the trial program: suspending cannot be tried, and the memory of the GPU is bad."""


@pytest.mark.parametrize("late", [False, True])
async def test_a_gpu_whose_memory_is_bad_stays_withdrawn_and_says_why(
    unharmed: Start, tmp_path: Path, late: bool
) -> None:
    program = tmp_path / "trial"
    program.write_text(FAULTY.format(python=sys.executable))
    program.chmod(0o755)
    async with unharmed("--trial-program", str(program)) as made:
        first, second = (gpu.uuid for gpu in inventory(made).gpus)
        order(made, first)
        await published(made, lambda gpus: gpus[0].cordon == "released")
        order(made)
        (bad, good) = await published(made, lambda gpus: gpus[0].state == "unhealthy")
        assert (bad.state, bad.offered, good.offered) == ("unhealthy", False, True)
        assert bad.conditions[0].reason == "SelfTestFailed"
        assert bad.conditions[0].message.endswith("memory does not keep what is copied to it: first at byte 4")
        await made.kubelet.until(lambda: not of(made, MEM, first) and len(of(made, MEM, second)) == 16)
        await made.stop_plugin(kill=True)
        if late:
            made.api.faults.append(answer_with("GET", f"/nodes/{NODE}", 404))
        await made.start_plugin("--probe-s", "3600", "--trial-program", str(tmp_path / "none"))
        await made.ready()
        await made.logged("a GPU was tried", outcome="cannot-run")
        (still, _) = await published(made, lambda gpus: not gpus[0].cordon)
        assert [one.reason for one in still.conditions] == ["SelfTestFailed"], "a test that cannot run clears nobody"


async def test_where_the_bus_is_not_shown_no_gpu_is_released_and_an_event_says_so(unharmed: Start) -> None:
    async with unharmed("--self-test", "false") as made:
        await made.stop_plugin()
        (made.folder / "driver/sys").unlink()
        await made.start_plugin("--probe-s", "3600", "--self-test", "false")
        await made.ready()
        first = inventory(made).gpus[0].uuid
        order(made, first)
        (gpu, _) = await published(made, lambda gpus: gpus[0].cordon == "not-released")
        assert gpu.healthy, "NVML has it open still"
        await made.kubelet.until(lambda: not of(made, MEM, first))
        order(made)
        await published(made, lambda gpus: all(gpu.offered for gpu in gpus))
        await made.stop_plugin()
        assert "GpuNotReleased" in [one["reason"] for one in made.api.events]
