"""The library and the arbiter on a real GPU, without Kubernetes: PyTorch limited to a grant, as root and as user `nobody`.

    sudo env PYTHONPATH=. python3 tests/gpu/library_check.py --library libtangram.so --csv results.csv

Starts an arbiter over a folder of its own, writes one grant a case, and runs PyTorch in a child with the library preloaded. Each row is one
fact with what was expected and what was seen; exit status 1 when any of them differs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MIB = 2**20

CHILD = """
import json, os, sys
import torch
MIB = 2**20
out = {"uid": os.getuid()}
free, total = torch.cuda.mem_get_info()
out["total_mib"], out["free_mib"] = total // MIB, free // MIB
out["properties_mib"] = torch.cuda.get_device_properties(0).total_memory // MIB
held = []
try:
    while len(held) < 400:
        held.append(torch.empty(512 * MIB, dtype=torch.uint8, device="cuda").fill_(1))
    out["error"] = "none"
except torch.OutOfMemoryError as error:
    out["error"] = "torch.OutOfMemoryError"
out["held_mib"] = 512 * len(held)
torch.cuda.synchronize()
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
out["nvml_total_mib"] = pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB
print(json.dumps(out), flush=True)
sys.stdin.readline()
del held
torch.cuda.empty_cache()
x = torch.ones(1024, 1024, device="cuda")
print(json.dumps({"recovered": float((x @ x).sum().item()) == 1024.0 ** 3}), flush=True)
sys.stdin.readline()
"""


def gpu_uuid() -> str:
    """Of the first GPU."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()[0]


def driver_mib(pid: int) -> int:
    """Memory of one process in the driver's own accounting."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line]
    return sum(int(used) for at, used in rows if int(at) == pid)


@contextlib.contextmanager
def arbiter(root: Path) -> Iterator[None]:
    """An arbiter that serves the grants under `root`."""
    env = {**os.environ, "TANGRAM_ARBITER_GRANTS_DIR": str(root / "grants")}
    process = subprocess.Popen([sys.executable, "-m", "arbiter"], env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def write_grant(root: Path, name: str, uuid: str, mib: int) -> Path:
    """A grant folder as the device plugin makes it."""
    folder = root / "grants" / name
    folder.mkdir(parents=True)
    text = f"tangram-grant 1\npod gpu/{name}\nuid {name}\ncontainer main\nclass standard\nlevel 2\ncard {uuid} mib={mib} core_percent=0\nend\n"
    (folder / "grant").write_text(text)
    (folder / "grant").chmod(0o444)
    deadline = time.monotonic() + 10
    while not (folder / "arbiter.sock").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder}/arbiter.sock: the arbiter did not make it within 10 s")
        time.sleep(0.01)
    return folder


def case(root: Path, library: Path, uuid: str, mib: int, user: int) -> list[tuple[str, str, str, bool]]:
    """(case, fact, seen, right?) rows of one grant and one user."""
    name = f"{mib}-{user}"
    folder = write_grant(root, name, uuid, mib)
    env = {**os.environ, "LD_PRELOAD": str(library), "TANGRAM_GRANT": str(folder / "grant"), "HOME": "/tmp"}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=user,
        group=user,
        extra_groups=[],
    )
    assert child.stdin
    assert child.stdout
    seen = json.loads(child.stdout.readline())
    used_mib = driver_mib(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    recovered = json.loads(child.stdout.readline())["recovered"]
    child.stdin.write("\n")
    child.stdin.close()
    status = child.wait(60)
    label = f"{mib} MiB, uid {user}"
    return [
        (label, "torch.cuda.mem_get_info total MiB", str(seen["total_mib"]), seen["total_mib"] == mib),
        (label, "device properties total MiB", str(seen["properties_mib"]), seen["properties_mib"] == mib),
        (label, "NVML total MiB", str(seen["nvml_total_mib"]), seen["nvml_total_mib"] == mib),
        (label, "error past the grant", seen["error"], seen["error"] == "torch.OutOfMemoryError"),
        (label, "MiB held when refused", str(seen["held_mib"]), mib - 1024 <= seen["held_mib"] <= mib),
        (label, "driver's own MiB for the process", str(used_mib), 0 < used_mib <= mib + 1024),
        (label, "works after the error", str(recovered), bool(recovered)),
        (label, "exit status", str(status), status == 0),
    ]


def main() -> int:
    """Run all cases and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="libtangram.so")
    parser.add_argument("--csv", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    uuid = gpu_uuid()
    rows: list[tuple[str, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        library = root / "libtangram.so"
        shutil.copy(arguments.library, library)
        (root / "grants").mkdir()
        with arbiter(root):
            for mib in (8192, 30720):
                for user in (0, 65534):
                    rows += case(root, library, uuid, mib, user)
    for row in rows:
        print(*row, sep=" | ")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as out:
            csv.writer(out).writerows([("case", "fact", "seen", "right"), *rows])
    return 0 if all(row[3] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
