"""What code loses, and at which call: modules and libraries of a few large kernels, of one, and of printf and malloc."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.granularity.driver import EMPTY, Gpu, Rows, alloc, cuda, function, launch, load, ok, ptr, u64

LOCAL_BYTES = 3
HEAD = ".version 6.0\n.target sm_50\n.address_size 64\n"
ENTRY = (
    ".visible .entry {name}(.param .u64 p) {{ .reg .u64 %a; .reg .f32 %f; ld.param.u64 %a, [p]; ld.global.f32 %f, [%a]; "
    "{body} st.global.f32 [%a], %f; ret; }}"
)


def text(kernels: int, instructions: int, variable_bytes: int = 0, prefix: str = "k") -> bytes:
    """PTX of so many kernels, k0, k1, ..., each of so many instructions that cannot be folded."""
    body = " ".join(f"fma.rn.f32 %f, %f, %f, 0f3F8{n % 4096:05X};" for n in range(instructions))
    variable = f".visible .global .align 4 .b8 big[{variable_bytes}];\n" if variable_bytes else ""
    entries = "\n".join(ENTRY.format(name=f"{prefix}{n}", body=body) for n in range(kernels))
    return (HEAD + variable + entries).encode() + b"\0"


def assembled(ptx: bytes) -> bytes:
    """The same as a cubin, by the toolkit. Raises CalledProcessError or FileNotFoundError."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "k.ptx"
        at.write_bytes(ptx.rstrip(b"\0"))
        subprocess.run(["nvcc", "-cubin", "-arch=sm_90", "-o", f"{folder}/k", str(at)], check=True, capture_output=True)
        return Path(folder, "k").read_bytes()


class Steps:
    """What each step lost, and how long it took, in one row's note."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.before, self.notes = gpu, gpu.free(), ""

    def take(self, name: str, step: Callable[[], object]) -> None:
        before, started = self.gpu.free(), time.perf_counter()
        answer = step()
        took_ms = (time.perf_counter() - started) * 1e3
        answered = f" answered {answer}" if isinstance(answer, int) and answer != 0 else ""
        self.notes += f"{name} {before - self.gpu.free()} ({took_ms:.2f} ms){answered}; "

    def lost(self) -> int:
        return self.before - self.gpu.free()


def _parameters(at: u64) -> object:
    return (ptr * 1)(c.cast(c.byref(at), ptr))


def _module(gpu: Gpu, rows: Rows, case: str, image: bytes, kernels: int, x: u64) -> None:
    steps, module, got = Steps(gpu), ptr(), []
    steps.take("load", lambda: cuda.cuModuleLoadData(c.byref(module), image))
    for n in range(kernels):
        steps.take(f"get k{n}", lambda n=n: got.append(function(module, f"k{n}".encode())))
    for n, kernel in enumerate(got):
        steps.take(f"launch k{n}", lambda kernel=kernel: launch(kernel, parameters=_parameters(x)))
    lost = steps.lost()
    cuda.cuModuleUnload(module)
    rows.add("code", f"module {case}", kernels, len(image), lost, steps.lost(), "", steps.notes)


def _library(gpu: Gpu, rows: Rows, case: str, image: bytes, kernels: int, x: u64) -> None:
    steps, library, got, made = Steps(gpu), ptr(), [], ptr()
    steps.take("load", lambda: cuda.cuLibraryLoadData(c.byref(library), image, None, None, 0, None, None, 0))
    count = c.c_uint()
    steps.take("count", lambda: cuda.cuLibraryGetKernelCount(c.byref(count), library))
    for n in range(kernels):
        kernel = ptr()
        steps.take(f"get k{n}", lambda n=n, k=kernel: cuda.cuLibraryGetKernel(c.byref(k), library, f"k{n}".encode()))
        got.append(kernel)
    local = c.c_int()
    steps.take("attribute k0", lambda: cuda.cuKernelGetAttribute(c.byref(local), LOCAL_BYTES, got[0], gpu.device))
    steps.take("function k0", lambda: cuda.cuKernelGetFunction(c.byref(made), got[0]))
    loaded = c.c_int(-1)
    steps.take("is k0 loaded", lambda: cuda.cuFuncIsLoaded(c.byref(loaded), made))
    steps.notes += f"(state {loaded.value}) "
    for n, kernel in enumerate(got):
        steps.take(f"launch k{n}", lambda kernel=kernel: launch(kernel, parameters=_parameters(x)))
    lost = steps.lost()
    cuda.cuLibraryUnload(library)
    rows.add("code", f"library {case}", kernels, len(image), lost, steps.lost(), "", steps.notes)


def code(rows: Rows) -> None:
    """When is code loaded, and how much is that, beside the image's size?"""
    mode = os.environ.get("CUDA_MODULE_LOADING", "default")
    gpu = Gpu()
    launch(function(load(EMPTY)))
    x = u64(alloc(4096))
    for kernels, instructions, variable in ((4, 65536, 0), (4, 4096, 0), (2, 200, 64 << 20), (1, 200, 0)):
        ptx = text(kernels, instructions, variable)
        images = {"ptx": ptx}
        try:
            images["cubin"] = assembled(ptx)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            rows.add("code", "cubin", kernels, len(ptx), "", "", "", str(error)[:100])
        for kind, image in images.items():
            case = f"{kind} of {kernels} x {instructions} instructions, variable {variable} loading={mode}"
            _module(gpu, rows, case, image, kernels, x)
            _library(gpu, rows, case, image, kernels, x)


def code_of_many(rows: Rows) -> None:
    """500 modules of one small kernel each, all different, loaded, got and launched one after another."""
    mode = os.environ.get("CUDA_MODULE_LOADING", "default")
    gpu = Gpu()
    launch(function(load(EMPTY)))
    x = u64(alloc(4096))
    image = assembled(text(1, 200))
    steps, modules = Steps(gpu), []
    steps.take("load 500", lambda: modules.extend(load(image) for _ in range(500)))
    got = []
    steps.take("get 500", lambda: got.extend(function(module, b"k0") for module in modules))
    steps.take("launch 500", lambda: [launch(kernel, parameters=_parameters(x)) for kernel in got])
    lost = steps.lost()
    for module in modules:
        cuda.cuModuleUnload(module)
    rows.add("code", f"500 modules of one kernel loading={mode}", 500, len(image), lost, steps.lost(), "", steps.notes)


def contexts(rows: Rows) -> None:
    """Each further context of a process, and the streams in it."""
    gpu = Gpu()
    launch(function(load(EMPTY)))
    for number in range(2, 5):
        steps, context = Steps(gpu), ptr()
        steps.take("create", lambda context=context: cuda.cuCtxCreate_v2(c.byref(context), 0, gpu.device))
        steps.take("first launch", lambda: launch(function(load(EMPTY))))
        lost = steps.lost()
        ok(cuda.cuCtxDestroy_v2(context), "cuCtxDestroy")
        ok(cuda.cuCtxSetCurrent(gpu.context), "cuCtxSetCurrent")
        rows.add("contexts", f"context {number}", 1, "", lost, steps.lost(), "", steps.notes)
