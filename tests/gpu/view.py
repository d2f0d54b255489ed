"""What a container with a share sees of the GPU, by the driver's own nvidia-smi and by its own NVML; and what is taken for drawing.

The table of what each function answers is tested against a double on every machine (tests/integration/shim/test_nvml_table.py).
Here the driver's own library stands behind it, and the driver's own program in front.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.gpu.kit.machine import ROOT, Machine
from tests.gpu.kit.results import NotRun, Results

PART = "view"
LIMIT_MIB = 2048
TABLE = ROOT / "shim/src/views/nvml.def"
ANSWERS = {"REFUSED": 3, "DENIED": 4}
NOT_THERE = 13
"""NVML_ERROR_FUNCTION_NOT_FOUND: an older driver."""
DREW = "uses a graphics API"
OWN_PID, NEIGHBOURS_PID = 41_242, 52_342
"""Numbers in their own PID namespaces: found nowhere else in what nvidia-smi prints."""

REQUEST = """
import ctypes, json, os, sys
names = json.loads(sys.stdin.read())
ours = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
n = ctypes.CDLL("libnvidia-ml.so.1")
assert n.nvmlInit_v2() == 0
device, buffer = ctypes.c_void_p(), ctypes.create_string_buffer(65536)
uuid = os.environ["REQUESTED_UUID"].encode()
assert n.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device)) == 0
assert ours.nvmlDeviceGetMemoryInfo(device, buffer) == 0
total = int.from_bytes(buffer.raw[:8], "little")
assert total == int(os.environ["LIMIT_MIB"]) << 20, f"this GPU is not shared, and would be changed: {total} bytes"
buffer = ctypes.create_string_buffer(65536)
print(json.dumps({name: getattr(ours, name)(device, buffer, buffer, buffer, buffer, buffer) for name in names}))
"""


def rule_names(rule: str) -> list[str]:
    text = re.sub(r"/\*.*?\*/", "", TABLE.read_text(), flags=re.DOTALL)
    return sorted(re.findall(rf"^{rule}\((nvml\w+),", text, re.MULTILINE))


def _table(machine: Machine, results: Results) -> None:
    """Refused and denied without the driver: nothing here can change the GPU, whatever the buffer is."""
    key = machine.grant(LIMIT_MIB)
    env = machine.env(key, REQUESTED_UUID=machine.uuid, LIMIT_MIB=str(LIMIT_MIB))
    for rule, answer in ANSWERS.items():
        names = rule_names(rule)
        done = subprocess.run(
            [sys.executable, "-c", REQUEST],
            env=env,
            input=json.dumps(names),
            capture_output=True,
            text=True,
            check=False,
        )
        results.check(f"{rule}: the program's exit", 0, done.returncode)
        if done.returncode:
            results.fact("what it printed", done.stderr.strip()[-300:])
            continue
        seen: dict[str, int] = json.loads(done.stdout)
        other = {name: rc for name, rc in seen.items() if rc not in (answer, NOT_THERE)}
        results.check(f"{rule}: {len(names)} functions, answers other than {answer}", {}, other)
        results.fact(f"{rule}: functions that this driver lacks", sum(rc == NOT_THERE for rc in seen.values()))


def in_namespace(pid: int) -> tuple[str, ...]:
    """In front of a program's words: it runs in a PID namespace of its own, as in a container, with that number there. nvidia-smi also reads
    tables of NVML that have no names; in those the driver itself hides the processes of other PID namespaces."""
    numbered = f'echo {pid - 1} > /proc/sys/kernel/ns_last_pid; "$@"; exit $?'
    return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", numbered, "sh")


def pids_of(inside: int) -> list[int]:
    """Numbers on this machine of the processes that have that number in a namespace of their own."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if re.search(rf"^NSpid:.*\s{inside}$", status.read_text(), re.MULTILINE):
                found.append(int(status.parent.name))
    return found


def _smi(machine: Machine, results: Results) -> None:
    smi = str(machine.build / "fake/nvidia-smi") if machine.fake else "nvidia-smi"
    key = machine.grant(LIMIT_MIB)
    mine = machine.container(key, under=in_namespace(OWN_PID))
    theirs = machine.container(machine.grant(LIMIT_MIB), under=in_namespace(NEIGHBOURS_PID))
    neighbours = "|".join(str(pid) for pid in {theirs.pid, *pids_of(NEIGHBOURS_PID), NEIGHBOURS_PID})
    (inside,) = pids_of(OWN_PID)
    assert mine.pid != inside
    enter = ["nsenter", f"--target={inside}", "--pid", "--mount"]
    forms = [[], ["--query-gpu=memory.total", "--format=csv,noheader,nounits"], ["-L"]]
    if not machine.fake:
        forms += [
            ["-q"],
            ["pmon", "-c", "1"],
            ["dmon", "-c", "1"],
            ["--query-compute-apps=pid", "--format=csv,noheader"],
        ]
    for words in forms:
        done = subprocess.run(
            [*enter, smi, *words], env=machine.env(key), capture_output=True, text=True, check=False, timeout=60
        )
        name = " ".join(["nvidia-smi", *words])
        results.check(f"{name}: exit", 0, done.returncode)
        results.check(f"{name}: names the neighbour", False, re.search(rf"\b({neighbours})\b", done.stdout) is not None)
        if "--query-gpu=memory.total" in words:
            results.check(f"{name}", str(LIMIT_MIB), done.stdout.split("\n")[0].strip())
        if not words:
            results.check(f"{name}: names its own process", True, re.search(rf"\b{OWN_PID}\b", done.stdout) is not None)
    machine.end_containers()


def _drawing(machine: Machine, results: Results) -> None:
    """CUDA alone is not taken for a graphics API; a program of one is, where there is one."""
    container = machine.container(machine.grant(LIMIT_MIB))
    results.check("CUDA: a block", [0], container.request("take", "sync", 1 << 20))
    container.request("end_context")
    container.end()
    results.check("CUDA alone is taken for drawing", False, DREW in container.errors())
    key = machine.grant(LIMIT_MIB)
    try:
        done = subprocess.run(
            ["vulkaninfo"], env=machine.env(key), capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        raise NotRun("vulkaninfo is not installed") from None
    results.fact("vulkaninfo: exit", done.returncode)
    results.fact("vulkaninfo is taken for drawing", DREW in done.stderr)


def _unknown(machine: Machine, results: Results) -> None:
    """Functions that the driver's library exports and no line speaks of: passed on. For the next version's table."""
    library = machine.build / "fake/libnvidia-ml.so.1" if machine.fake else _where("libnvidia-ml.so.1")
    listed = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise NotRun(f"nm: {listed.stderr.strip()[-200:]}")
    exported = set(re.findall(r" T (nvml\w+)", listed.stdout))
    known = set(re.findall(r"\bnvml\w+", re.sub(r"/\*.*?\*/", "", TABLE.read_text(), flags=re.DOTALL)))
    results.check("functions that the driver exports", True, len(exported) > 50)
    results.fact("of them without a line in the table", " ".join(sorted(exported - known)))


def _where(name: str) -> str:
    program = f"import ctypes; ctypes.CDLL({name!r}); print([l.split()[-1] for l in open('/proc/self/maps') if {name[:-2]!r} in l][0])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


CASES: dict[str, Callable[[Machine, Results], None]] = {
    "what is refused and denied": _table,
    "nvidia-smi": _smi,
    "what is taken for drawing": _drawing,
    "functions without a line": _unknown,
}


def run_case(machine: Machine, results: Results, name: str) -> None:
    """Any user."""
    with results.one(PART, name):
        CASES[name](machine, results)
