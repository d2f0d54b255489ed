"""A program whose kernels on several GPUs spin until those on all the others run, as those of a collective operation do.

`GANG_GPUS`: the GPUs of this process, of the container's; `GANG_SIZE`: how many GPUs the gang has, in this process and others; `GANG_CELLS`: the file in which kernels
say that they run. Reads one Python expression a line and answers with JSON.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path

CELL_BYTES = 4
KERNELS = (
    b"//fake meet us=0 does=wait sets=param0 at=param1\n//fake spin us=param0\n.entry meet() {}\n.entry spin() {}\n"
)

cuda = ctypes.CDLL("libcuda.so.1")
mine = tuple(map(int, os.environ["GANG_GPUS"].split(",")))
size = int(os.environ["GANG_SIZE"])


def check(code: int) -> None:
    assert code == 0, f"CUresult {code}"


class Place:
    """One GPU: a context, and the kernels in it."""

    def __init__(self, gpu: int) -> None:
        self.context, self._module = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuCtxCreate_v2(ctypes.byref(self.context), 0, gpu))
        check(cuda.cuModuleLoadData(ctypes.byref(self._module), KERNELS))
        self._meet, self._spin = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleGetFunction(ctypes.byref(self._meet), self._module, b"meet"))
        check(cuda.cuModuleGetFunction(ctypes.byref(self._spin), self._module, b"spin"))

    def meet(self, sets: int, at: int) -> None:
        self._launch(self._meet, ctypes.c_uint64(sets), ctypes.c_uint64(at))

    def spin(self, us: int) -> None:
        self._launch(self._spin, ctypes.c_uint32(us))

    def wait(self) -> None:
        check(cuda.cuCtxSetCurrent(self.context))
        check(cuda.cuStreamSynchronize(None))

    def _launch(self, kernel: ctypes.c_void_p, *values: ctypes.c_uint64 | ctypes.c_uint32) -> None:
        check(cuda.cuCtxSetCurrent(self.context))
        parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        check(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, parameters, None))


check(cuda.cuInit(0))
places = {gpu: Place(gpu) for gpu in mine}
with Path(os.environ["GANG_CELLS"]).open("r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
cells = ctypes.addressof(ctypes.c_char.from_buffer(memory))
PORTABLE = 1
check(cuda.cuMemHostRegister_v2(ctypes.c_void_p(cells), ctypes.c_size_t(len(memory)), PORTABLE))
done = 0


def steps(count: int, us: int) -> int:
    """In each step every GPU meets all the others, and then computes. Returns the number of steps so far."""
    global done
    for _ in range(count):
        at = [cells + (done * size + gpu) * CELL_BYTES for gpu in range(size)]
        for gpu, place in places.items():
            for other in range(size):
                if other != gpu:
                    place.meet(at[gpu], at[other])
            place.spin(us)
        for place in places.values():
            place.wait()
        done += 1
    return done


if __name__ == "__main__":
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(eval(line)), flush=True)
