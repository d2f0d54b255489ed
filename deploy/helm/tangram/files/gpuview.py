#!/usr/bin/env python3
"""See and use a GPU as a CUDA program does, through the driver API, with nothing but Python's standard library.

    gpuview                      what this container sees: each GPU, its UUID, its memory
    gpuview hold 6Gi             allocate, print, keep it until stopped
    gpuview grab 12Gi            allocate in steps of 1 GiB until done or refused; release everything; say what happened
    gpuview work                 compute until stopped: kernels of 20 ms one after the other; --kernel-ms and --every-ms for others

Exit status: 0 when everything requested was had, 3 when the driver refused memory, 1 on any other CUDA error.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time

GIB = 2**30
SUFFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
REPORT_S = 2.0
"""How often `work` says what it did. Guessed."""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY, cuda.h."""


SPIN = b"""//fake spin us=param0
.version 6.4
.target sm_50
.address_size 64
.visible .entry spin(.param .u32 p_us)
{
 .reg .pred %p1;
 .reg .b32 %r<5>;
 .shared .align 4 .b32 sum;
 ld.param.u32 %r1, [p_us];
 mul.lo.u32 %r1, %r1, STEPS;
 mov.u32 %r2, sum;
again:
 setp.eq.u32 %p1, %r1, 0;
 @%p1 bra done;
 ld.volatile.shared.u32 %r3, [%r2];
 add.u32 %r3, %r3, %r1;
 st.volatile.shared.u32 [%r2], %r3;
 sub.u32 %r1, %r1, 1;
 bra again;
done:
 ret;
}
""".replace(b"STEPS", b"55")
"""A kernel that takes its first parameter in microseconds: on the fake driver exactly, on an H200 about: 55 turns of the
loop each are worked out from loops of 33 and 50 measured there; this kernel itself has run on the fake driver only."""


