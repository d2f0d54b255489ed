"""The golden pairs of this folder, and the way from an input to what its output should be.

x.input.yaml    the pod as the API server sends it; a second document may change the rules
x.output.yaml   the pod after the patch, or `denied`; a second document lists the warnings
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from vgpu.api.errors import BadRequest
from vgpu.api.names import Names
from webhook.admission_rules import AdmissionRules
from webhook.mutate import mutate

FOLDER = Path(__file__).parent
INPUTS = sorted(FOLDER.glob("*.input.yaml"))


def output_of(path: Path) -> Path:
    return path.with_name(path.name.replace(".input.", ".output."))


def load(path: Path) -> tuple[dict[str, Any], AdmissionRules]:
    pod, *rest = yaml.safe_load_all(path.read_text())
    return pod, rules(**(rest[0]["rules"] if rest else {}))


def rules(domain: str = "tangram.sh", **changed: Any) -> AdmissionRules:
    for key, value in changed.items():
        if isinstance(value, list):
            changed[key] = tuple(value) if key == "policies" else frozenset(value)
    return AdmissionRules(names=Names(domain), **changed)


def answer(pod: dict[str, Any], rules: AdmissionRules) -> list[Any]:
    """The documents that the output should contain."""
    try:
        verdict = mutate(pod, rules)
    except BadRequest as error:
        return [{"denied": str(error)}]
    return [applied(pod, list(verdict.ops)), *([{"warnings": list(verdict.warnings)}] if verdict.warnings else [])]


def applied(document: Any, ops: list[dict[str, Any]]) -> Any:
    """`document` after a JSON patch of add and remove, written from RFC 6902 and not from our own builder."""
    document = copy.deepcopy(document)
    for op in ops:
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in op["path"].split("/")[1:]]
        at = document
        for part in way:
            at = at[int(part)] if isinstance(at, list) else at[part]
        match op["op"], at:
            case "add", list():
                assert 0 <= int(last) <= len(at), op
                at.insert(int(last), copy.deepcopy(op["value"]))
            case "add", dict():
                at[last] = copy.deepcopy(op["value"])
            case "remove", list():
                assert 0 <= int(last) < len(at), op
                del at[int(last)]
            case "remove", dict():
                del at[last]
            case _:
                raise AssertionError(f"no such operation here: {op}")
    return document
