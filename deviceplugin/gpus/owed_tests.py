"""Self-tests that GPUs owe, where the node's annotation does not say so: these are on the disk before the annotation is without them, and leave it afterwards.

So a plugin that is killed at any step leaves one of the two behind, and the next one tries the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from deviceplugin.gpus.offer import CORDONS, Offer
from deviceplugin.gpus.untested import Owed, UntestedGpus
from deviceplugin.grants.disk_thread import DiskThread
from vgpu.api.inventory import Inventory
from vgpu.health.cordons import not_shown

MOST_SHOWN: Final = 8
"""Inventories that the annotation may have, as attempts to write it were not answered. With more it may have any. Guessed."""


class OwedTests:
    """Of one node. `failed`: why a GPU failed the last self-test; empty = it did not."""

    def __init__(self, offer: Offer, file: UntestedGpus | None, failed: Callable[[str], str] = lambda _: "") -> None:
        self._offer, self._file, self._failed = offer, file, failed
        self._disk = DiskThread("owed tests")
        self._shown: tuple[Inventory, ...] | None = None
        """What the annotation may have; None = anything."""

    def load(self) -> Mapping[str, Owed]:
        """At the start: GPUs that are to be tried when they come back."""
        return self._file.load() if self._file is not None else {}

    def published(self, inventory: Inventory) -> bool:
        """The node's annotation has it. Returns whether it may have had another."""
        changed, self._shown = self._shown != (inventory,), (inventory,)
        return changed

    async def before_published(self, inventory: Inventory) -> None:
        """The annotation is to have it. Raises OSError, Refused: then the next plugin could lose a self-test."""
        if self._shown is not None and inventory not in self._shown:
            self._shown = (*self._shown, inventory) if len(self._shown) < MOST_SHOWN else None
        await self.keep()

    async def keep(self) -> None:
        """Bring the file in step. Raises OSError, Refused where the disk does not answer."""
        if self._file is None:
            return
        withdrawn = self._offer.withdrawn_by(CORDONS)
        shown = None if self._shown is None else (*self._shown, self._offer.inventory())
        owed = {uuid: Owed(withdrawn[uuid].since_s, self._failed(uuid)) for uuid in not_shown(withdrawn, shown)}
        await self._disk.do(
            self._file.write, owed, otherwise="a plugin that starts now may not know which GPUs are to be tried"
        )
