"""Follow what the arbiter says of containers over their limit: an Event on the pod, and its removal where the policy is `evict`.

Of containers that compute without saying so, of limits that are not enforced, and of memory that belongs to no grant, too: an Event.

The arbiter compares, and kills where the policy is `kill`; it has no way to the API server. This module reads its status socket,
and decides nothing but what is new. An arbiter that does not answer changes nothing: what was reported is not reported again.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final, Literal, Protocol

import structlog

from kube.objects import Pod
from observe.unix_socket import connect
from vgpu.api.enforcement import row_of
from vgpu.api.errors import BadDocument
from vgpu.protocol.status import (
    BRIEF,
    BypassStatus,
    ContainerStatus,
    GpuStatus,
    GpuTimeStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    Status,
    UngrantedStatus,
    UnlistedStatus,
    decode_status,
)

EVERY_S: Final = 0.8
"""Between looks. The arbiter's readings are a second apart, so each is seen."""
DEADLINE_S: Final = 2.0
"""For one answer, which takes milliseconds."""
LARGEST_DOCUMENT: Final = 16 * 2**20
"""Bytes. A node of 110 pods with 64 processes each is some 2 MB."""
MIB: Final = 2**20
PIDS_NAMED: Final = 8
"""In an Event."""
COMMAND_LIMIT: Final = 80
"""Characters of a command line in an Event."""

REASON: Final = "OverMemoryLimit"
BYPASSED: Final = "LimitBypassed"
UNGRANTED: Final = "UngrantedMemory"
UNLISTED: Final = "UnlistedMemory"
KILL: Final = "kill"
NOTICES: Final = {
    "UnreportedWork": (
        "container {} uses the GPU while its processes say they are idle; where the arbiter's cap-unreported is on, that counts as "
        "best-effort work, and from its gpu-core"
    ),
    "StoppedByAnother": (
        "the GPU work of container {} seems to be stopped again and again by something other than the arbiter; it is started again "
        "within a second each time"
    ),
}
"""What is found out about a container's GPU time: the Event's reason, and the sentence for a person."""
_FOLLOWS: Final = {
    "evict": "the pod is deleted",
    "kill": "the process that does it is killed",
    "report": "nothing more is done",
}

_WHOLE: Final = ", and with it all processes of the container, which starts such processes again and again"
UNENFORCED: Final = "LimitNotEnforced"
AGAIN_S: Final = 600.0
"""A reason that comes and goes makes an Event this often at most, for each container. Guessed: as long as an Event is worth reading."""

Trouble = Literal["unreachable", "unreadable"]

log = structlog.get_logger("deviceplugin.pods.over_limit")


@dataclass(frozen=True, slots=True)
class Offence:
    """A container that is over its limit."""

    uid: str
    container: str
    policy: str
    note: str
    """The sentence for a person."""
    reason: str = REASON
    """Of the Event."""
    killed: bool = False
    """A process of it was killed for that."""

    @property
    def series(self) -> str:
        """Offences of a container with the same reason and series are counted on one Event: a program may start process after process."""
        return "killed" if self.killed else self.policy


def offences(status: Status) -> list[Offence]:
    """Every container that the arbiter found over its limit, and every one that is over it by a way around the library. A kill is reported
    as such."""
    over = [Offence(c.uid, c.container, c.guard, _note(c)) for c in status.containers if c.over]
    return over + [
        Offence(c.uid, c.container, one.policy, _bypass_note(c, one), BYPASSED)
        for c in status.containers
        for one in c.bypasses
        if one.policy != KILL
    ]


def _bypass_note(found: ContainerStatus, one: BypassStatus) -> str:
    commands = {process.pid: process.command for process in found.processes}
    pid = one.pids[0] if one.pids else 0
    command = commands.get(pid, "")[:COMMAND_LIMIT] or "of unknown name"
    follows = _FOLLOWS["evict"] if one.policy == "evict" else "it is reported"
    return (
        f"container {found.container} uses {one.held_bytes // MIB} MiB of {one.gpu} and was granted {one.limit_bytes // MIB} MiB; "
        f"process {pid} ({command}) goes around the library; arbiter.bypass: {follows}"
    )


