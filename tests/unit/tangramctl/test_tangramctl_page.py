"""The command line agrees with the page, and answers at once."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from tangramctl import errors
from tangramctl.__main__ import app
from tangramctl.errors import CommandError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/reference/tangramctl.md").read_text()
SLOW = {"numpy", "rich", "msgspec", "pynvml", "asyncio", "tangramctl.run", "tangramctl.ps"}


def commands(group: Any = None, name: str = "tangramctl") -> Iterator[tuple[str, Any]]:
    """(full name, command) of every command that does something."""
    group = group or typer.main.get_command(app)
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def section(name: str) -> str:
    found = re.search(rf"^## `{re.escape(name)}[^\n]*`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section for {name}"
    return found[1]


def test_the_page_has_a_row_for_each_option_and_no_other() -> None:
    for name, command in commands():
        rows = re.findall(r"^\| `(--[a-z-]+)", section(name), re.MULTILINE)
        options = [one.opts[0] for one in command.params if one.param_type_name == "option" and not one.hidden]
        assert sorted(rows) == sorted(option for option in options if option != "--help"), name


def test_the_page_names_each_default_and_variable() -> None:
    for name, command in commands():
        for option in command.params:
            row = next((line for line in section(name).splitlines() if line.startswith(f"| `{option.opts[0]}")), "")
            if option.envvar and name == "tangramctl run":
                assert f"`{option.envvar}`" in row, row
            if (
                option.default not in (None, False, Ellipsis)
                and option.param_type_name == "option"
                and not option.required
            ):
                assert str(option.default).removesuffix(".0") in row, row


def test_the_page_names_each_exit_code() -> None:
    codes = {one.code for one in vars(errors).values() if isinstance(one, type) and issubclass(one, CommandError)} - {1}
    rows = {int(code) for code in re.findall(r"^\| ([0-9]+) \|", PAGE, re.MULTILINE)}
    assert rows == codes | {3}


def test_help_teaches_with_examples_that_parse() -> None:
    run = dict(commands())["tangramctl run"]
    examples = re.findall(r"^  tangramctl run (.*?)(?:   .*)?$", run.help, re.MULTILINE)
    assert len(examples) > 4
    for example in examples:
        context = run.make_context("run", example.split())
        assert context.params["command"]
        assert context.params["gpu_mem"]


def test_help_imports_nothing_slow() -> None:
    program = f"""
import sys
sys.argv = ["tangramctl", "--help"]
from tangramctl.__main__ import main
try:
    main()
except SystemExit:
    print(*({SLOW!r} & sys.modules.keys()), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "tangramctl run --gpu-mem 8Gi -- python train.py" in done.stdout
    assert done.stderr.split() == []


def test_the_version_is_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tangramctl", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == f"tangramctl {version('tangram')}\n"


def test_as_a_kubectl_plugin_it_calls_itself_so() -> None:
    program = "import sys; sys.argv = ['/x/kubectl-tangram', '--help']; from tangramctl.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("Usage: kubectl tangram [OPTIONS]")
