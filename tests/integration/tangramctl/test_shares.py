"""The shares and the limits of a run, what is refused, and what it waits for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tangramctl.conftest import (
    LARGE,
    LARGE_MIB,
    MIB,
    OUT_OF_MEMORY,
    ROOT,
    SMALL,
    SMALL_MIB,
    Ctl,
    arbiters,
    wait_for,
)


def test_a_run_sees_a_gpu_of_the_size_requested_and_cannot_take_more(ctl: Ctl) -> None:
    probe = ctl.probe("1000Mi")
    assert probe.info_mib() == (1000, 1000)
    assert probe.alloc(900) == 0
    assert probe.alloc(101) == OUT_OF_MEMORY
    assert probe.alloc(100) == 0
    probe.end()
    assert probe.process.returncode == 0


def test_two_runs_share_a_gpu_and_each_has_its_own_limit(ctl: Ctl) -> None:
    one, other = ctl.probe("2Gi", ["--gpu", 1]), ctl.probe("1500Mi", ["--gpu", 1])
    assert one.alloc(2048) == 0
    assert other.alloc(1501) == OUT_OF_MEMORY
    assert other.alloc(1500) == 0
    assert one.alloc(1) == OUT_OF_MEMORY
    entries = sorted(ctl.ps(), key=lambda entry: -entry["gpus"][0]["limit_bytes"])
    assert [entry["gpus"][0]["limit_bytes"] // MIB for entry in entries] == [2048, 1500]
    assert [entry["gpus"][0]["leased_bytes"] // MIB for entry in entries] == [2048, 1500]
    assert [[process["pid"] for process in entry["processes"]] for entry in entries] == [
        [one.process.pid],
        [other.process.pid],
    ]


def test_what_cuda_itself_takes_is_inside_the_share(ctl: Ctl) -> None:
    ctl.gpus.write_text("gpu t4 memory_mib=4096 context_mib=100\n")
    probe = ctl.probe("1600Mi")
    free = 1600 - 100 - 1600 // 16  # a sixteenth is kept for code that it loads later
    wait_for(lambda: probe.info_mib() == (free, 1600))
    assert probe.alloc(free + 1) == OUT_OF_MEMORY
    assert probe.alloc(free) == 0

    def amounts() -> list[int]:
        (gpu,) = ctl.ps()[0]["gpus"]
        return [gpu[f"{name}_bytes"] // MIB for name in ("limit", "leased", "context")]

    wait_for(lambda: amounts() == [1600, free, 100])
    environment = Path(f"/proc/{ctl.keeper()['arbiter_pid']}/environ").read_bytes().split(b"\0")
    root = ctl.machine() / "driver"
    assert bytes(f"TANGRAM_ARBITER_DRIVER_ROOT={root}", "ascii") in environment  # and not the machine's own driver
    assert (root / "lib/libnvidia-ml.so.1").exists()


TWO_PROBES = f"""
import subprocess, sys

def probe():
    return subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def request(process, line):
    process.stdin.write(line + "\\n")
    process.stdin.flush()
    return process.stdout.readline().split()[0]

