"""A program in the place of the NVML child: it does at each request what a file lists. One line a kind of request, such as `Processes hang`.

    answer    (no line) what a child with one GPU would answer
    hang      never
    die       ends by SIGKILL
    exit      ends with status 3
    garbage   bytes that are no answer
    endless   a packet beyond the limit
    other     the answer to another request
    wrong     an answer of another kind
    unasked   the answer, and then one more
    first     the answer to the first of several requests of a packet, and no other
    refuse    NVML's refusal
    slow=S    the answer, S seconds later

It writes its pid and each request to the file's neighbour `.log`. Its own file is read anew at each request.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from nvml import messages as m
from nvml.process import PACKET_BYTES

GPU = "GPU-00000000-0000-0000-0000-000000000001"
_SET_PTRACER = 0x59616D61
ANSWERS: dict[str, m.AnyReply] = {
    "Open": m.OpenReply("driver root", ""),
    "Count": m.CountReply(1, "580"),
    "Answers": m.HealthReply(None),
    "Processes": m.ProcessesReply((m.ProcessUsage(4242, GPU, 512 * 2**20),)),
    "Computes": m.UtilisationReply(m.Busy({4242: 50}, 7)),
    "Xids": m.XidsReply((), {}),
}


def main(script: Path) -> None:
    ctypes.CDLL(None).prctl(_SET_PTRACER, ctypes.c_long(-1), 0, 0, 0)  # for the test that keeps it from ending
    log = script.with_suffix(".log").open("a", buffering=1)
    with socket.socket(fileno=0) as sock:
        packet, descriptors, _, _ = socket.recv_fds(sock, m.REQUEST_BYTES, 1)
        while packet:
            answers: list[m.ReplyPacket] = []
            for requested in m.decode_requests(packet):
                kind = requested.request.__struct_config__.tag
                name = f"{kind}:{requested.request.key}"
                print(os.getpid(), kind, file=log)
                acts = dict(line.split() for line in script.read_text().splitlines())
                what = acts.get(name, acts.get(kind, ""))
                answers += act(sock, requested.number, kind, what)
                os.eventfd_write(descriptors[0], 1)
                if what == "first":
                    break
            sock.send(m.encode(answers))
            packet = sock.recv(m.REQUEST_BYTES)


def act(sock: socket.socket, number: int, kind: str, what: str) -> list[m.ReplyPacket]:
    """What is added to the answers."""
    answer = m.ReplyPacket(number, ANSWERS[kind])
    match what:
        case "hang":
            threading.Event().wait()
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "garbage":
            sock.send(b"\xff" * 100)
        case "endless":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET_BYTES)
            sock.send(bytes(PACKET_BYTES + 1))
        case "other":
            answer = m.ReplyPacket(number - 1, ANSWERS[kind])
        case "wrong":
            answer = m.ReplyPacket(number, m.HealthReply(None))
        case "refuse":
            answer = m.ReplyPacket(number, m.ErrorReply("NVML reports no (9)", 9))
        case "unasked":
            sock.send(m.encode([answer]))
        case _ if what.startswith("slow="):
            threading.Event().wait(float(what.removeprefix("slow=")))
    return [answer]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
