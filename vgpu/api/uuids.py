"""UUIDs of GPUs and MIG instances, as NVML spells them."""

from __future__ import annotations

import re
from typing import Final, Literal

UUID_LENGTH: Final = 40
"""Characters of a GPU or MIG UUID with its prefix. Specified by NVML."""

_UUID = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


def kind_of_uuid(text: str) -> Literal["GPU", "MIG"] | None:
    """Whether a UUID, as NVML spells them since driver 470, is of a GPU or of a MIG instance; None when it is neither."""
    found = _UUID.match(text)
    if not found:
        return None
    return "GPU" if found[1] == "GPU" else "MIG"