def _note(found: ContainerStatus) -> str:
    follows = f"policy {found.guard}: {_FOLLOWS.get(found.guard, 'nothing more is done')}"
    held = {gpu.uuid: sum(_held(part) for _, part in _on(found.processes, gpu)) for gpu in found.gpus}
    worst = max(found.gpus, key=lambda gpu: held[gpu.uuid] - gpu.limit_bytes, default=None)
    if worst is None:
        return f"container {found.container} uses more GPU memory than it was granted; {follows}"
    text = (
        f"container {found.container} uses {held[worst.uuid] // MIB} MiB of {worst.uuid} and was granted "
        f"{worst.limit_bytes // MIB} MiB"
    )
    largest = max(_on(found.processes, worst), key=lambda pair: _held(pair[1]), default=None)
    if largest is not None:
        process, part = largest
        command = process.command[:COMMAND_LIMIT] or "of unknown name"
        text += f", {_held(part) // MIB} MiB of it by process {process.pid} ({command})"
    return f"{text}; {follows}"


def _on(processes: Iterable[ProcessStatus], gpu: GpuStatus) -> list[tuple[ProcessStatus, ProcessGpu]]:
    return [(process, part) for process in processes for part in process.gpus if part.uuid == gpu.uuid]


def _held(part: ProcessGpu) -> int:
    """Bytes: as NVML says, else as we count."""
    return part.used_bytes + part.context_bytes if part.measured_bytes is None else part.measured_bytes


def kill_offence(kill: KillStatus) -> Offence:
    """A kill as an Event tells it."""
    note = (
        f"container {kill.container} held {kill.held_bytes // MIB} MiB of {kill.gpu} and was granted "
        f"{kill.limit_bytes // MIB} MiB; {'arbiter.bypass' if kill.bypass else 'policy'} kill: process {kill.pid} "
        f"({kill.command[:COMMAND_LIMIT] or 'of unknown name'}) {'went around the library and ' * kill.bypass}was killed"
        f"{_WHOLE * kill.whole}"
    )
    return Offence(kill.uid, kill.container, KILL, note, BYPASSED if kill.bypass else REASON, killed=True)


def ungranted_notes(found: Iterable[UngrantedStatus], pod: Callable[[str], Pod | None]) -> dict[str, str]:
    """GPU -> the sentence for a person."""
    of_gpu: dict[str, list[UngrantedStatus]] = {}
    for one in found:
        of_gpu.setdefault(one.gpu, []).append(one)
    return {gpu: _ungranted_note(gpu, processes, pod) for gpu, processes in of_gpu.items()}


def _ungranted_note(gpu: str, processes: list[UngrantedStatus], pod: Callable[[str], Pod | None]) -> str:
    worst = max(processes, key=lambda one: (one.held_bytes or 0, -one.pid))
    known = pod(worst.pod) if worst.pod else None
    where = f" of pod {known.key if known is not None else worst.pod}" if worst.pod else ""
    held = f"{(worst.held_bytes or 0) // MIB} MiB" if worst.held_bytes is not None else "memory"
    others = f"; {len(processes) - 1} more do so" if len(processes) > 1 else ""
    return (
        f"process {worst.pid} ({worst.command[:COMMAND_LIMIT] or 'of unknown name'}){where} uses {held} of {gpu}, which containers share, and "
        f"belongs to no grant there: no limit counts it{others}"
    )


def unlisted_note(found: UnlistedStatus) -> str:
    """The sentence for a person."""
    return (
        f"{found.held_bytes // MIB} MiB of {found.gpu}, which containers share, are in use and NVML lists them for no process: no limit counts "
        f"them, and a program may have taken them without CUDA; {found.used_bytes // MIB} MiB are in use in all"
        + (f"; container {found.container} of pod {found.pod} may hold them: {_suspicion(found)}" if found.pod else "")
    )


def _suspicion(found: UnlistedStatus) -> str:
    return (
        f"it alone has processes there ({', '.join(map(str, found.pids[:PIDS_NAMED]))}) that have a GPU open and that NVML lists nowhere, "
        "which is no proof"
    )


