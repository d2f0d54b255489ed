"""The plugin's parts without its process, sockets and threads: it can be killed after any number of changes of files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from deviceplugin.admission import PreStart
from deviceplugin.allocation import DeviceRequest
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.gpus.offer import Offer
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.metrics import Metrics
from deviceplugin.pods.burst import BurstUpdater
from deviceplugin.pods.node_pods import NodePods
from deviceplugin.pods.orphan_finder import OrphanFinder
from deviceplugin.pods.usage_records import UsageRecords
from deviceplugin.service import DevicePluginService
from deviceplugin.upkeep import Upkeep, restore
from kube.objects import Pod
from tests.unit.deviceplugin.builders import inventory
from tests.unit.deviceplugin.workloads import CORE, MEM
from vgpu.api.names import DEFAULT

if TYPE_CHECKING:
    from tests.unit.deviceplugin.simulated import SimulatedNode

GPUS: Final = 2
CHANGES: Final = (
    "mkdir", "unlink", "remove", "rename", "replace", "link", "symlink", "rmdir", "chmod", "fchmod", "ftruncate", "open", "write", "fsync",
)  # fmt: skip
"""Functions of `os` by which files change, or stay changed."""


class Killed(BaseException):
    """As SIGKILL: nothing that follows has an effect."""


@contextmanager
def cut_after(changes: int | None) -> Iterator[None]:
    """From this many changes of files on, each raises; None = never."""
    made = itertools.count()

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **more: Any) -> Any:
            if changes is not None and next(made) >= changes:
                raise Killed
            return change(*args, **more)

        return act

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


class CallRefused(Exception):
    """What the kubelet gets instead of an answer."""


class GrpcContext:
    async def abort(self, code: object, text: str) -> NoReturn:  # noqa: ARG002
        raise CallRefused(text)


class SilentObserver:
    def served(self, call: str, resource: str, seconds: float) -> None: ...
    def refused(self, call: str, request: DeviceRequest, error: Exception) -> None: ...
    def forget_the_gone(self, alive: Collection[str]) -> None: ...
    def burst_reduced(self, pod: Pod, reason: str, note: str) -> None: ...


class SimulatedPlugin:
    """A process: what it remembers is gone with it."""

    def __init__(self, machine: SimulatedNode) -> None:
        self.pods = NodePods(DEFAULT, 1024)
        self.offer = Offer(DEFAULT, 1024)
        self.offer.set_inventory(inventory(GPUS))
        self.grants = GrantDirectories(machine.state, machine.image, boot=machine.boot)
        self.usage_records = UsageRecords(machine.state, machine.boot)
        self.grants.durability.rest = self.afterwards  # type: ignore[method-assign]  # at once: a thread cannot be cut
        self.orphans = OrphanFinder(self.usage_records, self.pods, machine, self.offer.set_orphans)
        self.ledger = DeviceLedger(
            self.pods,
            self.offer.inventory,
            DEFAULT,
            pod_wait_s=0.0,
            orphans=self.orphans,
            users=self.usage_records.users,
        )
        parts: Any = {
            "pods": self.pods, "records": machine, "ledger": self.ledger, "grants": self.grants, "usage_records": self.usage_records,
        }  # fmt: skip
        bursts = BurstUpdater(self.pods, self.grants, self.offer.inventory, SilentObserver())
        self.prestart = PreStart(
            DEFAULT, 1024, bursts=bursts, inventory=self.offer.inventory, fetch=machine.fetch, **parts
        )
        self.services = {
            resource: DevicePluginService(
                resource, offer=self.offer, ledger=self.ledger, grants=self.grants, prestart=self.prestart,
                state_root=machine.state, observer=SilentObserver(),
            )
            for resource in (MEM, CORE)
        }  # fmt: skip
        silent: Any = SilentObserver()
        self.upkeep = Upkeep(
            DEFAULT, orphans=self.orphans, removers=(silent,), metrics=Metrics(), now=lambda: machine.now, **parts
        )
        self.machine = machine

    def afterwards(self) -> None:
        self.grants.fill_spares()
        self.usage_records.begin_next()

    async def begin(self) -> None:
        self.grants.install()
        self.usage_records.load()
        for one in self.machine.pods.values():
            self.pods.on_change(None, one.seen())
        records: Any = self.machine
        await restore(records, self.pods, self.ledger, self.grants, self.usage_records, DEFAULT)
        await self.orphans.once()
