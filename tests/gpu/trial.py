"""Does this machine's driver suspend? Builds the trial program with gcc, runs the trial as a device plugin does, and prints a CSV row.

    python3 tests/gpu/trial.py            a GPU, /dev/nvidia*, libcuda.so.1 and gcc; no CUDA toolkit, no cluster
    python3 tests/gpu/trial.py --fake     on the fake driver of `make library`, without a GPU

Exit status 1 where the verdict is not `works`.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from vgpu.gputime.trial_verdict import TrialOutcome, TrialVerdict, verdict_from_text  # noqa: E402

SHIM = REPOSITORY / "shim"
SOURCES = [SHIM / "trial/trial.c", SHIM / "src/gputime/forms.c", SHIM / "src/gputime/objects.c"]
COLUMNS = ["driver", "model", "outcome", "before", "during", "after", "suspend_us", "resume_us", "why"]
LIMIT_S = 60.0


def build(folder: Path) -> Path:
    """As shim/Makefile does."""
    program = folder / "tangram-trial"
    flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-rdynamic", f"-I{SHIM}/src", f"-I{SHIM}/include"]
    subprocess.run(["gcc", *flags, "-o", str(program), *map(str, SOURCES), "-ldl"], check=True)
    return program


def trial(program: Path, env: Mapping[str, str]) -> TrialVerdict:
    """In a process of its own, which is ended if it hangs."""
    command = [sys.executable, "-m", "arbiter.gputime.suspend_trial", "--program", str(program)]
    try:
        ended = subprocess.run(
            command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True
        )
    except subprocess.TimeoutExpired:
        return TrialVerdict(TrialOutcome.HUNG, f"not over within {LIMIT_S:g} s")
    return verdict_from_text(ended.stdout)


def machine(env: Mapping[str, str]) -> tuple[str, str]:
    """Driver and model, of the first GPU that nvidia-smi shows."""
    requested = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        output = subprocess.run(requested, env=env, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown", "unknown"
    driver, _, model = output.splitlines()[0].partition(",")
    return driver.strip(), model.strip()


def main() -> None:
    """Prints the header and one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="on the fake driver")
    fake = parser.parse_args().fake
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(folder)
        if fake:
            from tests.built import fake_build
            from tests.fake import start_fake_driver

            driver = start_fake_driver("gpu h200 context_mib=0\n", folder)
            env = driver.env(LD_PRELOAD=str(fake_build() / "libfake-kernel.so"))
            try:
                verdict, (version, model) = trial(program, env), ("fake", "fake")
            finally:
                driver.stop()
        else:
            env = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}
            verdict, (version, model) = trial(program, env), machine(env)
    row = csv.writer(sys.stdout)
    row.writerow(COLUMNS)
    counts = [verdict.before, verdict.during, verdict.after]
    times = [round(verdict.suspend_us), round(verdict.resume_us)]
    row.writerow([version, model, verdict.outcome, *counts, *times, verdict.why])
    sys.exit(0 if verdict.outcome is TrialOutcome.WORKS else 1)


if __name__ == "__main__":
    main()
