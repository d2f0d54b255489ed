"""tests.signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.signals import send_signal

BEATS = """
import os, threading
def beat():
    while True:
        os.write(1, b".")
for _ in range(3):
    threading.Thread(target=beat).start()
"""


def test_a_process_that_was_stopped_does_nothing_more(tmp_path: Path) -> None:
    """Without waiting for it, one in a few goes on for a while, on a busy machine."""
    beats = tmp_path / "beats"
    for _ in range(5):
        with beats.open("w") as out, subprocess.Popen([sys.executable, "-c", BEATS], stdout=out) as program:
            while beats.stat().st_size == 0:
                pass
            send_signal(program.pid, signal.SIGSTOP)
            size = beats.stat().st_size
            time.sleep(0.01)  # one that goes on writes thousands of times
            later = beats.stat().st_size
            program.kill()
        assert later == size
