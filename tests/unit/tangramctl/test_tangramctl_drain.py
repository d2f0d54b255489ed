"""Which pods a drain of one GPU evicts, and what it says at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tangramctl.drain import holders
from tests.builders import gpu, mig_gpu, pod, share
from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import Inventory
from vgpu.api.mig import MigSlot
from vgpu.api.mig_device import slot_device
from vgpu.api.names import DEFAULT

CUT = mig_gpu(1, "1g.10gb")
SLOT = AssignedGpu(slot_device(gpu(0).uuid, MigSlot(0, "1g.10gb")), 0, 9728, 0, "mig", "1g.10gb")
ON_DEMAND = replace(gpu(0), mig=True, on_demand=True)


@pytest.mark.parametrize(
    ("inventory", "part", "of"),
    [
        (Inventory((gpu(0), CUT)), share(gpu(0), 1024), 0),
        (Inventory((gpu(0), CUT)), AssignedGpu(CUT.instances[0].uuid, 1, 9728, 0, "mig", "1g.10gb"), 1),
        (Inventory((ON_DEMAND, CUT)), SLOT, 0),
        (Inventory((CUT,)), SLOT, 0),
        (Inventory(()), share(gpu(1), 1024), 1),
    ],
)
def test_a_pod_has_the_gpu_that_its_share_instance_or_slot_lies_on(
    inventory: Inventory, part: AssignedGpu, of: int
) -> None:
    thing = pod("a").asking(mib=1024).on("n1").assigned(part).plain()
    for index in range(2):
        found = holders([thing], gpu(index).uuid, inventory, DEFAULT)
        assert [one.key for one in found] == (["default/a"] if index == of else [])
