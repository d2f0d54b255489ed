"""What a container sends to its own arbiter's socket: forged packets, and too many of them."""

from __future__ import annotations

from typing import Final

from tests.e2e.attacks.attack import BOTH, Attack, Outcome

HARMLESS: Final = Outcome.HARMLESS
CPU: Final = "300m"
"""Of each flooder: the machine has few processors, and what burns them harms by that alone."""

ATTACKS: Final = (
    Attack(
        name="garbage",
        does="Random packets, packets of every type and length, and half a header go to the arbiter.",
        outcome=HARMLESS,
        prints="tried: garbage",
        script="""
import random
for at in range(300):
    body = random.Random(at).randbytes(random.Random(at).choice((0, 3, 16, 64, 500, 4000)))
    send_packets(*((body,) if at % 3 else (hello(), packet(at % 20, body))), wait=False)
log("tried: garbage"); take()
""",
    ),
    Attack(
        name="returned-twice",
        does="A connection returns 2^40 bytes that it never leased, so that the lease would wrap below zero.",
        outcome=HARMLESS,
        prints="tried: forged",
        script="""
forged = [packet(5, struct.pack("<IIQ", 0, 0, amount)) for amount in (1 << 40, 1 << 63, (1 << 64) - 1)]
for one in forged: send_packets(hello(), one, wait=False)
log("tried: forged returns"); take()
""",
    ),
    Attack(
        name="reports-no-usage",
        does="Beside the library, a connection claims a usage of 0 and leases the whole limit again and again.",
        outcome=HARMLESS,
        prints="tried: forged",
        script="""
kept = []
for _ in range(8):
    sock = connect(); kept.append(sock)
    sock.send(hello()); answer(sock)
    sock.send(packet(7, struct.pack("<IIQQ", 0, 0, 0, 0)))
    sock.send(packet(3, struct.pack("<IIQQ", 0, 0, 1 << 20, 1 << 62))); answer(sock)
    sock.send(packet(7, struct.pack("<IIQQ", 0, 0, 0, 0)))
log("tried: forged usage"); take()
""",
    ),
    Attack(
        name="claims-a-large-lease",
        does="A connection claims to lease 2^50 bytes already, as if it had done so from an earlier arbiter.",
        outcome=HARMLESS,
        prints="tried: a lease",
        script="""
kept = [connect() for _ in range(4)]
for sock in kept:
    sock.send(hello()); answer(sock)
    for leased in (1 << 50, (1 << 64) - 1): sock.send(packet(7, struct.pack("<IIQQ", 0, 0, leased, leased)))
time.sleep(2); log("tried: a lease of 2^50 bytes"); kept.clear(); time.sleep(1); take()
""",
    ),
    Attack(
        name="passes-descriptors",
        does="Packets come with sockets whose close waits 30 s for a peer that reads nothing, and with the last descriptor of 128 MiB.",
        outcome=HARMLESS,
        prints="tried: descriptors",
        script="""
import array, os
peer = socket.create_server(("127.0.0.1", 0))
for _ in range(8):
    full = socket.create_connection(peer.getsockname()); full.setblocking(False)
    try:
        while True: full.send(bytes(65536))
    except BlockingIOError: pass
    full.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    large = os.memfd_create("large"); os.write(large, bytes(128 << 20))
    sock = connect(); sock.send(hello()); answer(sock)
    passed = array.array("i", [full.fileno(), large])
    sock.sendmsg([packet(5, struct.pack("<IIQ", 0, 0, 0))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    full.close(); os.close(large)
log("tried: descriptors"); take()
""",
    ),
    Attack(
        name="others-channels",
        does="A connection announces channels that are another process's, by numbers that it guessed.",
        outcome=HARMLESS,
        prints="tried: forged",
        script="""
for client in range(1, 40):
    numbers = list(range(64))
    body = struct.pack("<6I64I64I", 0, client, 1, 64, 64, 0, *numbers, *numbers)
    send_packets(hello(flags=1), packet(13, body), wait=False)
log("tried: forged channels"); take()
""",
    ),
    Attack(
        name="connection-flood",
        does="A container opens 300 connections to its socket and keeps them, and opens and closes 5,000 more.",
        outcome=HARMLESS,
        cpu=CPU,
        prints="tried: 5000",
        script="""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = []
for at in range(5000):
    try:
        sock = connect()
        kept.append(sock) if at < 300 else sock.close()
    except OSError: pass
log("tried: 5000 connections"); kept.clear(); time.sleep(1); take()
""",
    ),
    Attack(
        name="packet-flood",
        does="A connection sends 50,000 requests for a lease without reading an answer.",
        outcome=HARMLESS,
        cpu=CPU,
        prints="tried: 50000",
        script="""
sock = connect(); sock.send(hello()); answer(sock); sock.setblocking(False)
for _ in range(50000):
    try: sock.send(packet(3, struct.pack("<IIQQ", 0, 0, 1 << 20, 1 << 40)))
    except BlockingIOError: time.sleep(0.0005)
    except OSError: sock = connect(); sock.send(hello()); sock.setblocking(False)
log("tried: 50000 packets"); sock.close(); take()
""",
    ),
    Attack(
        name="written-page",
        does="A container opens the page of its limits again for writing, and writes, maps, cuts and seals it.",
        outcome=HARMLESS,
        levels=BOTH,
        prints="tried: the page, 0 of 5 ways changed it",
        script="""
import array, fcntl, mmap
sock, passed = connect(), array.array("i"); sock.send(hello())
for _, _, words in sock.recvmsg(65536, socket.CMSG_SPACE(8 * passed.itemsize))[1]: passed.frombytes(words)
(page,) = [one for one in passed if "tangram-unleased" in os.readlink(f"/proc/self/fd/{one}")]
before = os.pread(page, 65536, 0)
def opened(): return os.open(f"/proc/self/fd/{page}", os.O_RDWR)
def hole():
    if libc().fallocate(opened(), 3, ctypes.c_long(0), ctypes.c_long(4096)): raise OSError
ways = (
    lambda: os.pwrite(opened(), bytes([255]) * 64, 0),
    lambda: mmap.mmap(opened(), 64).write(bytes([255]) * 64),
    hole,
    lambda: os.ftruncate(opened(), 0),
    lambda: fcntl.fcntl(opened(), 1033, 8),  # F_ADD_SEALS, F_SEAL_WRITE: the arbiter could not write
)
changed = 0
for way in ways:
    try: way(); changed += 1
    except OSError: pass
changed += len(os.pread(page, 65536, 0)) != len(before)
log(f"tried: the page, {changed} of {len(ways)} ways changed it"); take()
""",
    ),
)
