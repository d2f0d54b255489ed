"""An arbiter with the status that a test wants, the plugin that reads it, and what it reports."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deviceplugin.pods.limit_violations import REASON, STRANDED, LimitViolation, limit_violations
from deviceplugin.pods.status_watch import StatusWatch, Trouble
from kube.objects import Pod
from tests.builders import pod
from tests.unit.deviceplugin.builders import uuid
from vgpu.protocol.status import (
    BRIEF,
    ContainerStatus,
    GpuStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    StatusDocument,
    UngrantedStatus,
    UnlistedStatus,
    encode_status,
)

MIB = 2**20


def gpu(number: int, limit_mib: int = 4096) -> GpuStatus:
    return GpuStatus(uuid(number), limit_mib * MIB, 0, 0, 0, 0)


def process(pid: int, command: str, **held: int) -> ProcessStatus:
    """`c0=100` = NVML reports 100 MiB on GPU 0."""
    gpus = (ProcessGpu(uuid(int(name[1:])), 0, 0, mib * MIB) for name, mib in held.items())
    return ProcessStatus(pid, 1, command, tuple(gpus))


def container(name: str = "a", over_limit_action: str = "report", *, over: bool = True) -> ContainerStatus:
    return ContainerStatus(
        f"key-{name}", f"default/{name}", f"uid-default-{name}", "main", "standard", 2, over_limit_action, over,
        (gpu(0),), (process(7, "miner", c0=5000),),
    )  # fmt: skip


@dataclass
class RecordingObserver:
    limit_violations: list[LimitViolation] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    stranded: list[int] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unenforced_notes: list[str] = field(default_factory=list)
    ungranted_notes: list[str] = field(default_factory=list)
    unlisted_notes: list[str] = field(default_factory=list)
    pool_full_notes: list[str] = field(default_factory=list)

    def pool_full(self, pod: Pod, container: str, note: str) -> None:
        assert f"of container {container} " in note
        self.pool_full_notes.append(f"{pod.uid} {note}")

    def unlisted(self, note: str, pod: Pod | None = None, container: str = "") -> None:
        self.unlisted_notes.append(note if pod is None else f"{pod.uid} {container}: {note}")

    def ungranted(self, note: str) -> None:
        self.ungranted_notes.append(note)

    def over_limit(self, pod: Pod, offence: LimitViolation) -> None:
        assert pod.uid == offence.uid
        self.limit_violations.append(offence)

    def violated_now(self, found: Sequence[LimitViolation]) -> None:
        self.now.append(sum(one.reason == REASON for one in found))
        self.stranded.append(sum(one.reason == STRANDED for one in found))

    def noticed(self, pod: Pod, container: str, reason: str) -> None:
        self.notices.append(f"{pod.uid} {container} {reason}")

    def unenforced(self, pod: Pod, container: str, note: str) -> None:
        assert f"of container {container} " in note
        self.unenforced_notes.append(f"{pod.uid} {note}")

    def arbiter_unreachable(self, trouble: Trouble) -> None:
        self.troubles.append(trouble)


@dataclass
class WatchedArbiter:
    """A status watch whose arbiter reports what the test wants."""

    socket: Path
    known: dict[str, Pod] = field(default_factory=lambda: {p.uid: p for p in (pod("a").build(), pod("b").build())})
    reported: RecordingObserver = field(default_factory=RecordingObserver)
    at_s: float = 0.0

    def __post_init__(self) -> None:
        self.watch = StatusWatch(self.socket, self.known.get, self.reported, lambda: self.at_s)

    async def look(self, document: bytes | None) -> None:
        if document is None:
            self.socket.unlink(missing_ok=True)
            await self.watch.once()
            return

        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert writer.get_extra_info("peername").startswith(BRIEF.encode())
            writer.write(document)
            writer.close()

        self.socket.unlink(missing_ok=True)
        async with await asyncio.start_unix_server(answer, self.socket):
            await self.watch.once()

    async def look_at(
        self,
        *containers: ContainerStatus,
        kills: tuple[KillStatus, ...] = (),
        ungranted: tuple[UngrantedStatus, ...] = (),
        unlisted: tuple[UnlistedStatus, ...] = (),
    ) -> None:
        await self.look(encode_status(StatusDocument(containers, kills=kills, ungranted=ungranted, unlisted=unlisted)))


@pytest.fixture
def looking() -> Iterator[WatchedArbiter]:
    with tempfile.TemporaryDirectory(prefix="g-") as folder:
        yield WatchedArbiter(Path(folder) / "status.sock")


def note(found: ContainerStatus) -> str:
    ((offence,)) = limit_violations(StatusDocument((found,)))
    return offence.note