def notices(turn: GpuTimeStatus | None) -> list[str]:
    """Which of `NOTICES` apply."""
    if turn is None:
        return []
    shown = {"UnreportedWork": turn.unreported, "StoppedByAnother": turn.stopped}
    return [reason for reason in NOTICES if shown[reason]]


def unenforced_note(container: str, reason: str, limits: Iterable[str]) -> str:
    """The sentence for a person. A reason of a later arbiter has no row here."""
    row = row_of(reason)
    reported = (
        f"{row.means} {row.do}" if row is not None else "This version does not know the reason; see the arbiter's log."
    )
    return f"the limit of {' and '.join(limits)} of container {container} is not enforced ({reason}): {reported}"


class Observer(Protocol):
    """Who acts on what is new."""

    def over_limit(self, pod: Pod, offence: Offence) -> None:
        """A container is over its limit that was not, or that was not reported yet."""

    def over_limit_now(self, containers: int) -> None:
        """So many are."""

    def noticed(self, pod: Pod, container: str, reason: str) -> None:
        """One of `NOTICES` applies to a container to which it did not."""

    def unenforced(self, pod: Pod, container: str, note: str) -> None:
        """A limit of a container is not enforced, for a reason that did not hold before."""

    def ungranted(self, note: str) -> None:
        """Processes hold memory of a shared GPU and belong to no grant."""

    def unlisted(self, note: str, pod: Pod | None = None, container: str = "") -> None:
        """Memory of a shared GPU is in use, and NVML lists it for no process. `pod`: of the container that may hold it; None = of the node."""

    def arbiter_silent(self, trouble: Trouble) -> None:
        """The status could not be had this time."""


