"""Which GPUs and MIG instances the kubelet of this node has given to containers, by its own checkpoint.

A pod may have an instance and no process on it yet, so processes alone do not show that it is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tangramctl.errors import Broken

CHECKPOINT: Final = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
LARGEST_BYTES: Final = 64 * 2**20
"""Guessed: 110 pods with a thousand device IDs each have 8 MiB."""


def given_to_pods(checkpoint: Path, uuids: tuple[str, ...]) -> dict[str, str]:
    """UUID -> a pod that has it, or part of it, for a person. Empty where there is no kubelet.

    Every resource counts, of whichever device plugin. Raises Broken where the checkpoint cannot be read: then nothing is known to be free.
    """
    try:
        with checkpoint.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Broken(f"{checkpoint}: {error.strerror}, so it is not known what pods use: run this as root") from None
    if len(text) > LARGEST_BYTES:
        raise Broken(f"{checkpoint} has more than {LARGEST_BYTES} bytes: it is not known what pods use")
    found: dict[str, str] = {}
    try:
        for pod, container, device in _entries(json.loads(text)):
            for uuid in uuids:
                if device == uuid or device.startswith((f"{uuid}-", f"{uuid}::")):
                    found[uuid] = f"container {container[:64]} of pod {pod[:64]}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Broken(f"{checkpoint} cannot be read ({type(error).__name__}): it is not known what pods use") from None
    return found


def _entries(document: Any) -> Iterator[tuple[str, str, str]]:
    """(pod's UID, container, device ID) of each device. As kubelets from 1.20 on write it: IDs by NUMA node."""
    for entry in document["Data"]["PodDeviceEntries"] or ():
        for ids in entry["DeviceIDs"].values():
            for device in ids:
                yield str(entry["PodUID"]), str(entry["ContainerName"]), str(device)