class CudaError(Exception):
    """A driver call failed. `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.code = code
        self.name = name


class Cuda:
    """The few calls of the driver API that this program needs."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)

    def call(self, function: str, *arguments: object) -> None:
        """Call the driver; raise CudaError when it answers with anything but CUDA_SUCCESS."""
        code = getattr(self.library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(function, code, (name.value or b"CUDA error").decode())

    def devices(self) -> list[int]:
        """Ordinals of the GPUs that this process sees."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return list(range(count.value))

    def describe(self, ordinal: int) -> tuple[str, str, int]:
        """(name, UUID, bytes) of a GPU, as the driver tells this process."""
        name, uuid, size = ctypes.create_string_buffer(96), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
        self.call("cuDeviceGetName", name, len(name), ordinal)
        self.call("cuDeviceGetUuid_v2", uuid, ordinal)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), ordinal)
        digits = bytes(uuid).hex()
        return (
            name.value.decode(),
            "-".join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]]),
            size.value,
        )

    def use(self, ordinal: int) -> None:
        """Make the primary context of a GPU current."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self.call("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the current GPU."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> int:
        """Device memory, by address."""
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        """Give device memory back."""
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def kernel(self) -> ctypes.c_void_p:
        """The function `spin`."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), SPIN)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"spin")
        return function

    def run(self, function: ctypes.c_void_p, duration_us: int) -> None:
        """Launch `spin` and wait for its end."""
        value = ctypes.c_uint32(duration_us)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
        self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)
        self.call("cuStreamSynchronize", None)


def log(text: str) -> None:
    """One line that names the pod, at once."""
    print(f"{os.environ.get('POD_NAME', os.uname().nodename)}: {text}", flush=True)


def parse_size(text: str) -> int:
    """`6Gi` -> bytes."""
    for suffix, factor in SUFFIXES.items():
        if text.endswith(suffix) and text[: -len(suffix)].isdigit():
            return int(text[: -len(suffix)]) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is no size: write a whole number with Ki, Mi or Gi, such as 6Gi")


def view(cuda: Cuda) -> int:
    """Print what this process sees."""
    devices = cuda.devices()
    if not devices:
        log("no GPU is visible here")
    for ordinal in devices:
        name, uuid, size = cuda.describe(ordinal)
        cuda.use(ordinal)
        free, total = cuda.memory()
        log(
            f"GPU {ordinal} {name} {uuid}: {size / GIB:.1f} GiB, of which {free / GIB:.1f} of {total / GIB:.1f} GiB are free"
        )
    return 0


def hold(cuda: Cuda, size: int) -> int:
    """Allocate and keep it until a signal comes."""
    cuda.use(0)
    try:
        cuda.allocate(size)
    except CudaError as error:
        log(f"{size / GIB:.1f} GiB refused: {error.name}")
        return 3 if error.code == OUT_OF_MEMORY else 1
    free, total = cuda.memory()
    log(f"holds {size / GIB:.1f} GiB; {free / GIB:.1f} of {total / GIB:.1f} GiB are free")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


def grab(cuda: Cuda, size: int) -> int:
    """Allocate in steps until done or refused, then release everything."""
    cuda.use(0)
    held: list[int] = []
    refused = None
    while len(held) * GIB < size and refused is None:
        try:
            held.append(cuda.allocate(min(GIB, size - len(held) * GIB)))
        except CudaError as error:
            refused = error
    had = len(held)
    for pointer in held:
        cuda.free(pointer)
    if refused is None:
        log(f"took {size / GIB:.1f} GiB and released them")
        return 0
    log(
        f"requested {size / GIB:.1f} GiB: after {had} GiB the driver said {refused.name}; released them, {cuda.memory()[0] / GIB:.1f} GiB are free again"
    )
    return 3 if refused.code == OUT_OF_MEMORY else 1


def work(cuda: Cuda, kernel_ms: float, every_ms: float) -> int:
    """Kernels one after the other, or one each so often, until a signal comes; says now and then how many there were."""

    def stop(_number: int, _frame: object) -> None:
        sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    cuda.use(0)
    function = cuda.kernel()
    took_ms: list[float] = []
    reported = time.monotonic()
    while True:
        began = time.monotonic()
        cuda.run(function, int(kernel_ms * 1000))
        ended = time.monotonic()
        took_ms.append((ended - began) * 1000)
        if ended - reported >= REPORT_S:
            took_ms.sort()
            log(
                f"{len(took_ms) / (ended - reported):.1f} kernels of {kernel_ms:g} ms a second, "
                f"each done after {took_ms[len(took_ms) // 2]:.1f} ms (the slowest {took_ms[-1]:.1f})"
            )
            took_ms.clear()
            reported = ended
        time.sleep(max(0.0, every_ms / 1000 - (time.monotonic() - began)))


def parser_of_commands() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gpuview", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command="view", then_wait=False)
    commands = parser.add_subparsers()
    seen = commands.add_parser("view", help="print what this container sees (the default)")
    seen.add_argument("--then-wait", action="store_true", help="stay alive afterwards, until stopped")
    for name, text in (("hold", "allocate and keep"), ("grab", "allocate step by step, then release")):
        command = commands.add_parser(name, help=text)
        command.add_argument("size", type=parse_size, help="such as 6Gi")
        command.set_defaults(command=name)
    worker = commands.add_parser("work", help="compute until stopped")
    worker.add_argument(
        "--kernel-ms", type=float, default=20.0, help="how long each kernel takes (default %(default)g)"
    )
    worker.add_argument("--every-ms", type=float, default=0.0, help="one each so often (default: as fast as they go)")
    worker.set_defaults(command="work")
    return parser


def main() -> int:
    """Parse the command line and run."""
    arguments = parser_of_commands().parse_args()
    signal.pthread_sigmask(
        signal.SIG_BLOCK,
        {signal.SIGTERM, signal.SIGINT} if arguments.command == "hold" or arguments.then_wait else set(),
    )
    try:
        cuda = Cuda()
        match arguments.command:
            case "hold":
                status = hold(cuda, arguments.size)
            case "grab":
                status = grab(cuda, arguments.size)
            case "work":
                status = work(cuda, arguments.kernel_ms, arguments.every_ms)
            case _:
                status = view(cuda)
    except CudaError as error:
        log(str(error))
        status = 1
    except OSError as error:
        log(f"no CUDA driver in this container ({error})")
        status = 1
    if arguments.then_wait:
        log("waiting until stopped")
        started = time.monotonic()
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        log(f"stopped after {time.monotonic() - started:.0f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
