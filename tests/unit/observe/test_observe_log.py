"""The log of a program: one JSON document a line, on standard error."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from observe.log import log_json
log_json("warning")
log = structlog.get_logger()
log.info("not shown")
log.warning("shown", pod="default/a")
logging.getLogger("a.library").warning("of a library")
try:
    raise ValueError("why")
except ValueError:
    log.exception("with its cause")
"""


def test_lines_are_json_on_standard_error_from_the_level_requested() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, library, last = done.stderr.splitlines()
    shown = json.loads(first)
    assert (shown["event"], shown["level"], shown["pod"]) == ("shown", "warning", "default/a")
    assert shown["timestamp"].endswith("Z")
    assert library == "of a library"
    assert json.loads(last)["exception"][0]["exc_type"] == "ValueError"
