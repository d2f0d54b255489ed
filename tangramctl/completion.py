"""Completion in a shell: the scripts of bash, zsh and fish, and the program that kubectl calls for `kubectl tangram`.

A script calls tangramctl itself with two variables set, so there is no list of options that could be out of date. kubectl's program
speaks the protocol of those scripts, because that is stable where the parser's classes are not.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import Final

SHELLS: Final = ("bash", "zsh", "fish")
PROGRAM: Final = "tangramctl"
VARIABLE: Final = "_TANGRAMCTL_COMPLETE"
"""Set in the call of a script."""
WIDE: Final = "4096"
"""Columns in such a call: a description is one line."""
FILES, NO_FILES = ":0", ":4"
"""The last line that kubectl reads: what its shell adds. Source: the shell completion directives of spf13/cobra, read only."""


def completing() -> bool:
    """Is this call one of a completion script?"""
    return VARIABLE in os.environ


def script(shell: str) -> str:
    """What to put in a file that the shell reads. `shell` is one of SHELLS."""
    return _printed({VARIABLE: f"source_{shell}"}).strip()


def answers(words: Sequence[str]) -> list[str]:
    """Completions of the last word, each with a tab and its description where it has one. `words` come after the program's name."""
    *before, last = words or [""]
    typed = " ".join([PROGRAM, *map(shlex.quote, before), shlex.quote(last) if last else ""])
    asked = {VARIABLE: "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": typed}
    return [line for line in _printed(asked).splitlines() if line]


def _printed(variables: Mapping[str, str]) -> str:
    """What the parser prints in a call by a script, which it knows by variables of the environment."""
    from tangramctl.__main__ import app

    before, printed = dict(os.environ), StringIO()
    os.environ |= {"COLUMNS": WIDE, **variables}
    try:
        with redirect_stdout(printed), suppress(SystemExit):
            app(prog_name=PROGRAM, args=[])
    finally:
        os.environ.clear()
        os.environ |= before
    return printed.getvalue()


def kubectl() -> None:
    """The console script `kubectl_complete-tangram`: kubectl calls it with the words after `kubectl tangram`."""
    found = answers(sys.argv[1:])
    print("\n".join([*found, NO_FILES if found else FILES]))
