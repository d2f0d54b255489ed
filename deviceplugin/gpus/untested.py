"""GPUs that are away and are to be tried before pods get them again, on the node's disk: the node's annotation does not name a GPU that is away.

A file that is damaged owes no test, and is written anew. Who cordoned a GPU, and who has it, is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from deviceplugin.grants import checked_file as sealed
from deviceplugin.grants.atomic_file import make_folder
from vgpu.api.errors import BadDocument
from vgpu.api.inventory import MOST_GPUS_OF_A_NODE
from vgpu.api.sealed import UNREADABLE
from vgpu.api.uuids import kind_of_uuid

WHAT: Final = "list of GPUs that are to be tried"

log = structlog.get_logger("deviceplugin.gpus.untested")


class Owed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one GPU."""

    since_s: int
    """Seconds since 1970: when it was withdrawn for the test, or failed the last one."""
    failed: str = ""
    """Why it failed the last self-test; empty: it did not."""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpus: dict[str, Owed]


_documents = msgspec.json.Decoder(_Document)


class UntestedGpus:
    """In this file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Mapping[str, Owed] | None = None

    def load(self) -> Mapping[str, Owed]:
        """UUID -> what is owed, as the program before this one wrote it."""
        try:
            found = sealed.read(self._path, WHAT)
            gpus = _documents.decode(found.body).gpus if found is not None else {}
        except (OSError, BadDocument, *UNREADABLE) as error:
            log.error("which GPUs that are away are to be tried is not known", error=str(error))
            return {}
        return {uuid: owed for uuid, owed in gpus.items() if kind_of_uuid(uuid) == "GPU"}

    def write(self, gpus: Mapping[str, Owed]) -> None:
        """These and no others; of more than a node may have, the latest. Raises OSError."""
        latest = sorted(gpus, key=lambda uuid: gpus[uuid].since_s)[-MOST_GPUS_OF_A_NODE:]
        kept = {uuid: gpus[uuid] for uuid in sorted(latest)}
        if kept == self._written or (not kept and self._written is None and not self._path.exists()):
            return
        make_folder(self._path.parent)
        sealed.write(self._path, _Document(kept), durable=True)
        self._written = kept
