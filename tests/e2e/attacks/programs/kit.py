"""What the scripts of attacks call, inside their containers. Python's standard library only."""

from __future__ import annotations

import ctypes
import os
import pathlib
import re  # noqa: F401 - scripts have what is imported here
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

MIB = 2**20
AIM_MIB = 2048
"""Twice the limit."""
STEP_MIB = 64
RAW = "/attacks/raw"
"""The static program of raw.c."""
DRIVER_SOCKET = "/run/nvidia-persistenced/socket"
ARBITER_SOCKET = "/.tangram/socket/arbiter.sock"
HEAD = "import sys; sys.path.insert(0, '/attacks'); from kit import *; "
LOADER = "/lib64/ld-linux-x86-64.so.2"
KILLED = 137


def log(text: str) -> None:
    """A line of the log, with the time."""
    print(f"{time.time():.3f} {text}", flush=True)


def stay() -> NoReturn:
    """Keep what is held."""
    while True:
        time.sleep(60)


class Driver:
    """The CUDA driver API, by its exported functions or by addresses that the caller found itself."""

    def __init__(self, handle: int | None = None, addresses: dict[str, int] | None = None) -> None:
        self._cuda = None if addresses else ctypes.CDLL("libcuda.so.1", handle=handle)
        self._addresses = addresses or {}
        self.must("cuInit", 0)
        context = ctypes.c_void_p()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.must("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> int:
        if self._addresses:
            return int(ctypes.CFUNCTYPE(ctypes.c_int)(self._addresses[name])(*arguments))
        return int(getattr(self._cuda, name)(*arguments))

    def must(self, name: str, *arguments: object) -> None:
        code = self.call(name, *arguments)
        if code:
            log(f"refused: {name} answers {code}")
            stay()

    def take(self, mib: int = AIM_MIB) -> int:
        """Allocate until there is so much or the driver refuses. MiB."""
        had, at = 0, ctypes.c_uint64()
        while had < mib and self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(STEP_MIB * MIB)) == 0:
            had += STEP_MIB
        return had


def take(mib: int = AIM_MIB) -> NoReturn:
    """Allocate all there is, up to twice the limit, by the driver's functions as any program finds them."""
    try:
        log(f"allocated {Driver().take(mib)} MiB")
    except OSError as error:
        log(f"refused: no driver ({error})")
    stay()


def again(script: str, *, program: tuple[str, ...] = (), **env: str) -> NoReturn:
    """Become a new Python with no other environment."""
    words = (*program, sys.executable, "-c", HEAD + script)
    os.execve(words[0], words, env)


def own_loader() -> str:
    """A copy of the dynamic loader that reads another file than /etc/ld.so.preload."""
    copy = pathlib.Path("/tmp/loader")
    copy.write_bytes(pathlib.Path(LOADER).read_bytes().replace(b"/etc/ld.so.preload", b"/etc/ld.so.prelude"))
    copy.chmod(0o755)
    return str(copy)


def without_library(script: str) -> NoReturn:
    """Become a Python into which nothing is preloaded."""
    again(script, program=(own_loader(),), PATH=os.environ["PATH"])


def raw(mib: int = AIM_MIB, *more: str, program: str = RAW) -> NoReturn:
    """Become the static program, which takes memory without any library."""
    os.execve(program, (program, DRIVER_SOCKET, str(mib), gpu(), *more), {})


def relay(seconds: float) -> NoReturn:
    """Static programs one after the other; each begins before the one before it ends. Ends with the status of the first that another process ends."""
    before = 0
    while True:
        pid = os.fork()
        if pid == 0:
            raw()
        time.sleep(seconds)
        if before:
            ended, status = os.waitpid(before, os.WNOHANG)
            if ended:
                os._exit(128 + os.WTERMSIG(status))
            os.kill(before, signal.SIGKILL)
            os.waitpid(before, 0)
        before = pid


def restart(command: Callable[[], NoReturn]) -> NoReturn:
    """Run the command in a child, again whenever it has ended."""
    while True:
        pid = os.fork()
        if pid == 0:
            command()
        os.waitpid(pid, 0)


def gpu() -> str:
    """Number of the container's GPU."""
    numbers = (node.name.removeprefix("nvidia") for node in pathlib.Path("/dev").glob("nvidia*"))
    return min(number for number in numbers if number.isdigit())


