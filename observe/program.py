"""A program that works in one event loop, from its settings to its exit status.

def main() -> None:
    run_program(Settings, run)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from observe.log import log_json
from observe.options import S, read
from vgpu.api.errors import TangramError

Work = Coroutine[Any, Any, None]


def run_program(
    model: type[S],
    work: Callable[[S], Work],
    arguments: Sequence[str] | None = None,
    *,
    loop: Callable[[Work], None] = asyncio.run,
) -> None:
    """Work until done. What the machine or the cluster refuses ends it with one line and status 1, wrong settings with status 2."""
    settings = read(model, arguments)
    log_json(settings.log_level)
    try:
        loop(work(settings))
    except (TangramError, OSError) as error:
        sys.exit(f"{model.model_config['cli_prog_name']}: {error}")
