"""Take the device plugin's annotations, labels and taint off every node, and delete what components made by themselves, after the release is gone.

Runs once, as a hook, in Tangram's image, with nothing but the standard library: by then there is nothing else left of Tangram
to import its settings or rights from. What is gone already is no error.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
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


Marks = Mapping[str, Sequence[str]]
"""`annotations` and `labels` -> their keys."""


class Api:
    """The API server, as the pod's service account."""

    def __init__(self, server: str, token: str, trust: ssl.SSLContext | None) -> None:
        self._server, self._token, self._trust = server, token, trust

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Decoded answer. Raises HTTPError."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": MERGE_PATCH}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data=data, headers=headers, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as answer:  # noqa: S310
            return json.load(answer)


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


def main(arguments: list[str]) -> int:
    """`clean_up.py ANNOTATION[,ANNOTATION...] LABEL[,LABEL...] TAINT [PATH ...]`: of nodes, and the API's paths of objects."""
    annotations, labels, taint, *paths = arguments
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    api = Api(f"https://{host}:{port}", (ACCOUNT / "token").read_text(), trust)
    marks = {"annotations": annotations.split(","), "labels": labels.split(",")}
    print(f"{annotations} and {labels} taken off {strip(api, marks)} nodes")
    print(f"taint {taint} taken off {untaint(api, taint)} nodes")
    for path in paths:
        print(f"{path}: {'deleted' if delete(api, path) else 'not there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
