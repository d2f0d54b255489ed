"""The child: it calls NVML, for the one program that started it. It may hang, be killed and be replaced at any time.

It reads packets of requests from the socket that is its standard input, and answers each packet before it reads the next. One thread does it all, but for
descriptions of several GPUs in one packet (`nvml.side_by_side`). The first packet
comes with an eventfd, in which the child counts its answers in the order of the requests: so the supervisor sees which call hangs. It decides nothing, keeps nothing
but the events it subscribed to, and ends when its supervisor closes the connection or dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from nvml import gpu_facts, handles, mig, readings, usage
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.events import Events
from nvml.library import LIBRARY, load
from nvml.messages import (
    ENOUGH_BYTES,
    MOST_PROCESSES,
    REQUEST_BYTES,
    TOGETHER,
    AnyReply,
    AnyRequest,
    CountRequest,
    DescriptorsRequest,
    ErrorReply,
    Found,
    GpuAtRequest,
    GpuReply,
    HealthRequest,
    MapsRequest,
    MigCreatedReply,
    MigCreateRequest,
    MigDestroyedReply,
    MigDestroyRequest,
    MigModeReply,
    MigModeRequest,
    MigRequest,
    OpenReply,
    OpenRequest,
    ProcessesReply,
    ProcessesRequest,
    ReplyPacket,
    RequestPacket,
    UtilisationReply,
    UtilisationRequest,
    XidsReply,
    XidsRequest,
    decode_requests,
    encode,
)
from nvml.naming import naming
from nvml.side_by_side import SideBySide

_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG, linux/prctl.h."""
SLOW_S: Final = 0.05
"""A caller behind a packet that takes longer is served before the rest of it. Guessed: eight healthy GPUs take a few milliseconds."""


@contextmanager
def opened(driver_root: Path) -> Iterator[Found]:
    """NVML is usable inside. Returns where the library was found. Raises NvmlError."""
    found = load(driver_root)
    with naming(f"the NVIDIA driver of {driver_root}"):
        nv.nvmlInit()
    try:
        yield found
    finally:
        with suppress(nv.NVMLError):
            nv.nvmlShutdown()


def main() -> None:
    """Serve the process at the other end of standard input."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # a call that hangs would outlive the supervisor
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the supervisor's to act on
    with socket.socket(fileno=0) as sock, suppress(ConnectionError):
        serve(sock)


def serve(sock: socket.socket) -> None:
    """Until the supervisor closes the connection. Raises msgspec.MsgspecError for what a supervisor never sends."""
    with Session() as session:
        packet, descriptors, _, _ = socket.recv_fds(sock, TOGETHER * REQUEST_BYTES, 1)
        while packet:
            sock.send(answers(session, decode_requests(packet), *descriptors))
            packet = sock.recv(TOGETHER * REQUEST_BYTES)


def answers(session: Session, requests: Iterable[RequestPacket], answered: int) -> bytes:
    """As one packet: to all of these, or to the first of them where they take long or are large. `answered`: an eventfd."""
    replies: list[msgspec.Raw] = []
    until_s, size, packet = time.monotonic() + SLOW_S, 0, tuple(requests)
    begun = SideBySide(packet, session.answer)
    for received in packet:
        found = begun.reply(received.number) or session.answer(received.request)
        reply = encode(ReplyPacket(received.number, found))
        replies.append(msgspec.Raw(reply))
        os.eventfd_write(answered, 1)
        size += len(reply)
        late = time.monotonic() > until_s and not begun.left  # what was begun would be done again
        if late or size > ENOUGH_BYTES:
            break
    return encode(replies)


class Session:
    """NVML, open from the first request on."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._events: Events | None = None
        self._listens: tuple[str, ...] = ()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def answer(self, request: AnyRequest) -> AnyReply:
        """NVML's answer. An error is an answer, too: it may concern one GPU of many."""
        try:
            return self._answer(request)
        except NvmlError as error:
            return ErrorReply.of(error)
        except Exception as error:  # noqa: BLE001 - of the binding, for an unforeseen value
            return ErrorReply(f"{request.key}: {type(error).__name__}: {error}")

    def _answer(self, request: AnyRequest) -> AnyReply:
        match request:
            case OpenRequest(driver_root, only):
                return self._opened(Path(driver_root), only)
            case CountRequest():
                return gpu_facts.count()
            case GpuAtRequest(index):
                return GpuReply(gpu_facts.gpu_at(index))
            case HealthRequest(uuid):
                return readings.health(uuid)
            case ProcessesRequest(uuid):
                return _held(uuid)
            case UtilisationRequest(uuid, since_us, until_us):
                return UtilisationReply(usage.busy(uuid, since_us, until_us))
            case XidsRequest(uuids):
                return self._xids(uuids)
            case MigRequest(uuid, brief):
                return mig.brief(uuid) if brief else mig.state(uuid)
            case MigModeRequest(uuid, on):
                return MigModeReply(mig.set_mode(uuid, on))
            case MigCreateRequest(uuid, profile, start):
                return MigCreatedReply(mig.create(uuid, profile, start))
            case MigDestroyRequest(uuid, instance):
                mig.destroy(uuid, instance)
                return MigDestroyedReply()
            case MapsRequest() | DescriptorsRequest():
                return ErrorReply("the NVML process examines no processes: the program that serves does")

    def _opened(self, driver_root: Path, only: tuple[str, ...] | None) -> OpenReply:
        """Attaching a GPU for the first time can take seconds; it belongs to the start and not to the first call."""
        found = self._open.enter_context(opened(driver_root))
        with naming("the number of GPUs"):
            handles.restrict(only)
        return OpenReply(found, mapped(LIBRARY.partition(".so")[0]))

    def _xids(self, uuids: tuple[str, ...]) -> XidsReply:
        if self._events is None or self._listens != uuids:
            if self._events is not None:
                self._events.close()
            self._events, self._listens = Events(uuids), uuids
        return XidsReply(self._events.seen(), self._events.unwatched)


def _held(uuid: str) -> ProcessesReply:
    """The memory is read before and after the list: a process that allocates or ends meanwhile is in the list or out of the smaller number."""
    before = usage.memory(uuid)
    processes = usage.processes(uuid)
    after = usage.memory(uuid)
    if before is None or after is None or len(processes) > MOST_PROCESSES:
        return ProcessesReply(processes[:MOST_PROCESSES])
    return ProcessesReply(processes, min(before, after, key=lambda one: one.used_bytes))


def mapped(library: str) -> str:
    """Path of the library of this name that is in this process; empty = none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(library):
            return f"/{path}"
    return ""
