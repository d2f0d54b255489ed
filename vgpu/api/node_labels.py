"""The labels of a node that say what GPUs it has, in the manner of GPU feature discovery.

People select nodes by them, with `nodeSelector` and affinity. Nothing of Tangram decides by them: the scheduler reads the inventory.

    gpu.model         as NVML names it; `mixed` if the GPUs differ
    gpu.arch          in lower case, as `hopper`; `mixed` if the GPUs differ
    gpu.count         GPUs that the node has, in whatever health
    gpu.memory        MiB of the smallest GPU, as NVML reports it
    gpu.driver        version of the driver
    gpu.cuda          newest CUDA version that the driver supports
    gpu.mig.capable   `true` if at least one GPU has a MIG mode, on or off; else `false`

What NVML does not report has no label. A node without a GPU has none of them.
"""

from __future__ import annotations

import re
from typing import Final

from vgpu.api.inventory import Inventory
from vgpu.api.names import Names

MIXED: Final = "mixed"
LABEL_LIMIT: Final = 63
"""Characters of a label's value. Specified by Kubernetes."""

_OTHER = re.compile(r"[^A-Za-z0-9_.-]+")
_ENDS: Final = "-_."
"""A value begins and ends with a letter or digit. Specified by Kubernetes."""


def label_value(text: str) -> str:
    """The text as a label may have it: other characters become `-`, and it is cut at `LABEL_LIMIT`. Empty if nothing is left."""
    return _OTHER.sub("-", text).strip(_ENDS)[:LABEL_LIMIT].rstrip(_ENDS)


def labels_of(inventory: Inventory, names: Names) -> dict[str, str | None]:
    """Every key of `Names.gpu_labels` -> its value; None = it should not be there."""
    gpus = inventory.gpus
    found: dict[str, str | None] = dict.fromkeys(names.gpu_labels)
    if not gpus:
        return found
    texts = {
        "model": _common({gpu.model for gpu in gpus}),
        "arch": _common({gpu.arch for gpu in gpus}),
        "count": str(len(gpus)),
        "memory": str(min(gpu.mib for gpu in gpus)),
        "driver": inventory.driver,
        "cuda": inventory.cuda,
        "mig.capable": "true" if any(gpu.mig_capable or gpu.mig for gpu in gpus) else "false",
    }
    return found | {names.gpu_label(name): label_value(text) or None for name, text in texts.items()}


def _common(texts: set[str]) -> str:
    """The one text, or `mixed`. A GPU that reports none differs from one that does."""
    return next(iter(texts)) if len(texts) == 1 else MIXED
