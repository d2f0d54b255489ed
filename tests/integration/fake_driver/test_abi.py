"""The fake's ABI is NVIDIA's: its sources are compiled against NVIDIA's own headers, too, and compared.

Compiled against cuda.h, every exported function must match a prototype there (-Wmissing-prototypes), and the machine code
must be the same as with our own header: then every value and layout that the code uses is the same.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
from pathlib import Path

import pynvml
import pytest

from tests.built import REPOSITORY, fake_build

from .conftest import CUDA_INCLUDE

FAKE = REPOSITORY / "shim" / "fake"
NVML_HEADER = CUDA_INCLUDE / "nvml.h"
FLAGS = [
    "-std=c11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
]
INCLUDES = [f"-I{FAKE}", f"-I{FAKE}/common", f"-I{FAKE}/nvml"]
AGAINST_NVIDIA = ["-DFAKE_WITH_NVIDIA_HEADER", "-Wmissing-prototypes", "-isystem", str(CUDA_INCLUDE)]


def machine_code(source: Path, extra: list[str], folder: Path) -> str:
    """Everything in an object file but its name."""
    target = folder / f"{source.parent.name}-{source.stem}.o"
    built = subprocess.run(
        ["gcc", *FLAGS, *INCLUDES, *extra, "-c", "-o", target, source], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    dump = ["objdump", "-d", "-r", "-s", target]
    text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    return re.sub(r"^.*file format.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("source", sorted((FAKE / "cuda").glob("*.c")), ids=lambda path: path.stem)
def test_cuda_functions_match_nvidias_prototypes_values_and_layouts(source, tmp_path):
    assert machine_code(source, AGAINST_NVIDIA, tmp_path) == machine_code(source, [], tmp_path)


def exported(library: str) -> set[str]:
    listing = ["nm", "-D", "--defined-only", fake_build() / library]
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in lines}


def test_every_exported_cuda_symbol_is_declared_by_nvidia():
    source = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"
    command = ["gcc", "-E", "-P", "-isystem", CUDA_INCLUDE, "-"]
    header = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    declared = set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", header))
    assert exported("libcuda.so.1") <= declared
    assert len(exported("libcuda.so.1")) > 250


def test_versions_of_the_lookup_table_are_those_of_nvidias_typedefs():
    typedefs = (CUDA_INCLUDE / "cudaTypedefs.h").read_text()
    known = set(re.findall(r"\bPFN_(\w+_v\d+(?:_ptds|_ptsz)?)\)", typedefs))
    table = re.findall(
        r"^(S|PTDS|PTSZ)\((\w+), (\d+), \w+\)$", (FAKE / "cuda" / "symbols.def").read_text(), re.MULTILINE
    )
    assert len(table) > 250
    ours = {f"{name}_v{version}" + ("" if kind == "S" else f"_{kind.lower()}") for kind, name, version in table}
    # Of CUDA 12's two ways to instantiate, the typedefs know the first by the older name.
    assert ours - known <= {"cuGraphInstantiateWithFlags_v11040"}


STRUCTURES = {
    "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
    "nvmlMemory_t": pynvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
    "nvmlBAR1Memory_t": pynvml.c_nvmlBAR1Memory_t,
    "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    "nvmlProcessInfo_v2_t": pynvml.c_nvmlProcessInfo_v2_t,
    "nvmlProcessUtilizationSample_t": pynvml.c_nvmlProcessUtilizationSample_t,
    "nvmlDeviceAttributes_t": pynvml.c_nvmlDeviceAttributes,
    "nvmlEventData_t": pynvml.c_nvmlEventData_t,
    "nvmlGpuInstanceProfileInfo_t": pynvml.c_nvmlGpuInstanceProfileInfo_t,
    "nvmlGpuInstanceProfileInfo_v2_t": pynvml.c_nvmlGpuInstanceProfileInfo_v2_t,
    "nvmlGpuInstancePlacement_t": pynvml.c_nvmlGpuInstancePlacement_t,
    "nvmlGpuInstanceInfo_t": pynvml.c_nvmlGpuInstanceInfo_t,
    "nvmlComputeInstanceProfileInfo_t": pynvml.c_nvmlComputeInstanceProfileInfo_t,
    "nvmlComputeInstanceInfo_t": pynvml.c_nvmlComputeInstanceInfo_t,
    "nvmlFieldValue_t": pynvml.c_nvmlFieldValue_t,
}


def test_nvml_structures_are_laid_out_as_pynvmls(tmp_path):
    """Sizes, and the offset of every field that pynvml and we call by the same name."""
    header = (FAKE / "nvml" / "fake_nvml.h").read_text()
    ours = layout_of(
        {
            name: [field for field, *_ in structure._fields_ if re.search(rf"\b{field}\b", header)]
            for name, structure in STRUCTURES.items()
        },
        tmp_path,
    )
    for name, structure in STRUCTURES.items():
        assert ours[name][""] == ctypes.sizeof(structure), name
        for field, offset in ours[name].items():
            if field:
                assert offset == getattr(structure, field).offset, f"{name}.{field}"


def layout_of(fields: dict[str, list[str]], folder: Path) -> dict[str, dict[str, int]]:
    lines = []
    for name, members in fields.items():
        lines.append(f'printf("%s[\\"{name}\\", \\"\\", %zu]", at++ ? ", " : "", sizeof({name}));')
        lines += [f'printf(", [\\"{name}\\", \\"{m}\\", %zu]", offsetof({name}, {m}));' for m in members]
    body = "\n".join(lines)
    program = f'#include "fake_nvml.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {{ int at = 0; printf("[");\n{body}\nprintf("]"); }}'
    target = folder / "layout"
    subprocess.run(["gcc", *INCLUDES, "-x", "c", "-o", target, "-"], input=program, text=True, check=True)
    found: dict[str, dict[str, int]] = {}
    for name, field, number in json.loads(subprocess.run([target], capture_output=True, text=True, check=True).stdout):
        found.setdefault(name, {})[field] = number
    return found


def test_nvml_constants_are_pynvmls():
    header = (FAKE / "nvml" / "fake_nvml.h").read_text()
    constants = re.findall(r"\b(NVML_\w+) = (\d+)|#define ((?:NVML_|nvmlEvent)\w+) (0x[0-9a-f]+|\d+)", header)
    compared = 0
    for name, value, macro, macro_value in constants:
        theirs = getattr(pynvml, name or macro, None)
        if theirs is not None:
            compared += 1
            assert theirs == int((value or macro_value).removesuffix("ll"), 0), name or macro
    assert compared > 40


def test_pynvml_requests_only_for_symbols_of_nvml_and_finds_the_newest():
    requested = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(pynvml.__file__).read_text()))
    for symbol in exported("libnvidia-ml.so.1"):
        newer = any(
            f"{re.sub(r'_v[23]$', '', symbol)}{suffix}" in requested for suffix in ("", "_v2", "_v3", "V", "WithFlags")
        )
        assert newer or re.sub(r"_v2$", "", symbol) + "WithFlags" in requested, symbol


if NVML_HEADER.exists():

    @pytest.mark.parametrize("source", sorted((FAKE / "nvml").glob("*.c")), ids=lambda path: path.stem)
    def test_nvml_functions_match_nvidias_prototypes_values_and_layouts(source, tmp_path):
        assert machine_code(source, AGAINST_NVIDIA, tmp_path) == machine_code(source, [], tmp_path)
