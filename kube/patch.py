"""Small writes: merge patches and JSON patches.

A merge patch for what we alone own (our annotation); a JSON patch with a `test` where another writer must not be overrun.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kube import paths
from kube.client import JSON_PATCH, MERGE_PATCH, Client
from kube.objects import Metadata


async def merge(client: Client, path: str, change: Mapping[str, Any]) -> bytes:
    """Apply a merge patch (RFC 7386): None removes a member. Returns the object as it then is. Raises ApiError."""
    return await client.send("PATCH", path, change, content_type=MERGE_PATCH)


async def annotate(client: Client, path: str, annotations: Mapping[str, str | None]) -> bytes:
    """Set annotations, remove those that are None, leave all others. Raises ApiError."""
    return await merge(client, path, {"metadata": {"annotations": dict(annotations)}})


async def nominate(client: Client, pod: Metadata, node: str | None, *, unchanged: bool = False) -> None:
    """Nominate this pod, by its UID, to a node; None withdraws. `unchanged`: only if it was not written since. Raises ApiError."""
    known = {"uid": pod.uid} | ({"resourceVersion": pod.resource_version} if unchanged else {})
    change = {"metadata": known, "status": {"nominatedNodeName": node}}
    await merge(client, paths.pod(pod.namespace, pod.name, "status"), change)


async def apply_operations(client: Client, path: str, operations: Sequence[Mapping[str, Any]]) -> bytes:
    """Apply a JSON patch (RFC 6902). A `test` that fails is an ApiError with status 422."""
    return await client.send("PATCH", path, list(operations), content_type=JSON_PATCH)


def pointer(*parts: str | int) -> str:
    """A JSON pointer to `parts`, escaped as in RFC 6901: `pointer("metadata", "annotations", "tangram.sh/class")`."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
