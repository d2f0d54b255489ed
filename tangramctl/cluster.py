"""A cluster seen from outside: the extender's snapshot, or one made from what kubectl reads.

The extender has more (reservations of pods that are not bound yet), so it comes first. Everything else goes through the caller's own
kubectl, with the caller's rights: tangramctl has no client of its own.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
import urllib.error
import urllib.request
import zlib
from typing import Any, Final

from tangramctl.errors import BadOption, NotFound
from vgpu.api.codec import assignment_from_json, inventory_from_json
from vgpu.api.cordon import cordons_from_json, with_cordons
from vgpu.api.errors import BadDocument
from vgpu.api.names import Names
from vgpu.scheduling.snapshot import NodeRecord, PodRecord, Snapshot

EXTENDER_TIMEOUT_S: Final = 20.0
"""Until the next byte of an answer. A client waits 10 s until it may read a snapshot (`extender.snapshot_writer.WAIT_S`) before it is refused, with a reason."""
KUBECTL_TIMEOUT_S: Final = 120.0
"""10,000 pods take some seconds. Guessed."""
_LOGGED: Final = re.compile(r"[IWEF][0-9]{4} ")
"""How a line of klog begins."""

UNREADABLE: Final = "node's GPU inventory or a pod's GPU assignment there cannot be read"


def snapshot_at(url: str) -> bytes | None:
    """What an extender answers, None when there is none."""
    if not url.startswith(("http://", "https://")):
        raise BadOption(f"--extender is {url!r}: it must be a URL such as http://127.0.0.1:8888")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        call = urllib.request.Request(url.rstrip("/") + "/snapshot", headers={"Accept-Encoding": "gzip"})  # noqa: S310 - of these two schemes
        with direct.open(call, timeout=EXTENDER_TIMEOUT_S) as answer:
            body: bytes = answer.read()
            return gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.TOO_MANY_REQUESTS:
            raise BadOption(f"{url}: {error.read(300).decode(errors='replace').strip()}") from None
        return None
    except (urllib.error.URLError, http.client.HTTPException, EOFError, zlib.error, TimeoutError, OSError):
        return None


def kubectl(*words: str) -> Any:
    """What kubectl answers, decoded. Raises NotFound, BadOption."""
    return json.loads(output_of(*words, "-o", "json"))


def output_of(*words: str) -> bytes:
    """What kubectl writes. Raises NotFound, BadOption."""
    try:
        done = subprocess.run(
            ["kubectl", *words],  # noqa: S607 - the caller's own kubectl, wherever it is
            capture_output=True,
            timeout=KUBECTL_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise NotFound("kubectl is not in PATH: it reads the pod; or pass --pod FILE and --snapshot FILE") from None
    except subprocess.TimeoutExpired:
        raise BadOption(f"kubectl {' '.join(words[:3])} has not answered for {KUBECTL_TIMEOUT_S:g} s") from None
    if done.returncode:
        why = complaint(done.stderr.decode(errors="replace"), done.returncode)
        raise BadOption(f"kubectl {' '.join(word for word in words if word not in ('-o', 'json'))}: {why}")
    return done.stdout


def complaint(output: str, code: int) -> str:
    """The sentence that kubectl ends with, without the log lines of its library before it."""
    lines = output.strip().splitlines()
    sentences = [line for line in lines if not _LOGGED.match(line)]
    return (sentences or lines or [f"exit code {code}"])[-1][:500]


def snapshot_of(nodes: list[dict[str, Any]], pods: list[dict[str, Any]], names: Names) -> Snapshot:
    """The snapshot that the API's own objects make."""
    broken: set[str] = set()
    held = [record for pod in pods if (record := _pod(pod, names, broken)) is not None]
    records = [_node(node, names, broken) for node in nodes]
    known = {pod["metadata"]["uid"] for pod in pods}
    held += [
        PodRecord(orphan.uid, orphan.key, one.name, "orphaned", orphan.assignment)
        for one in records
        if one.inventory is not None
        for orphan in one.inventory.orphans
        if orphan.uid not in known
    ]
    units = {one.inventory.unit_mib for one in records if one.inventory is not None}
    return Snapshot(names.domain, min(units, default=1024), tuple(records), tuple(held))


def _node(node: dict[str, Any], names: Names, broken: set[str]) -> NodeRecord:
    name = node["metadata"]["name"]
    annotations = node["metadata"].get("annotations") or {}
    text = annotations.get(names.inventory)
    if text is None:
        return NodeRecord(name, None)
    try:
        inventory = with_cordons(inventory_from_json(text), cordons_from_json(annotations.get(names.cordoned_gpus)))
        return NodeRecord(name, inventory, UNREADABLE if name in broken else "")
    except BadDocument:
        return NodeRecord(name, None, UNREADABLE)


def _pod(pod: dict[str, Any], names: Names, broken: set[str]) -> PodRecord | None:
    meta, node = pod["metadata"], pod["spec"].get("nodeName")
    text = (meta.get("annotations") or {}).get(names.assignment)
    if text is None or not node or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return None
    try:
        assignment = assignment_from_json(text)
    except BadDocument:
        broken.add(node)
        return None
    return PodRecord(meta["uid"], f"{meta['namespace']}/{meta['name']}", node, "seen bound", assignment)
