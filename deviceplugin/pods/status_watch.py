"""Watch the arbiter's status: an Event for each container over its limit, and the removal of its pod where the policy is `evict`.

An Event, too, for containers whose processes do not report their work, for limits that are not enforced, and for memory that belongs to no grant.

The arbiter compares, and kills where the policy is `kill`; it has no access to the API server. This module reads its status socket
and decides only what is new. If the arbiter does not answer, nothing changes: what was reported is not reported again.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Final, Literal, Protocol

import structlog

from deviceplugin.pods.limit_violations import (
    EVICT,
    POOL_FULL,
    STRANDED,
    UNLISTED,
    LimitViolation,
    kill_violation,
    limit_violations,
    notices,
    pool_full_note,
    unenforced_note,
    ungranted_notes,
    unlisted_note,
)
from kube.objects import Pod
from observe.unix_socket import connect
from vgpu.api.errors import BadDocument
from vgpu.protocol.status import (
    BRIEF,
    ContainerStatus,
    KillStatus,
    UngrantedStatus,
    UnlistedStatus,
    decode_status,
)

EVERY_S: Final = 0.8
"""Between checks. The arbiter's readings are a second apart, so each is seen."""
DEADLINE_S: Final = 2.0
"""For one answer, which takes milliseconds."""
LARGEST_DOCUMENT: Final = 16 * 2**20
"""Bytes. A node of 110 pods with 64 processes each is some 2 MB."""
AGAIN_S: Final = 600.0
"""A reason that comes and goes makes an Event this often at most, for each container. Guessed: as long as an Event is worth reading."""

Trouble = Literal["unreachable", "unreadable"]

log = structlog.get_logger("deviceplugin.pods.status_watch")


class StatusObserver(Protocol):
    """The receiver of new reports."""

    def over_limit(self, pod: Pod, offence: LimitViolation) -> None:
        """A container is over its limit that was not, or that was not reported yet."""

    def violated_now(self, found: Sequence[LimitViolation]) -> None:
        """All that are, and all whose memory cannot come back."""

    def noticed(self, pod: Pod, container: str, reason: str) -> None:
        """One of `NOTICES` applies to a container to which it did not."""

    def pool_full(self, pod: Pod, container: str, note: str) -> None:
        """Requests of a container wait for room in the host pool."""

    def unenforced(self, pod: Pod, container: str, note: str) -> None:
        """A limit of a container is not enforced, for a new reason."""

    def ungranted(self, note: str) -> None:
        """Processes use memory of a shared GPU and belong to no grant."""

    def unlisted(self, note: str, pod: Pod | None = None, container: str = "") -> None:
        """Memory of a shared GPU is in use, and NVML lists it for no process. `pod`: of the container that may use it; None = of the node."""

    def arbiter_unreachable(self, trouble: Trouble) -> None:
        """The status could not be had this time."""


class StatusWatch:
    """Reads the arbiter's status every `EVERY_S`. `pod` answers the pod of a UID when the watch has it."""

    def __init__(
        self,
        status: Path,
        pod: Callable[[str], Pod | None],
        observer: StatusObserver,
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

    def is_stranded(self, uid: str) -> bool:
        """Whether memory of a container of this pod could not come back, and its policy was to evict, when the arbiter's status was last read."""
        return any(key[0] == uid and key[2:] == (EVICT, STRANDED) for key in self._reported)

    async def once(self) -> None:
        """Check once. Never raises for what the arbiter does."""
        try:
            status = decode_status(await read_document(self._socket))
        except OSError as error:
            log.debug("the arbiter's status is not to be had", socket=str(self._socket), error=str(error))
            self._observer.arbiter_unreachable("unreachable")
            return
        except BadDocument as error:
            if str(error) != self._trouble:
                log.warning("the arbiter's status cannot be read", socket=str(self._socket), error=str(error))
            self._trouble = str(error)
            self._observer.arbiter_unreachable("unreadable")
            return
        self._trouble = ""
        reported_before = self._reported
        self._follow(limit_violations(status))
        self._follow_kills(status.kills, reported_before | self._reported)
        self._notice((c.uid, c.container, reason) for c in status.containers for reason in notices(c.gpu_time))
        self._report_unenforced(status.containers)
        self._report_pool_full(status.containers)
        self._report_ungranted(status.ungranted)
        self._report_unlisted(status.unlisted)

    def _follow(self, found: list[LimitViolation]) -> None:
        reported = set()
        for offence in found:
            key = _key(offence)
            if key not in self._reported:
                pod = self._pod(offence.uid)
                if pod is None:
                    continue  # the watch may be late: check again
                what = "memory is stranded" if offence.reason == STRANDED else "over the memory limit"
                log.warning(what, pod=pod.key, uid=pod.uid, note=offence.note)
                self._observer.over_limit(pod, offence)
            reported.add(key)
        self._reported = frozenset(reported)
        self._observer.violated_now(found)

    def _follow_kills(self, kills: Iterable[KillStatus], reported: frozenset[_Key]) -> None:
        """A container that is killed for being over its limit is over it for a moment only, so a check may miss that."""
        known = set()
        for kill in kills:
            pod = self._pod(kill.uid)
            if pod is None:
                continue  # the watch may be late: check again
            known.add(kill.id)
            offence = kill_violation(kill)
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
                    continue  # the watch may be late: check again
                self._unenforced_s[key] = now_s
                note = unenforced_note(name, one.reason, one.limits)
                log.warning("a limit is not enforced", pod=pod.key, uid=uid, container=name, reason=one.reason)
                self._observer.unenforced(pod, name, note)

    def _report_pool_full(self, containers: Iterable[ContainerStatus]) -> None:
        """A program tries again and again, so that comes and goes."""
        for found in containers:
            note, key = pool_full_note(found), (found.uid, found.container, POOL_FULL)
            if not note or key in self._unenforced_s or (pod := self._pod(found.uid)) is None:
                continue
            self._unenforced_s[key] = self._clock()
            log.warning("the host pool is full", pod=pod.key, uid=pod.uid, note=note)
            self._observer.pool_full(pod, found.container, note)

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


def _key(offence: LimitViolation) -> _Key:
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
