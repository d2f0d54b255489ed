"""The man page tangramctl(1), made from the parser: the same names, defaults and sentences as `--help`. Pure but for the parser.

Source of the macros: man(7) of groff.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import typer

from hack.release.version import version

NAME: Final = "tangramctl"
SEE_ALSO: Final = "https://github.com/tangram-sh/tangram/tree/main/docs/reference/tangramctl.md"


def page(created_s: int) -> str:
    """The whole page. `created_s` is its date, seconds since 1970."""
    from tangramctl.__main__ import app

    program: Any = typer.main.get_command(app)
    day = datetime.fromtimestamp(created_s, UTC).date().isoformat()
    summary, *rest = paragraphs(program.help)
    lines = [
        f'.TH {NAME.upper()} 1 "{day}" "Tangram {version()}" "User Commands"',
        ".SH NAME", f"{NAME} \\- {text(summary[0].lower() + summary[1:]).rstrip('.')}",
        ".SH SYNOPSIS", f".B {NAME}", "\\fICOMMAND\\fR [\\fIOPTIONS\\fR] [\\fIARGUMENTS\\fR]",
        ".SH DESCRIPTION", *body(rest),
        ".SH OPTIONS", *options(program),
        ".SH COMMANDS",
    ]  # fmt: skip
    for name, command in commands(program, NAME):
        lines += [f".SS {text(usage(name, command))}", *body(paragraphs(command.help)), *options(command)]
    lines += [".SH SEE ALSO", text(SEE_ALSO)]
    return "\n".join(lines) + "\n"


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(full name, command) of every command that does something."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def usage(name: str, command: Any) -> str:
    arguments = [one.metavar or one.name.upper() for one in command.params if one.param_type_name == "argument"]
    return " ".join([name, "[OPTIONS]", *arguments])


def paragraphs(help_text: str | None) -> list[str]:
    """As the parser reads them: an empty line ends one, and one that begins with a backspace keeps its lines."""
    return [part.strip("\n") for part in re.split(r"\n\s*\n", help_text or "") if part.strip()]


def body(parts: list[str]) -> Iterator[str]:
    for part in parts:
        if part.startswith("\b"):
            kept = part.lstrip("\b\n").splitlines()
            yield from (".PP", ".nf", *(text(line) for line in kept), ".fi")
        else:
            yield from (".PP", text(" ".join(part.split())))


def options(command: Any) -> Iterator[str]:
    for one in command.params:
        if one.param_type_name != "option" or one.hidden:
            continue
        names = ", ".join(f"\\fB{text(name)}\\fR" for name in one.opts)
        value = "" if one.is_flag else f" \\fI{text(one.metavar or 'VALUE')}\\fR"
        default = "" if one.default in (None, False, ...) or one.required else f" Default: {one.default}."
        yield from (".TP", f"{names}{value}", text(" ".join((one.help or "").split()) + default))


def text(words: str) -> str:
    """Escaped: a backslash, a hyphen that is one to copy, and a line that would be a macro."""
    escaped = words.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in {".", "'"} else escaped
