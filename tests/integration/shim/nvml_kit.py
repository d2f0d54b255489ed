"""The table of shim/src/views/nvml.def, NVIDIA's nvml.h, and a management library that has every function of it.

The double answers 0 to everything and counts the calls, but for what the tests read. Its devices are 1, the first GPU; 2, the
second; 3, one that is lost; 4, one whose UUID no version of this library can read.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.integration.shim.conftest import GPUS, ROOT

TABLE = ROOT / "shim/src/views/nvml.def"
HEADERS = sorted((ROOT / ".venv/lib").glob("python3*/site-packages/nvidia/*/include/nvml.h"))
LOST, UNREADABLE = 15, "MIG-GPU-0/1/0"


class Line(NamedTuple):
    rule: str
    """SCALED, OWN, REFUSED, DENIED or PASSES."""
    scope: str
    """DEVICE or ANYWHERE, of what is refused and denied; the reason, of what passes."""


@cache
def table() -> dict[str, Line]:
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", TABLE.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: list[tuple[str, Line]] = []
    for rule, body in re.findall(r"\b(SCALED|OWN|REFUSED|DENIED)\(((?:[^()]|\([^()]*\))*)\)", text):
        name, scope = (part.strip() for part in body.split(",", 1))
        found.append((name, Line(rule, scope if rule in {"REFUSED", "DENIED"} else "")))
    for reason, body in re.findall(r'\bPASSES\("([^"]*)",([^()]*)\)', text):
        found += [(name.strip(), Line("PASSES", reason)) for name in body.split(",")]
    assert len(found) == len(dict(found)), "a function has one line"
    return dict(found)


@cache
def functions(more: str = "") -> dict[str, list[str]]:
    """Of the newest nvml.h, its older forms too: the parameters of each function."""
    source = f'#define NVML_NO_UNVERSIONED_FUNC_DEFS\n#include "{HEADERS[-1]}"\n{more}'
    text = subprocess.run(["gcc", "-E", "-P", "-"], input=source, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\b(?:nvmlReturn_t|const char ?\*)\s*(nvml\w+)\s*\(([^()]*)\)", re.sub(r"\s+", " ", text))
    return {name: [parameter.strip() for parameter in body.split(",")] for name, body in found}


SPECIAL = f"""
#define _GNU_SOURCE
#include <string.h>
#include <stdlib.h>
#include <stdio.h>
int calls;
int double_calls(void) {{ int now = calls; calls = 0; return now; }}
int nvmlDeviceGetUUID(long device, char *uuid, unsigned length)
{{
    if (device == 3)
        return {LOST};
    snprintf(uuid, length, "%s", device == 1 ? "{GPUS[0]}" : device == 2 ? "{GPUS[1]}" : "{UNREADABLE}");
    return 0;
}}
static unsigned own(void) {{ const char *pid = getenv("OWN_PID"); return pid ? (unsigned)atoi(pid) : 0; }}
struct sample {{ unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; }};
int nvmlDeviceGetProcessUtilization(long device, struct sample *to, unsigned *count, unsigned long long since)
{{
    const unsigned have = 300, capacity = *count;
    if (getenv("NO_SAMPLES"))
        return 3;
    *count = have;
    if (to == NULL || capacity < have)
        return 7;
    for (unsigned i = 0; i < have; i++)
        to[i] = (struct sample){{i == 200 ? own() : 4000000 + i, 1, 10, 5, 20, 15}};
    return 0;
}}
struct info {{ unsigned long long at; unsigned pid, sm, memory, encoder, decoder, jpeg, flow; }};
struct infos {{ unsigned version, count; unsigned long long since; struct info *to; }};
int nvmlDeviceGetProcessesUtilizationInfo(long device, struct infos *all)
{{
    const unsigned have = 300, capacity = all->count;
    all->count = have;
    if (all->to == NULL || capacity < have)
        return 7;
    for (unsigned i = 0; i < have; i++)
        all->to[i] = (struct info){{1, i == 200 ? own() : 4000000 + i, 10, 5, 20, 15, 0, 0}};
    return 0;
}}
struct detail {{ unsigned pid; unsigned long long used; unsigned instance[2]; unsigned long long guarded; }};
struct details {{ unsigned version, mode, count; struct detail *to; }};
int nvmlDeviceGetRunningProcessDetailList(long device, struct details *all)
{{
    const unsigned have = 3, capacity = all->count;
    all->count = have;
    if (all->to == NULL || capacity < have)
        return 7;
    for (unsigned i = 0; i < have; i++)
        all->to[i] = (struct detail){{i == 2 ? own() : 4000000 + i, 1, {{0, 0}}, 0}};
    return 0;
}}
static int engine(unsigned *percent, unsigned *period) {{ *percent = 90; *period = 5; return 0; }}
int nvmlDeviceGetEncoderUtilization(long device, unsigned *percent, unsigned *period) {{ return engine(percent, period); }}
int nvmlDeviceGetDecoderUtilization(long device, unsigned *percent, unsigned *period) {{ return engine(percent, period); }}
int nvmlDeviceGetUtilizationRates(long device, unsigned *rates) {{ rates[0] = 80; rates[1] = 70; return 0; }}
int nvmlDeviceGetSupportedEventTypes(long device, unsigned long long *types) {{ *types = 0xff9f; return 0; }}
int nvmlGpmQueryDeviceSupport(long device, unsigned *support) {{ support[1] = 1; return 0; }}
struct field {{ unsigned id, scope; long long at, took; int type, rc; unsigned long long value; }};
int nvmlDeviceGetFieldValues(long device, int count, struct field *to)
{{
    for (int i = 0; i < count; i++) {{
        to[i].rc = 0;
        to[i].value = 7;
    }}
    return 0;
}}
int nvmlDeviceGetNeighbours(long device) {{ return calls++; }} /* of a later version */
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {{ snprintf(name, length, "%u", pid); return 0; }}
"""


def build_double(folder: Path) -> Path:
    """The folder that LD_LIBRARY_PATH names first."""
    special = set(re.findall(r"\bint (nvml\w+)\(", SPECIAL))
    plain = "".join(f"int {name}(void) {{ calls++; return 0; }}\n" for name in functions() if name not in special)
    (folder / "double.c").write_text(SPECIAL + plain)
    command = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libnvidia-ml.so.1", "-o", "libnvidia-ml.so.1", "double.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def fields() -> dict[int, str]:
    """NVML_FI_* by number."""
    text = HEADERS[-1].read_text()
    found = re.findall(r"#define NVML_FI_((?!MAX)\w+)\s+(\d+)\b", text)
    return {int(number): name for name, number in found}
