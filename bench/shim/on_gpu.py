"""The library on a real driver: what it holds, and what it costs. Needs a GPU, gcc, PyTorch, structlog and msgspec.

    python3 bench/shim/on_gpu.py OUT_FOLDER

Builds the library and the probe programs against the machine's own libcuda, serves a grant of LIMIT_MIB of the first GPU from
an arbiter in this process, and writes OUT_FOLDER/on_gpu.csv (check, value) and results-gpu.csv (as run.py). Exits 1 when a
check fails.
"""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from arbiter.container import Limits
from arbiter.server import Server
from vgpu.codec import grant_to_text
from vgpu.grant import Grant, GrantCard

ROOT = Path(__file__).parents[2]
MIB, LIMIT_MIB, ROUNDS = 2**20, 8192, 7

TORCH = """
import torch
def mib(n): return round(n / 2**20)
free, total = torch.cuda.mem_get_info()
print("total_mib", mib(total))
print("properties_total_mib", mib(torch.cuda.get_device_properties(0).total_memory))
kept = []
try:
    while True:
        kept.append(torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError:
    print("got_blocks_of_100_mib", len(kept))
del kept
torch.cuda.empty_cache()
x = torch.randn(2048, 2048, device="cuda")
print("works_after_oom", bool(torch.isfinite(x @ x).all()))
del x
torch.cuda.empty_cache()
"""

GRAPH = """
import torch
x = torch.randn(1024, 1024, device="cuda")
for _ in range(3): y = x @ x
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): y = x @ x
graph.replay(); torch.cuda.synchronize()
print("graph_right", bool(torch.allclose(y, x @ x)))
"""


def run(words: list[str], env: dict[str, str], text: str | None = None) -> str:
    done = subprocess.run(words, env=env, input=text, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode != 0:
        print(words, done.returncode, done.stdout, done.stderr, file=sys.stderr)
    if done.stderr:
        print(words[:1], done.stderr[-600:], file=sys.stderr)
    return done.stdout


def main() -> int:
    out = Path(sys.argv[1])
    build = Path(tempfile.mkdtemp(prefix="tg-"))
    cuda = next(p for p in run(["ldconfig", "-p"], dict(os.environ)).split() if p.endswith("/libcuda.so.1"))
    (build / "fake").mkdir()
    (build / "fake/libcuda.so.1").symlink_to(cuda)
    programs = [str(build / f"tests/probe-{route}") for route in ("direct", "dlsym", "procaddr")]
    make = ["make", "-s", "-C", str(ROOT / "shim"), f"BUILD={build}", "-o", "fake"]
    subprocess.run([*make, "lib", *programs, str(build / "tests/bench")], check=True)
    uuid = run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], dict(os.environ)).splitlines()[0]
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    (folder / "k").mkdir()
    (folder / "k/grant").write_text(grant_to_text(Grant("default", "a", "1", "main", (GrantCard(uuid, LIMIT_MIB),))))
    server = Server(folder, Limits(grace_s=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    off = {**os.environ, "TANGRAM_GRANT": str(folder / "k/grant")}
    on = {**off, "LD_PRELOAD": str(build / "libtangram.so")}
    rows, good = [], True
    rows.append(
        ("driver", run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], off).strip())
    )

    def check(name: str, found: object, expected: object) -> None:
        nonlocal good
        good = good and found == expected
        rows.append((name, found if found == expected else f"FAILED: {found}, expected {expected}"))
        print(*rows[-1], flush=True)

    for program in programs:
        route = program.rpartition("-")[2]
        for verb in ("alloc", "async", "pool", "create", "managed"):
            fill = "".join(f"{verb} {1024 * MIB} 0\n" for _ in range(9))
            answers = run([program], on, f"use 0\n{fill}info\ntotal 0\nfree 123456\n").splitlines()
            codes = [int(line.split()[0]) for line in answers[1:10]]
            check(f"{route}_{verb}_8_of_9_blocks", codes, [0] * 8 + [2])
            check(f"{route}_{verb}_info", answers[10], f"0 0 {LIMIT_MIB * MIB}")
            check(f"{route}_{verb}_total", answers[11], f"0 {LIMIT_MIB * MIB}")
            check(f"{route}_{verb}_free_of_unknown", answers[12], "1")
    for name, config in {
        "caching": "", "expandable": "expandable_segments:True", "malloc_async": "backend:cudaMallocAsync",
    }.items():  # fmt: skip
        env = on | ({"PYTORCH_CUDA_ALLOC_CONF": config} if config else {})
        said = dict(line.split() for line in run([sys.executable, "-c", TORCH], env).splitlines())
        check(f"torch_{name}_total_mib", said.get("total_mib"), str(LIMIT_MIB))
        check(f"torch_{name}_properties", said.get("properties_total_mib"), str(LIMIT_MIB))
        check(f"torch_{name}_works_after_oom", said.get("works_after_oom"), "True")
        rows.append((f"torch_{name}_blocks_of_100_mib", said.get("got_blocks_of_100_mib", "none")))
        print(*rows[-1], flush=True)
    check("torch_graph", run([sys.executable, "-c", GRAPH], on).strip(), "graph_right True")
    smi = run(["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"], on).strip()
    check("nvidia_smi_total", smi.split(",")[0], str(LIMIT_MIB))
    rows.append(("nvidia_smi_with_library", smi))
    container = server.containers["k"]
    check("leases_left_after_all_exited", container.ledger.leased_bytes(0), 0)

    seen: dict[bool, dict[str, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
    for _ in range(ROUNDS):
        for with_library, env in ((False, off), (True, on)):
            for words in ([str(build / "tests/bench")], [str(build / "tests/bench"), "start", "100"]):
                for line in run(words, env).splitlines():
                    seen[with_library][line.split(",")[0]].append(float(line.split(",")[1]))
    server.stop()
    thread.join()
    with (out / "on_gpu.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("check", "value"), *rows])
    with (out / "results-gpu.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["call", "without_ns", "with_ns", "added_ns", "without_low", "without_high", "with_low", "with_high"]
        )
        for name, without in seen[False].items():
            low, high = statistics.median(without), statistics.median(seen[True][name])
            spread = [min(without), max(without), min(seen[True][name]), max(seen[True][name])]
            table.writerow([name, *(round(value, 1) for value in (low, high, high - low, *spread))])
            print(f"{name:28} {low:12.1f} {high:12.1f} {high - low:+12.1f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
