"""Modules, libraries and kernels, for expressions of gpu.py."""

from __future__ import annotations

from ctypes import byref, c_void_p

from gpu_driver import cuda


def module(*variables: str, way: str = "cuModuleLoadData") -> list[int]:
    """Of PTX with these variables: `.b8 name[4]`."""
    image = "".join([".version 8.0\n.target sm_80\n", *(f".visible .global {one};\n" for one in variables)]).encode()
    made = c_void_p()
    more = {"cuModuleLoadDataEx": [0, None, None], "cuLibraryLoadData": [None, None, 0, None, None, 0]}.get(way, [])
    return [getattr(cuda, way)(byref(made), image, *more), made.value or 0]


def module_bytes(image: str) -> list[int]:
    """An image in hexadecimal."""
    made = c_void_p()
    return [cuda.cuModuleLoadData(byref(made), bytes.fromhex(image)), made.value or 0]


def module_file(path: str) -> list[int]:
    made = c_void_p()
    return [cuda.cuModuleLoad(byref(made), path.encode()), made.value or 0]


def module_end(made: int, way: str = "cuModuleUnload") -> list[int]:
    return [getattr(cuda, way)(c_void_p(made))]


def deep(local: int, stream: int = 0) -> list[int]:
    """Launches a kernel of that much local memory."""
    made, function = c_void_p(), c_void_p()
    image = f"//fake deep us=0 local={local}\n.visible .entry deep() {{ ret; }}\n".encode()
    rc = cuda.cuModuleLoadData(byref(made), image) or cuda.cuModuleGetFunction(byref(function), made, b"deep")
    return [rc or cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, c_void_p(stream), None, None)]


def code(kibibytes: int, variable_bytes: int = 4, way: str = "cuModuleLoadData") -> list[int]:
    """Of PTX whose text is so long, with one kernel `f`."""
    text = f".version 8.0\n.target sm_80\n.global .b8 v[{variable_bytes}];\n.visible .entry f() {{ ret; }}\n"
    made = c_void_p()
    more = {"cuLibraryLoadData": [None, None, 0, None, None, 0]}.get(way, [])
    image = (text + "// " + "x" * (kibibytes * 1024 - len(text) - 3)).encode()
    return [getattr(cuda, way)(byref(made), image, *more), made.value or 0]


def function_of(module: int) -> list[int]:
    """Its handle."""
    found = c_void_p()
    return [cuda.cuModuleGetFunction(byref(found), c_void_p(module), b"f"), found.value or 0]


def kernel_of(library: int) -> list[int]:
    """Its handle."""
    found = c_void_p()
    return [cuda.cuLibraryGetKernel(byref(found), c_void_p(library), b"f"), found.value or 0]


def unload(library: int) -> list[int]:
    return [cuda.cuLibraryUnload(c_void_p(library))]


def launch_once(function: int) -> list[int]:
    """One thread of it."""
    return [cuda.cuLaunchKernel(c_void_p(function), 1, 1, 1, 1, 1, 1, 0, None, None, None)]
