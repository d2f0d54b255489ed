"""Take the device plugin's annotations, labels and taint off every node, delete what components made by themselves, and report the nodes whose files
stay, after the release is gone.

Runs once, as a hook, in Tangram's image, with nothing but the standard library: by then there is nothing else left of Tangram
to import its settings or rights from. What is gone already is no error.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MERGE_PATCH: Final = "application/merge-patch+json"
TRIES: Final = 5
"""Of a write while others write the node too: the kubelet does every 10 s at least. Guessed."""
PAGE: Final = 500
"""Nodes in one answer. As in client-go."""
NODES_S: Final = 120.0
"""For the pods on the nodes: they wait 60 s for the end of Tangram's own, and start before. Guessed."""
LOOK_S: Final = 1.0
MOST_PRINTED: Final = 65_536
"""Bytes that are read of what a pod printed. Guessed: a line of a few hundred."""
MOST_NOTE: Final = 1024
"""Characters of an Event's message. Source: the validation of core/v1 Events."""


Marks = Mapping[str, Sequence[str]]
"""`annotations` and `labels` -> their keys."""


class Api:
    """The API server, as the pod's service account."""

    def __init__(self, server: str, token: str, trust: ssl.SSLContext | None) -> None:
        self._server, self._token, self._trust = server, token, trust

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, kind: str = MERGE_PATCH) -> Any:
        """Decoded answer. Raises HTTPError."""
        return json.loads(self._answer(method, path, body, kind))

    def text(self, path: str) -> str:
        """As it is. Raises HTTPError."""
        return self._answer("GET", path, None, MERGE_PATCH)

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None, kind: str) -> str:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data=data, headers=headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as answer:  # noqa: S310
            return str(answer.read().decode())


def _nodes(api: Api) -> Iterator[Any]:
    """Every node, in pages."""
    position = ""
    while True:
        page = api.call("GET", f"/api/v1/nodes?limit={PAGE}&continue={urllib.parse.quote(position)}")
        yield from page["items"]
        position = page["metadata"].get("continue") or ""
        if not position:
            return


def marked_nodes(api: Api, marks: Marks) -> list[str]:
    """Names of the nodes that have one of these annotations or labels."""
    found = [node["metadata"] for node in _nodes(api)]
    return [
        meta["name"]
        for meta in found
        if any(key in (meta.get(kind) or {}) for kind, keys in marks.items() for key in keys)
    ]


def untaint(api: Api, key: str) -> int:
    """Remove the taint everywhere, and no other. Returns how many nodes had it."""
    names = [node["metadata"]["name"] for node in _nodes(api) if _tainted(node, key)]
    for name in names:
        for attempt in range(TRIES):
            selector = urllib.parse.quote(f"metadata.name={name}")
            found = [
                one for one in api.call("GET", f"/api/v1/nodes?fieldSelector={selector}")["items"] if _tainted(one, key)
            ]
            if not found:
                break
            left = [taint for taint in found[0]["spec"]["taints"] if taint["key"] != key]
            version = {"resourceVersion": found[0]["metadata"]["resourceVersion"]}
            try:
                api.call("PATCH", f"/api/v1/nodes/{name}", {"metadata": version, "spec": {"taints": left or None}})
            except urllib.error.HTTPError as error:
                if error.code not in (404, 409) or (error.code == 409 and attempt + 1 == TRIES):
                    raise
                continue
            break
    return len(names)


def _tainted(node: Any, key: str) -> bool:
    return any(taint["key"] == key for taint in node.get("spec", {}).get("taints") or ())


def strip(api: Api, marks: Marks) -> int:
    """Remove them everywhere. Returns how many nodes had one."""
    names = marked_nodes(api, marks)
    change = {kind: dict.fromkeys(keys) for kind, keys in marks.items()}
    for name in names:
        try:
            api.call("PATCH", f"/api/v1/nodes/{name}", {"metadata": change})
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
    return len(names)


