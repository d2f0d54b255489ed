"""A container's program: reads one Python expression a line and answers with JSON. Uses the driver API as it is found."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

cuda = ctypes.CDLL("libcuda.so.1")
library = ctypes.CDLL(None)
SPIN = b"//fake spin us=param0\n.entry spin() {}\n"


def check(code: int) -> None:
    assert code == 0, f"CUresult {code}"


class Instruction(ctypes.Structure):
    """struct sock_filter."""

    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("count", ctypes.c_uint16), ("first", ctypes.POINTER(Instruction)))


LOAD, EQUALS, HAS_BITS, ANSWER = 0x20, 0x15, 0x45, 0x06
UNSHARE, CLONE, CLONE_FS, NO_PERMISSION, ALLOWED = 272, 56, 0x200, 0x50001, 0x7FFF0000


def forbid(*calls: str) -> None:
    """By seccomp, as a container runtime does: `unshare`, and `clone` of what has a root and folder of its own."""
    lines = [(LOAD, 0, 0, 0)]
    if "unshare" in calls:
        lines += [(EQUALS, 0, 1, UNSHARE), (ANSWER, 0, 0, NO_PERMISSION)]
    if "clone" in calls:
        lines += [(EQUALS, 0, 3, CLONE), (LOAD, 0, 0, 16), (HAS_BITS, 1, 0, CLONE_FS), (ANSWER, 0, 0, NO_PERMISSION)]
    lines += [(ANSWER, 0, 0, ALLOWED)]
    made = (Instruction * len(lines))(*(Instruction(*line) for line in lines))
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    assert library.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert library.prctl(seccomp, by_filter, ctypes.byref(Filter(len(lines), made))) == 0


if "FORBIDDEN" in os.environ:
    forbid(*os.environ["FORBIDDEN"].split())
check(cuda.cuInit(0))
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
check(cuda.cuModuleLoadData(ctypes.byref(module), SPIN))
check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"))


launch_kernel = cuda.cuLaunchKernel


def go_past_the_library() -> None:
    """From now on kernels are launched by the driver's own function, found where the driver lies in memory: nothing is reported."""
    global launch_kernel
    lowest = next(line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line)
    names = subprocess.run(
        ["nm", "-D", "--defined-only", lowest[-1]], capture_output=True, text=True, check=True
    ).stdout
    offset = next(int(line.split()[0], 16) for line in names.splitlines() if line.split()[-1] == "cuLaunchKernel")
    arguments = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    launch_kernel = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(lowest[0].split("-")[0], 16) + offset)


def launch(us: int, stream: int = 0) -> None:
    value = ctypes.c_uint32(us)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
    check(launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(stream), parameters, None))


def wait() -> float:
    began = time.monotonic()
    check(cuda.cuStreamSynchronize(None))
    return time.monotonic() - began


def stream() -> int:
    made = ctypes.c_void_p()
    check(cuda.cuStreamCreate(ctypes.byref(made), 1))
    return int(made.value or 0)


def launch_in_thread(us: int) -> None:
    """Into the default stream of a thread that has ended when this returns."""

    def run() -> None:
        check(cuda.cuCtxSetCurrent(context))
        value = ctypes.c_uint32(us)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
        check(cuda.cuLaunchKernel_ptsz(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def fill_in_thread() -> None:
    """The same with a fill."""
    at = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(4096)))

    def run() -> None:
        check(cuda.cuCtxSetCurrent(context))
        check(cuda.cuMemsetD8Async_ptsz(at, 1, ctypes.c_size_t(4096), None))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def launch_and_fill(us: int, stream: int = 0) -> None:
    """A kernel and a fill, without a wait for their end."""
    at = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(4096)))
    launch(us, stream)
    check(cuda.cuMemsetD8Async(at, 1, ctypes.c_size_t(4096), ctypes.c_void_p(stream)))


def go_green() -> None:
    """From now on there is no context but a green one."""
    global function
    resource, description, made, now = (ctypes.c_char * 512)(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    of_multiprocessors, default_stream = 1, 1
    check(cuda.cuCtxDestroy_v2(context))
    check(cuda.cuDeviceGetDevResource(0, ctypes.byref(resource), of_multiprocessors))
    check(cuda.cuDevResourceGenerateDesc(ctypes.byref(description), ctypes.byref(resource), 1))
    check(cuda.cuGreenCtxCreate(ctypes.byref(made), description, 0, default_stream))
    check(cuda.cuCtxFromGreenCtx(ctypes.byref(now), made))
    check(cuda.cuCtxSetCurrent(now))
    check(cuda.cuModuleLoadData(ctypes.byref(module), SPIN))
    function = ctypes.c_void_p()
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"))


def lower_descriptors() -> None:
    """None can be made from now on; those that are open stay."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def allow_descriptors(count: int) -> None:
    """None is made from now on whose number is `count` or more; it can be taken back."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def use_up_descriptors() -> None:
    with suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)


def change_root(folder: str) -> None:
    os.chroot(folder)
    os.chdir("/")


def launch_now_and_then(us: int, period_s: float) -> Callable[[], None]:
    """From another thread, which waits for nothing. Returns what ends it."""
    over = threading.Event()

    def run() -> None:
        check(cuda.cuCtxSetCurrent(context))
        while not over.wait(period_s):
            launch(us, other)

    other = stream()
    threading.Thread(target=run, daemon=True).start()
    return over.set


def launch_in_destroyed(us: int) -> None:
    """Into a stream that is destroyed at once."""
    made = stream()
    launch(us, made)
    check(cuda.cuStreamDestroy_v2(ctypes.c_void_p(made)))


