"""Settings of a program, from its flags and from environment variables, and the message when one is wrong.

The settings are a pydantic model of the program; its docstring is the head of `--help`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from vgpu.api.errors import TangramError


class ProgramSettings(BaseSettings):
    """Settings that every program has."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")


S = TypeVar("S", bound=ProgramSettings)


def config(program: str, prefix: str) -> SettingsConfigDict:
    """Of a model: flags as `--kebab-case`, environment variables as `<prefix><NAME>`."""
    return SettingsConfigDict(
        env_prefix=prefix, cli_prog_name=program, cli_kebab_case=True, cli_avoid_json=True, extra="forbid"
    )


def read(model: type[S], arguments: Sequence[str] | None = None) -> S:
    """The settings. Ends the process when they are wrong, with a line for each and status 2. No arguments: the process's own."""
    try:
        return CliApp.run(model, cli_args=None if arguments is None else list(arguments))
    except ValidationError as error:
        sentences = list(_sentences(error))
    except SettingsError as error:
        sentences = [f"{error}: {error.__cause__}"]
    except TangramError as error:
        sentences = [str(error)]
    for sentence in sentences:
        print(f"{model.model_config['cli_prog_name']}: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _sentences(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        found = "" if problem["type"] == "missing" else f" is {problem.get('input')!r}"
        yield f"{name}{found}: {problem['msg'].removeprefix('Value error, ')}"