def children(number: int, mib: int) -> NoReturn:
    """So many static programs side by side. Ends as the first that a signal ends."""
    for _ in range(number):
        if os.fork() == 0:
            raw(mib)
    reap()


def reap() -> NoReturn:
    """Wait for children, also for those that a child left; end as the first that a signal ends."""
    while True:
        _, status = os.wait()
        if os.WIFSIGNALED(status):
            os._exit(128 + os.WTERMSIG(status))


def child(script: object) -> NoReturn:
    """Run something in a child; end as it ends."""
    pid = os.fork()
    if pid == 0:
        script()  # type: ignore[operator]
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def driver_mapping() -> list[str]:
    """The first line of /proc/self/maps with libcuda."""
    ctypes.CDLL("libcuda.so.1")
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return next(line.split() for line in lines if "/libcuda.so" in line)


def driver_file() -> pathlib.Path:
    """The file of libcuda."""
    return pathlib.Path(driver_mapping()[5])


def addresses(*names: str) -> dict[str, int]:
    """Where the real functions of libcuda are, by the file's own symbol table: no dlsym, no loader is asked."""
    base, data = int(driver_mapping()[0].split("-")[0], 16), driver_file().read_bytes()
    at, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, at + size * i) for i in range(count)]
    symbols = next(section for section in sections if section[1] == 11)  # SHT_DYNSYM
    texts = sections[symbols[6]]
    found: dict[str, int] = {}
    for offset in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, offset)
        end = data.index(b"\0", texts[4] + name)
        found[data[texts[4] + name : end].decode()] = base + value
    return {name: found[name] for name in names}


NAMES = ("cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2")


def packet(number: int, body: bytes, seq: int = 1) -> bytes:
    """A packet of the arbiter's protocol, docs/reference/protocol.md."""
    return struct.pack("<IHHII", 0x52474E54, 1, number, seq, len(body)) + body


def hello(pid: int = 1, flags: int = 0) -> bytes:
    return packet(1, struct.pack("<II32s", pid, flags, b"forged"))


def connect(path: str = ARBITER_SOCKET) -> socket.socket:
    """To an arbiter's socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    sock.settimeout(2)
    return sock


def answer(sock: socket.socket) -> bytes:
    """The next packet; empty when the arbiter closed the connection or does not answer."""
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def greeted(path: str) -> str:
    """How an arbiter answers a greeting at this socket. One that hangs up may do so before its words are read."""
    try:
        with connect(path) as sock:
            sock.send(hello())
            heard = sock.recv(65536)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return f"refused: {error}"
    kind = struct.unpack_from("<H", heard, 6)[0] if heard else 0
    return f"welcomed: {heard!r}" if kind == 2 else f"refused: {heard[20:].split(bytes(1))[0].decode(errors='replace')}"


def send_packets(*packets: bytes, wait: bool = True) -> bytes:
    """The last answer to these packets on a connection of their own."""
    last = b""
    with connect() as sock:
        for one in packets:
            try:
                sock.send(one)
            except OSError:
                break
            last = answer(sock) if wait else b""
    return last


def cut_off() -> None:
    """Close what the library has open to the arbiter."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            peer = socket.socket(fileno=os.dup(int(name))).getpeername()
        except OSError:
            continue
        if "arbiter" in str(peer):
            log(f"tried: close {name}, {peer}")
            os.close(int(name))


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def tried(what: str, code: int) -> bool:
    """Say what became of a call of libc's. Did it succeed?"""
    log(f"tried: {what}: {'done' if code >= 0 else os.strerror(ctypes.get_errno())}")
    return code >= 0


def helpers() -> list[int]:
    """Threads of the library in this process."""
    return [
        int(task.name)
        for task in pathlib.Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "tangram\n"
    ]


def end_helper() -> None:
    """Have the library's thread run pthread_exit, by a signal to it alone. It has its name only when it runs."""
    while not (found := helpers()):
        time.sleep(0.01)
    calls = libc()
    calls.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    calls.signal(signal.SIGUSR1, ctypes.cast(calls.pthread_exit, ctypes.c_void_p))
    for thread in found:
        tried("a signal to the library's thread", calls.syscall(234, os.getpid(), thread, int(signal.SIGUSR1)))
