"""tests.e2e.api: what the end-to-end tests wait for is judged at each change, and the server's words are in every failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from hack.kubectl import CommandFailed
from hack.waiting import NotSoon
from tests.e2e.api import ANYWHERE, Api, path_of


def thing(name: str, phase: str = "Pending") -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase}}


def listed(*things: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": list(things)})


def changes(*events: tuple[str, dict[str, Any]]) -> httpx.Response:
    return httpx.Response(200, text="".join(json.dumps({"type": kind, "object": of}) + "\n" for kind, of in events))


def api(*answers: httpx.Response, requested: list[httpx.Request] | None = None) -> Api:
    """A server that gives these answers, in this order."""
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        (requested if requested is not None else []).append(request)
        return left.pop(0)

    return Api(httpx.Client(transport=httpx.MockTransport(answer), base_url="http://localhost"), Path("unused"))


def runs(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda seen: all(name in seen and seen[name]["status"]["phase"] == "Running" for name in names)


def wait(server: Api, judge: Callable[[dict[str, Any]], bool], timeout_s: float = 10) -> bool:
    return server.until("pod", "ns", judge, "pods run", timeout_s=timeout_s)


def test_what_is_so_already_is_not_waited_for() -> None:
    assert wait(api(listed(thing("a", "Running"))), runs("a"))


def test_a_wait_ends_with_the_change_that_makes_it_true() -> None:
    requested: list[httpx.Request] = []
    after = changes(("ADDED", thing("b", "Running")), ("MODIFIED", thing("a", "Running")))
    assert wait(api(listed(thing("a")), after, requested=requested), runs("a", "b"))
    assert requested[1].url.params["resourceVersion"] == "7", (
        "nothing that happens between the look and the watch is missed"
    )


def test_what_was_deleted_is_gone() -> None:
    assert wait(api(listed(thing("a")), changes(("DELETED", thing("a")))), lambda seen: not seen)


@pytest.mark.parametrize("end", [changes(), changes(("ERROR", {"code": 410})), httpx.Response(200, text="")])
def test_a_watch_that_ends_is_begun_again_with_a_new_list(end: httpx.Response) -> None:
    assert wait(api(listed(thing("a")), end, listed(thing("a", "Running"))), runs("a"))


def test_the_error_of_a_wait_in_vain_names_its_condition() -> None:
    with pytest.raises(NotSoon, match="not within 0 s: pods run"):
        wait(api(listed(thing("a"))), runs("a"), timeout_s=0)


def test_a_refusal_has_the_servers_words() -> None:
    refusal = httpx.Response(403, json={"kind": "Status", "message": "gpu-mem is 0"})
    with pytest.raises(CommandFailed, match="403 gpu-mem is 0"):
        api(refusal).create({"kind": "Pod"}, "ns")


def test_what_there_is_not_is_none() -> None:
    assert api(httpx.Response(404, json={"message": "not found"})).find("pod", "a", "ns") is None


@pytest.mark.parametrize(
    ("kind", "namespace", "name", "path"),
    [
        ("Pod", "ns", "a", "/api/v1/namespaces/ns/pods/a"),
        ("pod", ANYWHERE, "", "/api/v1/pods"),
        ("node", None, "n", "/api/v1/nodes/n"),
        ("replicaset", "ns", "", "/apis/apps/v1/namespaces/ns/replicasets"),
    ],
)
def test_an_object_has_its_path(kind: str, namespace: str | None, name: str, path: str) -> None:
    assert path_of(kind, namespace, name) == path
