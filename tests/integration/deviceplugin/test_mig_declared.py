"""A plugin process follows the MIG layout that a label of its node declares, on the fake driver."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.builders import pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import NODE, Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, published, running, sharing, until
from tests.mig_layouts import LAYOUTS
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Gpu
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]

LABEL, STATE = DEFAULT.mig_config, DEFAULT.mig_config_state
SMALL, HALF = (DEFAULT.mig(name) for name in ("1g.10gb", "3g.40gb"))
IN_MIG_MODE = "gpu t4 memory_mib=16384\ngpu h100\nmig 1\n"
WITHOUT = "gpu t4 memory_mib=16384\ngpu h100\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(LAYOUTS)
    return path


def label(made: Node, name: str | None) -> None:
    thing = made.api.objects["/api/v1/nodes"][NODE]
    labels: dict[str, Any] = thing["metadata"].setdefault("labels", {})
    labels.pop(LABEL, None)
    labels |= {LABEL: name} if name else {}
    made.api.put(thing)


async def state(made: Node, wanted: str | None) -> None:
    async with asyncio.timeout(60):
        while (made.api.objects["/api/v1/nodes"][NODE]["metadata"].get("labels") or {}).get(STATE) != wanted:
            await made.api.news.wait()


def profiles(gpu: Gpu) -> Counter[str]:
    return Counter(one.profile for one in gpu.instances)


def notes(made: Node, reason: str) -> list[str]:
    return [one["note"] for one in made.api.events if one["reason"] == reason]


async def test_a_label_makes_the_layout_and_a_pods_instance_stays(running: Start, file: Path) -> None:
    async with running("--mig-config-file", str(file), gpus=IN_MIG_MODE) as made:
        label(made, "halves")
        await made.kubelet.until(lambda: len(made.kubelet.healthy(HALF)) == 2)
        await state(made, "success")
        gpu = inventory(made).gpus[1]
        used = gpu.instances[0]
        given = AssignedGpu(used.uuid, 1, used.mib, kind="mig", profile="3g.40gb")
        one = pod("m").asking(mig="3g.40gb").on("n1").assigned(given).plain()
        made.api.put(one)
        await made.kubelet.admit(one)
        label(made, "mixed")
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 2)
        await state(made, "success")
        (_, now) = await published(made, lambda gpus: not gpus[1].withdrawn)
        assert profiles(now) == {"3g.40gb": 1, "1g.10gb": 2}
        assert used.uuid in {each.uuid for each in now.instances}
        label(made, "halvs")
        await state(made, "failed")
        assert inventory(made).gpus[1].instances == now.instances
        label(made, None)
        await state(made, None)
        assert not made.kubelet.harmed
    (why,) = notes(made, "MigConfigFailed")
    assert all(part in why for part in (f"{LABEL}=halvs", "halves, mixed", "nothing was changed"))


async def test_a_killed_plugins_successor_ends_the_change(running: Start, file: Path) -> None:
    async with running("--mig-config-file", str(file), gpus=IN_MIG_MODE) as made:
        label(made, "mixed")
        await published(made, lambda gpus: bool(gpus[1].withdrawn))
        await made.stop_plugin(kill=True)
        await made.start_plugin("--mig-config-file", str(file))
        (_, now) = await published(made, lambda gpus: not gpus[1].withdrawn and bool(gpus[1].instances))
        assert profiles(now) == {"3g.40gb": 1, "1g.10gb": 2}


async def test_mig_mode_is_switched_once_the_gpu_is_idle_and_closed(running: Start, file: Path) -> None:
    options = ("--mig-config-file", str(file), "--mig-mode-idle-s", "0.5")
    async with running(*options, gpus=WITHOUT) as made:
        share = sharing("s", inventory(made), 1, 8).plain()
        made.api.put(share)
        await made.kubelet.admit(share)
        label(made, "halves")
        await state(made, "pending")
        assert not inventory(made).gpus[1].mig
        made.api.remove(share)
        made.kubelet.remove("default", "s")
        (other, now) = await published(made, lambda gpus: gpus[1].mig and not gpus[1].withdrawn and gpus[1].healthy)
        assert profiles(now) == {"3g.40gb": 2}
        assert not other.mig
        await state(made, "success")
        assert (made.state / "plugin/nvml.withheld").read_text() == ""
    (why,) = notes(made, "MigConfigPending")
    assert "pod default/s" in why


async def test_by_default_no_mode_is_switched(running: Start, file: Path) -> None:
    async with running("--mig-config-file", str(file), gpus=WITHOUT) as made:
        label(made, "halves")
        await state(made, "pending")
        (why,) = notes(made, "MigConfigPending")
        assert "node.migModeIdleSeconds" in why
        assert not inventory(made).gpus[1].withdrawn


def withheld(made: Node) -> str:
    path = made.state / "plugin/nvml.withheld"
    return path.read_text() if path.exists() else ""


def seen(made: Node) -> tuple[bool, int]:
    """Of the GPU: is its MIG mode on, and how many instances has it?"""
    return "h100 mig=on" in made.driver.ctl("status"), sum(one.gi is not None for one in made.driver.status())


async def test_a_plugin_killed_while_it_switches_mig_mode_is_followed_by_one_that_ends_it(
    running: Start, file: Path
) -> None:
    """Its mode is on, and an instance is half made. tests/unit/deviceplugin/mig/test_mode_switch.py has every other step."""
    options = ("--mig-config-file", str(file), "--mig-mode-idle-s", "0.1")
    async with running(*options, gpus=WITHOUT) as made:
        made.driver.ctl("fault", "hang", "nvmlGpuInstanceCreateComputeInstance", "seconds=60")
        label(made, "halves")
        await until(lambda: withheld(made) and seen(made) == (True, 1))
        await made.stop_plugin(kill=True)
        made.driver.ctl("fault", "none")
        await made.start_plugin(*options)
        meanwhile: list[Gpu] = []

        def ended(gpus: tuple[Gpu, ...]) -> bool:
            meanwhile.append(gpus[1])
            return len(gpus[1].instances) == 2 and not gpus[1].withdrawn

        (_, now) = await published(made, ended)
        assert (profiles(now), now.mig) == ({"3g.40gb": 2}, True)
        assert all(one.mig or one.withdrawn for one in meanwhile), "never offered as it was before"
        await state(made, "success")
        assert withheld(made) == ""
