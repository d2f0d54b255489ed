"""JSON schemas of Kubernetes' kinds, from what an API server says of itself, as kubeconform reads them: strict, so that a field that is not there is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

LOCATION: Final = "{{.ResourceKind}}{{.KindSuffix}}.json"
"""File of a kind, as kubeconform's template names it: `deployment-apps-v1.json`."""
_QUANTITY: Final = "io.k8s.apimachinery.pkg.api.resource.Quantity"
_NUMBER_OR_TEXT: Final = {"type": ["string", "number"]}
_REFERENCE: Final = re.compile(r'"#/definitions/([^"]+)"')


def write_schemas(document: Mapping[str, Any], kinds: Collection[str], folder: Path) -> int:
    """One file for each version of each of the kinds. `document`: the API server's /openapi/v2. Returns how many."""
    definitions = {name: _closed(one) for name, one in document["definitions"].items()}
    definitions[_QUANTITY] = _NUMBER_OR_TEXT
    written = 0
    for name, one in document["definitions"].items():
        for kind in one.get("x-kubernetes-group-version-kind", []):
            if kind["kind"] in kinds:
                group = f"{kind['group'].partition('.')[0]}-" if kind["group"] else ""
                needed = {key: definitions[key] for key in _reached(name, definitions)}
                schema = {"$ref": f"#/definitions/{name}", "definitions": needed}
                (folder / f"{kind['kind'].lower()}-{group}{kind['version']}.json").write_text(json.dumps(schema))
                written += 1
    return written


def _reached(name: str, definitions: Mapping[str, Any]) -> Iterator[str]:
    """The name, and all that its schema refers to."""
    seen, ahead = set[str](), {name}
    while ahead:
        one = ahead.pop()
        seen.add(one)
        yield one
        ahead |= set(_REFERENCE.findall(json.dumps(definitions[one]))) - seen


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a validator: no property but those that are listed, and numbers where Kubernetes takes numbers and text."""
    if "$ref" in schema:
        return {"$ref": schema["$ref"]}
    if schema.get("format") == "int-or-string":
        return dict(_NUMBER_OR_TEXT)
    closed = {key: schema[key] for key in ("type", "required", "enum") if key in schema}
    if "properties" in schema:
        closed["properties"] = {name: _closed(one) for name, one in schema["properties"].items()}
        closed["additionalProperties"] = False
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            closed[inner] = _closed(schema[inner])
    return closed