def wait_for_context() -> None:
    check(cuda.cuCtxSynchronize())


def launch_in_streams(count: int, us: int) -> list[int]:
    made = [stream() for _ in range(count)]
    for one in made:
        launch(us, one)
    return made


def wait_for_streams(made: list[int]) -> None:
    for one in made:
        check(cuda.cuStreamSynchronize(ctypes.c_void_p(one)))


def fail() -> int:
    """Launch a kernel that traps: the error with which the wait for it ends."""
    code, found = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(code), b"//fake broken us=1000 error=719\n.entry broken() {}\n"))
    check(cuda.cuModuleGetFunction(ctypes.byref(found), code, b"broken"))
    check(cuda.cuLaunchKernel(found, 1, 1, 1, 1, 1, 1, 0, None, None, None))
    return int(cuda.cuCtxSynchronize())


def fill(name: str) -> None:
    """A synchronous one, in one dimension or two."""
    at = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(4096)))
    sizes = (64, 1, 64, 64) if "2D" in name else (1, 4096)
    check(getattr(cuda, name)(at, *map(ctypes.c_size_t, sizes)))
    check(cuda.cuMemFree_v2(at))


places = {0: (context, function)}


def on_gpu(gpu: int) -> None:
    """What is launched from now on goes there, in a context of that GPU."""
    global function
    if gpu not in places:
        made, code, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuCtxCreate_v2(ctypes.byref(made), 0, gpu))
        check(cuda.cuModuleLoadData(ctypes.byref(code), SPIN))
        check(cuda.cuModuleGetFunction(ctypes.byref(found), code, b"spin"))
        places[gpu] = made, found
    here, function = places[gpu]
    check(cuda.cuCtxSetCurrent(here))


def leave_gpu(gpu: int) -> None:
    check(cuda.cuCtxDestroy_v2(places.pop(gpu)[0]))


class Launch(ctypes.Structure):
    """CUDA_LAUNCH_PARAMS."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


def on_both_gpus() -> ctypes.Array[Launch]:
    launches = []
    for gpu in (1, 0):
        on_gpu(gpu)
        launches.append(Launch(held(), SIZES, stream(), None))
    return (Launch * 2)(*launches)


def held() -> ctypes.c_void_p:
    """A kernel without parameters, in the context that there is."""
    code, found = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(code), b"//fake hold us=1000\n.entry hold() {}\n"))
    check(cuda.cuModuleGetFunction(ctypes.byref(found), code, b"hold"))
    return found


SIZES = (ctypes.c_uint * 7)(1, 1, 1, 1, 1, 1, 0)
LAUNCHES = {
    "cuLaunchKernel": lambda: (held(), 1, 1, 1, 1, 1, 1, 0, None, None, None),
    "cuLaunchKernelEx": lambda: (ctypes.byref(LaunchConfig(SIZES)), held(), None, None),
    "cuLaunchCooperativeKernel": lambda: (held(), 1, 1, 1, 1, 1, 1, 0, None, None),
    "cuLaunchCooperativeKernelMultiDevice": lambda: (on_both_gpus(), 2, 0),
    "cuLaunch": lambda: (held(),),
    "cuLaunchGrid": lambda: (held(), 1, 1),
    "cuLaunchGridAsync": lambda: (held(), 1, 1, None),
}


def launch_by(name: str) -> None:
    """By one of the driver's functions, a kernel of a millisecond."""
    check(getattr(cuda, name)(*LAUNCHES[name]()))


def contexts(count: int) -> None:
    """So many more, of which none is used."""
    for _ in range(count):
        check(cuda.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0))
    check(cuda.cuCtxSetCurrent(context))


def seconds_of(us: int) -> float:
    """That a launch takes to return."""
    began = time.monotonic()
    launch(us)
    return time.monotonic() - began


def part_of_time(us: int, seconds: float) -> float:
    """Percent of the time that kernels of this process took, each with a wait, as the process can measure it: whichever container runs."""
    began, steps = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        launch(us)
        wait()
        steps += 1
    return steps * us / (time.monotonic() - began) / 1e4


busy = threading.Event()


def work_on(us: int) -> None:
    """Until it is stopped, keeps two kernels queued."""
    busy.set()

    def loop() -> None:
        check(cuda.cuCtxSetCurrent(context))
        launch(us)
        while busy.is_set():
            launch(us)
            event_wait()
        check(cuda.cuStreamSynchronize(None))

    def event_wait() -> None:
        check(cuda.cuEventRecord(event, None))
        check(cuda.cuEventSynchronize(last[0]))
        last[0], spare[0] = event, last[0]

    event, last, spare = ctypes.c_void_p(), [ctypes.c_void_p()], [None]
    check(cuda.cuEventCreate(ctypes.byref(event), 2))
    check(cuda.cuEventCreate(ctypes.byref(last[0]), 2))
    threading.Thread(target=loop, daemon=True).start()


def stop() -> None:
    busy.clear()


def requests(count: int, us: int, period_s: float, hint_us: int = 0) -> list[float]:
    """Milliseconds that each took."""
    took = []
    for _ in range(count):
        time.sleep(period_s)
        if hint_us:
            library.tangram_hint(ctypes.c_uint64(hint_us))
            time.sleep(hint_us / 1e6)
        began = time.monotonic()
        launch(us)
        check(cuda.cuStreamSynchronize(None))
        took.append((time.monotonic() - began) * 1000)
    return took


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
