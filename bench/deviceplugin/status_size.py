"""How large the status of a pod gets that names each device ID: the kubelet's allocatedResourcesStatus (ResourceHealthStatus, on by default from 1.36).

    uv run python -m bench.deviceplugin.status_size [--csv bench/deviceplugin/status_size.csv]

The IDs are those that `vgpu.api.contract.devices` makes; each has an entry {resourceID, health}, in the form of kubelet 1.36.3 (`devicemanager/manager.go`,
UpdateAllocatedResourcesStatus) and of k8s.io/api 1.36.3. JSON is what the kubelet sends, protobuf what etcd stores, without the rest of the pod. The
entries are not in managedFields, as the list of containers' statuses is atomic.

`share`: one container with so many units of gpu-mem, and all of gpu-core of each GPU. `node`: all IDs of 8 GPUs, in one pod or in as many as there may be.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vgpu.api.contract import devices
from vgpu.api.inventory import Gpu, Inventory
from vgpu.api.names import DEFAULT

GIB_MIB: Final = 1024
ETCD_BYTES: Final = 1536 * 1024
"""etcd's --max-request-bytes, and its default."""
BODY_BYTES: Final = 3 * 1024 * 1024
"""What the API server takes as one request: MaxRequestBodyBytes, apiserver 1.36.3."""
UNITS_MIB: Final = {"1Gi": 1024, "512Mi": 512, "256Mi": 256}
SIZES_GIB: Final = {"141 GiB": 141, "288 GiB": 288}
SHARES: Final = (1, 8, 36, 140)
NODE_GPUS: Final = 8


def ids_of(gpu_gib: int, unit_mib: int, gpus: int = 1) -> dict[str, list[str]]:
    """Resource -> device IDs of such GPUs."""
    made = tuple(
        Gpu(f"GPU-{at:08x}-89ab-4cde-8f01-23456789abcd", at, "gpu", gpu_gib * GIB_MIB, at, 0) for at in range(gpus)
    )
    offered = devices(Inventory(made, unit_mib), DEFAULT)
    return {resource: [one.id for one in offered[resource]] for resource in (DEFAULT.gpu_mem, DEFAULT.gpu_core)}


def as_json(given: dict[str, list[str]], health: str = "Unhealthy") -> int:
    """Bytes; Unhealthy is the longer word."""
    statuses = [
        {"name": resource, "resources": [{"resourceID": one, "health": health} for one in ids]}
        for resource, ids in given.items()
    ]
    return len(json.dumps({"allocatedResourcesStatus": statuses}, separators=(",", ":")))


def as_protobuf(given: dict[str, list[str]], health: str = "Unhealthy") -> int:
    """Bytes: field 14 of ContainerStatus, a ResourceStatus (name 1, resources 2) for each resource."""
    whole = 0
    for resource, ids in given.items():
        entries = sum(_field(_field(len(one)) + _field(len(health))) for one in ids)
        whole += _field(_field(len(resource)) + entries)
    return whole


def _field(length: int) -> int:
    """Bytes of a field with this many: its tag (numbers below 16), its length as a varint, itself."""
    return 1 + max(1, -(-length.bit_length() // 7)) + length


def row(what: str, unit: str, given: dict[str, list[str]]) -> Sequence[object]:
    """Of the CSV."""
    in_json, in_etcd = as_json(given), as_protobuf(given)
    return [
        what, unit, len(given[DEFAULT.gpu_mem]), len(given[DEFAULT.gpu_core]), in_json, in_etcd,
        f"{100 * in_etcd / ETCD_BYTES:.1f}", f"{100 * in_json / BODY_BYTES:.1f}",
    ]  # fmt: skip


def rows() -> list[Sequence[object]]:
    """All of them."""
    one = ids_of(141, UNITS_MIB["1Gi"])
    found = [row("share", "1Gi", {**one, DEFAULT.gpu_mem: one[DEFAULT.gpu_mem][:count]}) for count in SHARES]
    for unit, unit_mib in UNITS_MIB.items():
        found += [row(f"GPU of {name}", unit, ids_of(gib, unit_mib)) for name, gib in SIZES_GIB.items()]
    for unit, unit_mib in UNITS_MIB.items():
        found += [
            row(f"node of {NODE_GPUS} x {name}", unit, ids_of(gib, unit_mib, NODE_GPUS))
            for name, gib in SIZES_GIB.items()
        ]
    return found


def main() -> None:
    """Compute, print, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("status_size.csv"))
    chosen = parser.parse_args()
    with chosen.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["what", "memory_unit", "gpu_mem_ids", "gpu_core_ids", "json_bytes", "protobuf_bytes", "percent_of_etcd_limit", "percent_of_request_limit"])  # fmt: skip
        writer.writerows(rows())
    print(chosen.csv.read_text(), end="")


if __name__ == "__main__":
    main()