class StatusWatch:
    """Reads the arbiter's status every `EVERY_S`. `pod` answers the pod of a UID when the watch knows it."""

    def __init__(
        self,
        status: Path,
        pod: Callable[[str], Pod | None],
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._pod, self._observer, self._clock = status, pod, observer, clock
        self._unenforced_s: dict[tuple[str, str, str], float] = {}
        """When each reason of a container was reported last, for as long as it is not reported again; `UNLISTED` too."""
        self._ungranted_s: dict[str, float] = {}
        """When each GPU was reported last; forgotten when nothing is ungranted there."""
        self._unlisted_s: dict[str, float] = {}
        """The same of memory that is listed for no process."""
        self._reported: frozenset[_Key] = frozenset()
        self._noticed: frozenset[tuple[str, str, str]] = frozenset()
        self._kills: frozenset[str] = frozenset()
        """Those that were reported, as long as the arbiter lists them."""
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.once()
            await asyncio.sleep(EVERY_S)

    async def once(self) -> None:
        """One look. Never raises for what the arbiter does."""
        try:
            status = decode_status(await read_document(self._socket))
        except OSError as error:
            log.debug("the arbiter's status is not to be had", socket=str(self._socket), error=str(error))
            self._observer.arbiter_silent("unreachable")
            return
        except BadDocument as error:
            if str(error) != self._trouble:
                log.warning("the arbiter's status cannot be read", socket=str(self._socket), error=str(error))
            self._trouble = str(error)
            self._observer.arbiter_silent("unreadable")
            return
        self._trouble = ""
        reported_before = self._reported
        self._follow(offences(status))
        self._follow_kills(status.kills, reported_before | self._reported)
        self._notice((c.uid, c.container, reason) for c in status.containers for reason in notices(c.turn))
        self._report_unenforced(status.containers)
        self._report_ungranted(status.ungranted)
        self._report_unlisted(status.unlisted)

    def _follow(self, found: list[Offence]) -> None:
        reported = set()
        for offence in found:
            key = _key(offence)
            if key not in self._reported:
                pod = self._pod(offence.uid)
                if pod is None:
                    continue  # the watch may be late: look again
                log.warning("over the memory limit", pod=pod.key, uid=pod.uid, note=offence.note)
                self._observer.over_limit(pod, offence)
            reported.add(key)
        self._reported = frozenset(reported)
        self._observer.over_limit_now(sum(offence.reason == REASON for offence in found))

    def _follow_kills(self, kills: Iterable[KillStatus], reported: frozenset[_Key]) -> None:
        """A container that is killed for being over its limit is over it for a moment only, so a look may miss that."""
        known = set()
        for kill in kills:
            pod = self._pod(kill.uid)
            if pod is None:
                continue  # the watch may be late: look again
            known.add(kill.id)
            offence = kill_offence(kill)
            if kill.id not in self._kills and _key(offence) not in reported:
                log.warning("killed over the memory limit", pod=pod.key, uid=pod.uid, note=offence.note)
                self._observer.over_limit(pod, offence)
        self._kills = frozenset(known)

    def _notice(self, found: Iterable[tuple[str, str, str]]) -> None:
        known = {one: pod for one in found if (pod := self._pod(one[0])) is not None}
        for one, pod in known.items():
            if one not in self._noticed:
                uid, container, reason = one
                log.warning("noticed", reason=reason, pod=pod.key, uid=uid, container=container)
                self._observer.noticed(pod, container, reason)
        self._noticed = frozenset(known)

    def _report_unenforced(self, containers: Iterable[ContainerStatus]) -> None:
        now_s = self._clock()
        self._unenforced_s = {key: at_s for key, at_s in self._unenforced_s.items() if now_s - at_s < AGAIN_S}
        there = {(c.uid, c.container): c for c in containers}
        for (uid, name), found in there.items():
            for one in found.unenforced:
                key = (uid, name, one.reason)
                pod = self._pod(uid)
                if pod is None or key in self._unenforced_s:
                    continue  # the watch may be late: look again
                self._unenforced_s[key] = now_s
                note = unenforced_note(name, one.reason, one.limits)
                log.warning("a limit is not enforced", pod=pod.key, uid=uid, container=name, reason=one.reason)
                self._observer.unenforced(pod, name, note)

    def _report_ungranted(self, found: Iterable[UngrantedStatus]) -> None:
        notes = ungranted_notes(found, self._pod)
        for note in self._due(notes, self._ungranted_s):
            log.warning("memory that belongs to no grant", note=note)
            self._observer.ungranted(note)

    def _report_unlisted(self, found: Iterable[UnlistedStatus]) -> None:
        there = list(found)
        for note in self._due({one.gpu: unlisted_note(one) for one in there}, self._unlisted_s):
            log.warning("memory that NVML lists for no process", note=note)
            self._observer.unlisted(note)
        for one in there:
            key, pod = (one.uid, one.container, f"{UNLISTED} {one.gpu}"), self._pod(one.uid) if one.uid else None
            if pod is not None and key not in self._unenforced_s:
                self._unenforced_s[key] = self._clock()
                self._observer.unlisted(unlisted_note(one), pod, one.container)

    def _due(self, notes: dict[str, str], reported_s: dict[str, float]) -> list[str]:
        """Those of GPUs that were not reported for `AGAIN_S`. `reported_s`: when each was, forgotten when there is nothing to report."""
        now_s = self._clock()
        due = [gpu for gpu in notes if now_s - reported_s.get(gpu, -inf) >= AGAIN_S]
        for gpu in reported_s.keys() - notes.keys():
            del reported_s[gpu]
        reported_s |= dict.fromkeys(due, now_s)
        return [notes[gpu] for gpu in due]


_Key = tuple[str, str, str, str]


def _key(offence: Offence) -> _Key:
    return offence.uid, offence.container, offence.policy, offence.reason


async def read_document(path: Path) -> bytes:
    """All that the arbiter writes to a reader that a brief document is enough for. Raises OSError, TimeoutError, BadDocument when it is too
    long."""
    loop, document = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(DEADLINE_S):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.bind(BRIEF + secrets.token_hex(8))
            await connect(sock, path)
            while part := await loop.sock_recv(sock, 65536):
                document += part
                if len(document) > LARGEST_DOCUMENT:
                    raise BadDocument(f"status document: more than {LARGEST_DOCUMENT} bytes: at most that is read")
    return bytes(document)
