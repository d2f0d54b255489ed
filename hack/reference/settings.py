"""Every setting as a row, from the pydantic models."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hack.reference.page import sentence, table
from hack.reference.programs import PROGRAMS, Program

_BOUNDS: Final = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS: Final = {int: "whole number", float: "number", str: "text", Path: "path", bool: "true or false"}


def allowed(field: FieldInfo) -> str:
    """The values that a setting takes."""
    kind = _kind(field.annotation)
    bounds = {
        mark: getattr(rule, name) for rule in field.metadata for name, mark in _BOUNDS.items() if hasattr(rule, name)
    }
    if {">=", "<="} <= bounds.keys():
        return f"{bounds['>=']} to {bounds['<=']}"
    limits = [f"{mark} {value}" for mark, value in bounds.items()]
    if any(getattr(rule, "min_length", 0) for rule in field.metadata):
        limits.append("not empty")
    return ", ".join([kind, *limits] if kind != "number" or not limits else limits)


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if get_origin(annotation) in (UnionType, Union):
        return " or ".join(_kind(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is list:
        return "list (JSON; repeat the flag)"
    if get_origin(annotation) is dict:
        return "mapping (JSON)"
    return _KINDS[annotation]


def default(field: FieldInfo) -> str:
    """The value where nothing is set."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`" if value != "" else '`""`'


def _rows(program: Program) -> Iterator[tuple[str, ...]]:
    prefix = program.settings.model_config.get("env_prefix", "")
    for name, field in program.settings.model_fields.items():
        flag, variable = f"`--{name.replace('_', '-')}`", f"`{prefix}{name.upper()}`"
        yield flag, variable, default(field), allowed(field), sentence(field.description or "")


def undescribed() -> list[str]:
    """Settings without a description."""
    return [
        f"{program.package}.{name}"
        for program in PROGRAMS
        for name, field in program.settings.model_fields.items()
        if len(field.description or "") < 10
    ]


def tables() -> str:
    """The made part of docs/reference/settings.md."""
    head = ("flag", "environment variable", "default", "range", "meaning")
    return "\n".join(
        f"## {program.package}\n\n`tangram-{program.package}`, {program.runs}.\n\n{table(head, _rows(program))}"
        for program in PROGRAMS
    )
