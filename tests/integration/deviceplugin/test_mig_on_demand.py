"""MIG instances that a real plugin process makes when the kubelet allocates their slots, on the fake driver."""

from __future__ import annotations

import json
import time

from tests.builders import PodBuilder, pod
from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.plugin_kit import Start, inventory, running
from vgpu.api.contract import NVIDIA_ENV
from vgpu.api.grant import AssignedGpu
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]

GPUS = "gpu t4 memory_mib=16384\ngpu h100\nmig 1\n"
ON = ("--mig-on-demand", "true")
SMALL, ALL = (DEFAULT.mig(name) for name in ("1g.10gb", "7g.80gb"))
WITHIN_S = 2.0
"""Of Allocate. Specified: issue K."""


def slot(made: Node, profile: str, start: int) -> str:
    return slot_device(inventory(made).gpus[1].uuid, MigSlot(start, profile))


def wants(made: Node, name: str, profile: str, start: int) -> PodBuilder:
    given = AssignedGpu(slot(made, profile, start), 1, 10_000, kind="mig", profile=profile)
    return pod(name).asking(mig=profile).on("n1").assigned(given)


def instances(made: Node) -> list[str]:
    """UUIDs of the MIG instances that the driver has."""
    return [one.uuid for one in made.driver.status() if one.gi is not None]


async def test_a_slot_becomes_an_instance_in_time_and_rules_out_others(running: Start) -> None:
    async with running(*ON, "--mig-idle-s", "0", gpus=GPUS) as made:
        await made.kubelet.until(lambda: len(made.kubelet.healthy(SMALL)) == 7)
        await made.kubelet.until(lambda: made.kubelet.healthy(ALL) == {slot(made, "7g.80gb", 0)})
        assert inventory(made).gpus[1].on_demand
        one = wants(made, "m", "1g.10gb", 6)
        made.api.put(one.plain())
        made.driver.ctl("fault", "hang", "nvmlDeviceCreateGpuInstanceWithPlacement", "seconds=1")
        began_s = time.monotonic()
        await made.kubelet.admit(one.plain())
        assert time.monotonic() - began_s < WITHIN_S
        (uuid,) = instances(made)
        answer = made.kubelet.answers["m", "main", SMALL]
        assert [d.name for d in answer.cdi_devices] == [f"tangram.sh/gpu={uuid}"]
        assert answer.envs[NVIDIA_ENV] == uuid
        spec = json.loads((made.folder / "cdi/tangram.sh-gpu.json").read_text())
        assert uuid in [d["name"] for d in spec["devices"]]
        await made.kubelet.until(lambda: not made.kubelet.healthy(ALL))
        assert slot(made, "1g.10gb", 6) in made.kubelet.healthy(SMALL)
        await made.kubelet.start_container("m", "main")
        await made.kubelet.start_container("m", "main")
        assert instances(made) == [uuid]
