"""examples/workload/gpuview.py, which the examples and the demo run in their pods."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

from tests.built import REPOSITORY

GPUVIEW = REPOSITORY / "examples/workload/gpuview.py"
REPORT = re.compile(
    r"pod: (?P<rate>[\d.]+) kernels of 30 ms a second, each done after (?P<took>[\d.]+) ms \(the slowest [\d.]+\)\n"
)


def test_work_computes_until_it_is_stopped_and_reports_how_much(fake_driver):
    driver = fake_driver("gpu h200")
    command = [sys.executable, str(GPUVIEW), "work", "--kernel-ms=30", "--every-ms=100"]
    with subprocess.Popen(command, env=driver.env(POD_NAME="pod"), stdout=subprocess.PIPE, text=True) as working:
        assert working.stdout is not None
        report = REPORT.fullmatch(working.stdout.readline())
        working.send_signal(signal.SIGTERM)
        assert working.wait(60) == 0
    assert report is not None
    assert 0 < float(report["rate"]) <= 11, "one each 100 ms, not one after the other"
    assert float(report["took"]) >= 30