def delete(api: Api, path: str) -> bool:
    """Delete one object by its path. Returns whether it was there."""
    try:
        api.call("DELETE", path)
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def node_results(api: Api, path: str) -> dict[str, Any]:
    """What each pod of the DaemonSet at `path` printed, by node; None where none did within the time."""
    folder = path.partition("/daemonsets/")[0]
    pods = f"/api/v1/namespaces/{folder.rpartition('/')[2]}/pods"
    end_s = time.monotonic() + NODES_S
    while True:
        there = api.call("GET", path)
        selector = ",".join(f"{key}={value}" for key, value in there["spec"]["selector"]["matchLabels"].items())
        found = api.call("GET", f"{pods}?labelSelector={urllib.parse.quote(selector)}")["items"]
        results = {pod["spec"]["nodeName"]: _printed(api, pods, pod) for pod in found if pod["spec"].get("nodeName")}
        status = there.get("status") or {}
        known = status.get("observedGeneration", 0) >= there["metadata"]["generation"]
        if known and len(results) >= status.get("desiredNumberScheduled", 0) and None not in results.values():
            return results
        if time.monotonic() >= end_s:
            return results
        time.sleep(LOOK_S)


def _printed(api: Api, pods: str, pod: Any) -> Any:
    """Its one line, decoded."""
    try:
        return json.loads(api.text(f"{pods}/{pod['metadata']['name']}/log?limitBytes={MOST_PRINTED}"))
    except (urllib.error.HTTPError, ValueError):  # it has not started, or not printed
        return None


def sentence(node: str, result: Any, command: str) -> str:
    """Why files of a node stay, and what to do; empty where none does."""
    if result is None:
        why = "no pod reported that it removed them"
    elif "kept" in result:
        why = f"containers with a share still run, of {', '.join(result['kept'])}"
    else:
        why = str(result.get("error", ""))
    return f"Tangram's files stay on node {node}: {why}. When they may go, run there: {command}" if why else ""


def report(api: Api, node: str, note: str) -> None:
    """An Event on the node. It is for people: that it cannot be written is printed."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "tangram-cleanup-", "namespace": "default"},
        "involvedObject": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}, "reason": "FilesKept", "type": "Warning",
        "message": note[:MOST_NOTE], "source": {"component": "tangram-cleanup"}, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
    }  # fmt: skip
    try:
        api.call("POST", "/api/v1/namespaces/default/events", event, kind="application/json")
    except urllib.error.HTTPError as error:
        print(f"no Event on node {node}: {error}")


def main(arguments: list[str]) -> int:
    """As `--help` says."""
    parser = argparse.ArgumentParser(prog="clean_up.py", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("annotations", help="of nodes, by comma")
    parser.add_argument("labels", help="of nodes, by comma")
    parser.add_argument("taint", help="of nodes")
    parser.add_argument("paths", nargs="*", help="the API's paths of objects to delete")
    parser.add_argument(
        "--node-files", default="", help="the API's path of the DaemonSet whose pods remove files on the nodes"
    )
    parser.add_argument("--command", default="", help="what removes them by hand")
    given = parser.parse_args(arguments)
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    api = Api(f"https://{host}:{port}", (ACCOUNT / "token").read_text(), trust)
    marks = {"annotations": given.annotations.split(","), "labels": given.labels.split(",")}
    print(f"{given.annotations} and {given.labels} taken off {strip(api, marks)} nodes")
    print(f"taint {given.taint} taken off {untaint(api, given.taint)} nodes")
    for path in given.paths:
        print(f"{path}: {'deleted' if delete(api, path) else 'not there'}")
    if given.node_files:
        for node, result in sorted(node_results(api, given.node_files).items()):
            note = sentence(node, result, given.command)
            print(note or f"node {node}: removed {', '.join(result['removed']) or 'nothing, there was nothing'}")
            if note:
                report(api, node, note)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