one, other = probe(), probe()
answers = [request(one, "use 0"), request(other, "use 0"), request(one, "alloc {700 * MIB}"), request(other, "alloc {301 * MIB}")]
print(*answers, request(other, "alloc {300 * MIB}"))
"""


def test_processes_of_one_run_share_its_limit(ctl: Ctl) -> None:
    done = ctl.run("1000Mi", sys.executable, "-c", TWO_PROBES, ctl.build / "tests/probe-direct")
    assert done.stdout.split() == ["0", "0", "0", str(OUT_OF_MEMORY), "0"], done.stderr


BYPASS = """
import ctypes, sys
cuda, context, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 == cuda.cuCtxSetCurrent(context)
assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1500 << 20)) == 0
print("allocated", flush=True)
sys.stdin.read()
"""


def test_a_program_of_a_run_that_goes_around_the_library_is_seen(ctl: Ctl) -> None:
    within = ctl.probe("2Gi")
    outside = ctl.start("1000Mi", "env", "-u", "LD_PRELOAD", sys.executable, "-c", BYPASS)
    assert outside.stdout is not None
    assert outside.stdout.readline() == "allocated\n"

    def over() -> list[int]:
        return [entry["pid"] for entry in ctl.ps() if entry["over"]]

    wait_for(lambda: over() == [outside.pid])
    (entry,) = [entry for entry in ctl.ps() if entry["over"]]
    assert [process["pid"] for process in entry["processes"]] == [outside.pid]
    assert within.alloc(2048) == 0, "the other run is as it was"
    outside.communicate()


GPU_PROGRAM = Path(__file__).parents[1] / "gputime/program.py"


def test_a_run_is_held_to_its_part_of_a_gpus_time(ctl: Ctl) -> None:
    busy = ctl.start("1Gi", sys.executable, GPU_PROGRAM, options=["--gpu-core", 25])
    assert busy.stdin is not None
    busy.stdin.write("[launch(2000) or wait() for _ in range(10**6)]\n")
    busy.stdin.flush()

    def gpu_time() -> dict[str, Any]:
        found: list[dict[str, Any]] = [entry["turn"] for entry in ctl.ps()]
        return found[0] if found and found[0] else {"suspends": 0}

    wait_for(lambda: gpu_time()["suspends"] >= 10)
    assert gpu_time()["mode"] == "suspend"
    assert gpu_time()["capped_s"] > 0
    assert gpu_time()["trouble"] == "", "the driver was tried before the run, and suspends"


def test_of_the_gpus_with_enough_free_memory_the_one_with_the_least_is_chosen(ctl: Ctl) -> None:
    for amount, gpu in (("1Gi", SMALL), ("3584Mi", LARGE), ("3Gi", SMALL)):
        run = ctl.start(amount, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read x")
        assert run.stdout is not None
        assert run.stdout.readline().strip() == gpu


def test_without_enough_free_memory_each_gpu_is_named_with_what_is_free(ctl: Ctl) -> None:
    probe = ctl.probe("3Gi", ["--gpu", SMALL, "--gpu-core", 60])
    full = ctl.run("2Gi", "true", options=["--gpu", "1"])
    assert full.returncode == 75
    assert (
        f"no GPU has 2048 MiB free:\n  GPU 1 (Tesla T4, {SMALL}): 1024 of {SMALL_MIB} MiB and 40 % free\n"
        in full.stderr
    )
    assert f"3072 MiB, 60 % granted to pid {probe.process.pid}, " in full.stderr
    busy = ctl.run("1Gi", "true", options=["--gpu", "1", "--gpu-core", "50"])
    assert busy.returncode == 75
    assert "no GPU has 1024 MiB and 50 % of its time free" in busy.stderr


def test_more_than_any_gpu_has_is_a_bad_option_even_when_reported_to_wait(ctl: Ctl) -> None:
    done = ctl.run("17Gi", "true", options=["--wait"])
    assert done.returncode == 2
    assert f"--gpu-mem is 17408 MiB: it must be 1 to {LARGE_MIB} MiB" in done.stderr


def test_a_waiting_run_starts_when_memory_is_free(ctl: Ctl) -> None:
    first = ctl.probe("16Gi")
    second = ctl.start("10Gi", "echo", "there", options=["--wait"])
    assert second.stderr is not None
    assert "waiting: no GPU has 10240 MiB free" in second.stderr.readline()
    assert second.poll() is None
    first.end()
    assert second.communicate(timeout=30)[0] == "there\n"
    assert second.returncode == 0


def test_memory_that_other_processes_use_is_not_free(ctl: Ctl) -> None:
    assert ctl.run("1Gi", "true").returncode == 0
    env = {
        "LD_LIBRARY_PATH": str(ctl.build / "fake"),
        "TANGRAM_FAKE_DRIVER": str(ctl.machine() / "driver.sock"),
        "CUDA_VISIBLE_DEVICES": "1",
    }
    program = [str(ctl.build / "tests/probe-direct")]
    with subprocess.Popen(program, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outside:
        assert outside.stdin is not None
        assert outside.stdout is not None
        for line, code in (("use 0\n", "0"), (f"alloc {3000 * MIB}\n", "0")):
            outside.stdin.write(line)
            outside.stdin.flush()
            assert outside.stdout.readline().split()[0] == code
        full = ctl.run("2Gi", "true", options=["--gpu", "1"])
        assert full.returncode == 75
        assert "3000 MiB used by processes outside tangramctl" in full.stderr
        outside.stdin.close()
    assert ctl.run("2Gi", "true", options=["--gpu", "1"]).returncode == 0


def test_memory_of_a_run_whose_folder_was_taken_away_is_not_free(ctl: Ctl) -> None:
    probe = ctl.probe("3Gi", ["--gpu", "1"])
    assert probe.alloc(3000) == 0
    (entry,) = ctl.ps()
    shutil.rmtree(ctl.machine() / "grants" / entry["key"])
    full = ctl.run("2Gi", "true", options=["--gpu", "1"])
    assert full.returncode == 75
    assert "3000 MiB used by processes outside tangramctl" in full.stderr


def test_a_gpu_that_the_caller_hides_is_not_chosen(ctl: Ctl) -> None:
    ctl.env["CUDA_VISIBLE_DEVICES"] = LARGE[:12]
    assert ctl.run("1Gi", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout.strip() == LARGE
    ctl.env["CUDA_VISIBLE_DEVICES"] = ""
    hidden = ctl.run("1Gi", "true")
    assert (hidden.returncode, "hides every GPU" in hidden.stderr) == (69, True)


def test_without_a_gpu_the_error_is_one_sentence(ctl: Ctl) -> None:
    done = ctl.call("run", "--gpu-mem", "8Gi", "--", "true")
    assert done.returncode == 69
    assert done.stderr.startswith("tangramctl: no NVIDIA GPU can be used on this machine (")
    assert done.stderr.endswith(f"give --fake {ROOT}/examples/04-no-cluster/gpus\n")
    assert done.stderr.count("\n") == 1
    assert arbiters(ctl.folder) == []


def test_a_run_inside_a_run_is_refused(ctl: Ctl) -> None:
    inner = ctl.line("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi", "--", "true")
    done = ctl.run("2Gi", *inner)
    assert done.returncode == 2
    assert "this is inside a run already" in done.stderr


def test_runs_with_the_same_description_share_its_gpus_and_with_another_do_not(ctl: Ctl, tmp_path: Path) -> None:
    ctl.probe("16Gi")
    assert ctl.run("16Gi", "true").returncode == 75
    other = tmp_path / "gpus"
    other.write_text(ctl.gpus.read_text())
    assert ctl.call("run", "--fake", other, "--gpu-mem", "16Gi", "--", "true").returncode == 0
    entries = ctl.ps()
    assert [entry["fake"] for entry in entries] == [str(ctl.gpus)]


@pytest.mark.parametrize(
    ("text", "error"),
    [("gpu t4\nkard t4\n", ', line 2: the first word is "kard"'), ("", ", which describes no GPU; it must be a")],
)
def test_a_description_that_is_none_is_refused_with_the_drivers_sentence(ctl: Ctl, text: str, error: str) -> None:
    ctl.gpus.write_text(text)
    done = ctl.run("1Gi", "true")
    assert done.returncode == 2
    assert f"--fake is {ctl.gpus}{error}" in done.stderr
    assert "/s/fake/" not in done.stderr


def test_a_description_that_is_no_file_is_refused_and_not_waited_for(ctl: Ctl) -> None:
    pipe = ctl.folder / "pipe"
    os.mkfifo(pipe)
    done = ctl.call("run", "--fake", pipe, "--gpu-mem", "1Gi", "--", "true", timeout=20)
    assert done.returncode == 2
    assert f"--fake is {pipe}: no regular file; it must be a description of GPUs" in done.stderr


def test_nvidia_smi_on_fake_gpus_is_theirs(ctl: Ctl) -> None:
    done = ctl.run("1Gi", "nvidia-smi", "-L")
    assert done.returncode == 0
    assert SMALL in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--gpu-mem", "8GB"], "'8GB' is not a Kubernetes quantity"),
        (["--gpu-mem", "0"], "--gpu-mem is 0: it must be a whole number, 1 or more"),
        (["--gpu-mem", "1500"], "the largest here) has; a plain number is GiB: write 1500Mi for MiB"),
        (["--gpu-mem", "1Gi", "--gpu-core", "130"], "--gpu-core is 130: it must be a whole number, 0 to 100"),
        (["--gpu-mem", "1Gi", "--gpu-core", "x"], "--gpu-core is 'x': it must be a whole number, 0 to 100"),
        (["--gpu-mem", "1Gi", "--idle-s", "999999"], "--idle-s is 999999: it must be a number, 0 to 86400"),
        (["--gpu-mem", "1Gi", "--idle-s", "nan"], "--idle-s is nan: it must be a number, 0 to 86400"),
        (["--gpu-mem", "1Gi", "--level", "x"], "--level is 'x': it must be a whole number, 0 to 4"),
        (["--gpu-mem", "1Gi", "--class", "urgent"], "--class is 'urgent': it must be one of latency-critical, "),
        (["--gpu-mem", "1Gi", "--level", "5"], "--level is 5: it must be a whole number, 0 to 4"),
        (
            ["--gpu-mem", "1Gi", "--gpu", "2"],
            "--gpu is '2', which names no GPU: it must be the index or UUID of one of 0",
        ),
        (["--gpu-mem", "1Gi", "--library", "/nowhere"], "--library is /nowhere: it must be a file"),
    ],
)
def test_a_bad_value_is_named_with_its_range(ctl: Ctl, options: list[str], sentence: str) -> None:
    done = ctl.call("run", "--fake", ctl.gpus, *options, "--", "true")
    assert done.returncode == 2
    assert sentence in done.stderr


def test_top_shows_what_the_sensors_of_a_gpu_show(ctl: Ctl) -> None:
    ctl.probe("1Gi", options=["--gpu", 0])
    control = [ctl.build / "fake/nvidia-fake-driverd", "ctl", "--socket", ctl.machine() / "driver.sock"]
    for name, value in (("power_mw", 69_800), ("clock_mhz", 900), ("slowdowns", 4), ("temperature_c", 71)):
        subprocess.run([*control, "reading", "0", name, str(value)], check=True)
    gpus: list[dict[str, Any]] = []
    until_s = time.monotonic() + 60
    while not any(gpu["temperature_c"] == 71 for gpu in gpus):
        assert time.monotonic() < until_s, gpus
        done = ctl.call("top", "--once", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        gpus = document["gpus"]
    (gpu,) = gpus
    assert (gpu["uuid"], gpu["index"], gpu["heat"]) == (LARGE, 0, "normal")
    assert (gpu["power_mw"], gpu["sm_clock_mhz"], gpu["headroom_c"]) == (69_800, 900, 16)
    assert gpu["slowdowns"] == ["sw_power_cap"]
    assert any("its power limit reduces the clock (900 of" in note for note in document["notes"])
