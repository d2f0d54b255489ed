"""A small API server over HTTP, for faults that a real one cannot be requested: cut streams, garbage, lost replies, old versions.

    async with FakeApi() as api:
        api.put(pod("a").plain())
        async with api.client() as client: ...
        api.faults.append(lose_reply("POST", "/binding"))

Knows pods, nodes, disruption budgets and, once served (`serve_kueue`, `serve_slices`), Kueue's Workloads and ResourceSlices: list in pages, watch, get, bind, evict, patch a pod's status; Events are kept as they come. What real servers do beyond that is tested on a real one (tests/e2e).
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kube.auth import Credentials
from kube.client import STRATEGIC_PATCH, Client, connect
from kube.paths import BUDGETS, KUEUE, RESOURCE_API, resource_slices, workloads

Object = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Fault = Callable[[web.Request, Handler], Awaitable[web.StreamResponse] | None]
"""Returns None when the request is none of its business. A fault that answers is used up."""

GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


@dataclass
class Watch:
    """An open watch: lines put here are sent as they are; None cuts the connection."""

    path: str
    selector: str
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)


class FakeApi:
    """See the module. `requests` has `VERB path` of every call, in order."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {"/api/v1/pods": {}, "/api/v1/nodes": {}, BUDGETS: {}}
        self.version = 10
        self.compacted = 0
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.bindings: list[Object] = []
        self.evictions: list[str] = []
        """Pods whose eviction was granted, in order: each is leaving until it is removed."""
        self.events: list[Object] = []
        self.documents: dict[str, Object] = {}
        """Path -> what a GET answers: objects that nobody lists or watches."""
        self.tokens: dict[str, str] = {}
        """Bearer token -> user name, for TokenReviews."""
        self.may: dict[str, set[str]] = {}
        """User name -> paths that it may get, for SubjectAccessReviews."""
        self.watches: list[Watch] = []
        self.port = 0
        self._history: list[tuple[int, str, Object]] = []
        self._opened = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeApi:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        assert self._runner
        await self._runner.cleanup()

    def client(self) -> AbstractAsyncContextManager[Client]:
        """A client of this server."""

        async def load() -> Credentials:
            return Credentials(f"http://127.0.0.1:{self.port}", None)

        return connect(load=load)

    # --- what happens in the cluster ---

    def put(self, thing: Object, *, reported: bool = True) -> Object:
        """Create or change an object; watches report it, unless they are to miss it."""
        path, key = self._place(thing)
        thing = copy.deepcopy(thing)
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        known = key in self.objects[path]
        self.objects[path][key] = thing
        if reported:
            self._report(path, "MODIFIED" if known else "ADDED", thing)
        return thing

    def remove(self, thing: Object, *, reported: bool = True) -> None:
        """Delete an object; watches report it, unless they are to miss it."""
        path, key = self._place(thing)
        gone = copy.deepcopy(self.objects[path].pop(key))
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        if reported:
            self._report(path, "DELETED", gone)

    def serve_kueue(self, *versions: str) -> None:
        """Workloads, in these versions."""
        self.documents[KUEUE] = {"kind": "APIGroup", "versions": [{"version": version} for version in versions]}
        for version in versions:
            self.objects.setdefault(workloads(version), {})

    def serve_slices(self, *versions: str) -> None:
        """ResourceSlices, in these versions."""
        self.documents[RESOURCE_API] = {"kind": "APIGroup", "versions": [{"version": version} for version in versions]}
        for version in versions:
            self.objects.setdefault(resource_slices(version), {})

    def pod(self, key: str) -> Object | None:
        """A pod as it is now."""
        return self.objects["/api/v1/pods"].get(key)

    def cut(self) -> None:
        """End every watch, as a broken connection does."""
        for watch in self.watches:
            watch.lines.put_nowait(None)

    def send(self, line: bytes) -> None:
        """A line for every open watch."""
        for watch in self.watches:
            watch.lines.put_nowait(line + b"\n")

    def compact(self) -> None:
        """Forget history: watches from before this get the answer that their version is gone."""
        self.compacted = self.version
        self._history.clear()

    async def watched(self, count: int = 1) -> None:
        """Return when so many watches are open."""
        while len(self.watches) < count:
            self._opened.clear()
            await self._opened.wait()

    # --- HTTP ---

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        for fault in list(self.faults):
            answer = fault(request, self._answer)
            if answer is not None:
                self.faults.remove(fault)
                return await answer
        return await self._answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path in self.documents:
            return web.json_response(self.documents[path])
        if path in self.objects:
            return await self._watch(request) if "watch" in request.query else self._list(request)
        parts = path.strip("/").split("/")
        if len(parts) >= 6 and parts[4] == "pods":
            key = f"{parts[3]}/{parts[5]}"
            if parts[6:] == ["binding"]:
                return self._bind(key, await request.json())
            if parts[6:] == ["eviction"]:
                return self._evict(key, await request.json())
            if parts[6:] == ["status"] and request.method == "PATCH":
                return self._patch_status(key, await request.json(), request.content_type)
            found = self.pod(key)
            return web.json_response(found) if found else _status(404, "NotFound", f'pods "{parts[5]}" not found')
        if parts[-1] == "tokenreviews":
            user = self.tokens.get((await request.json())["spec"]["token"])
            groups = ["system:authenticated"]
            status = (
                {"authenticated": True, "user": {"username": user, "groups": groups}} if user else {"error": "unknown"}
            )
            return web.json_response({"status": status}, status=201)
        if parts[-1] == "subjectaccessreviews":
            spec = (await request.json())["spec"]
            assert spec["nonResourceAttributes"]["verb"] == "get"
            allowed = spec["nonResourceAttributes"]["path"] in self.may.get(spec["user"], ())
            return web.json_response({"status": {"allowed": allowed}}, status=201)
        if parts[-1] == "events" and request.method == "POST":
            self.events.append(await request.json())
            return web.json_response(self.events[-1], status=201)
        if parts[-2] == "events" and request.method == "PATCH":
            return self._patch_event(parts[-1], await request.json())
        return _status(404, "NotFound", f"{path} is nothing that this server knows")

    def _list(self, request: web.Request) -> web.StreamResponse:
        items = [i for i in self.objects[request.path].values() if _selected(i, request.query.get("fieldSelector", ""))]
        limit, start = int(request.query.get("limit", "1000000")), int(request.query.get("continue", "0"))
        metadata = {"resourceVersion": str(self.version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        return web.json_response({"metadata": metadata, "items": items[start : start + limit]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self.compacted:
            return web.Response(body=json.dumps({"type": "ERROR", "object": GONE}).encode() + b"\n")
        watch = Watch(request.path, request.query.get("fieldSelector", ""))
        for version, path, event in self._history:
            if version > since and path == watch.path:
                self._send(watch, event)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watches.append(watch)
        self._opened.set()
        try:
            while (line := await watch.lines.get()) is not None:
                await response.write(line)
        except ConnectionError:
            return response
        finally:
            self.watches.remove(watch)
        hang_up(request)
        return response

    def _bind(self, key: str, body: Object) -> web.StreamResponse:
        found = self.pod(key)
        if found is None:
            return _status(404, "NotFound", f'pods "{key}" not found')
        if body["metadata"].get("uid") not in (None, found["metadata"]["uid"]):
            return _status(409, "Conflict", "Precondition failed: UID in precondition does not match")
        if found["spec"].get("nodeName"):
            return _status(409, "Conflict", f'pod is already assigned to node "{found["spec"]["nodeName"]}"')
        self.bindings.append(body)
        changed = copy.deepcopy(found)
        changed["spec"]["nodeName"] = body["target"]["name"]
        changed["metadata"].setdefault("annotations", {}).update(body["metadata"].get("annotations", {}))
        self.put(changed)
        return _status(201, "", "", "Success")

    def _evict(self, key: str, body: Object) -> web.Response:
        found = self.pod(key)
        if found is None:
            return _status(404, "NotFound", f'pods "{key}" not found')
        if body["deleteOptions"]["preconditions"]["uid"] != found["metadata"]["uid"]:
            return _status(409, "Conflict", "Precondition failed: UID in precondition does not match")
        self.evictions.append(key)
        self.put(found | {"metadata": found["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        return _status(201, "", "", "Success")

    def _patch_status(self, key: str, body: Object, content_type: str) -> web.Response:
        found = self.pod(key)
        if found is None:
            return _status(404, "NotFound", f'pods "{key}" not found')
        change = dict(body["status"])
        if content_type == STRATEGIC_PATCH and "conditions" in change:
            merged = {one["type"]: one for one in [*found["status"].get("conditions", []), *change["conditions"]]}
            change["conditions"] = list(merged.values())
        status = {name: value for name, value in (found["status"] | change).items() if value is not None}
        return web.json_response(self.put(found | {"status": status}))

    def _patch_event(self, name: str, body: Object) -> web.Response:
        found = next((event for event in self.events if event["metadata"]["name"] == name), None)
        if found is None:
            return _status(404, "NotFound", f'events "{name}" not found')
        found.update(body)
        return web.json_response(found)

    def _report(self, path: str, kind: str, thing: Object) -> None:
        event = {"type": kind, "object": thing}
        self._history.append((self.version, path, event))
        for watch in self.watches:
            if watch.path == path:
                self._send(watch, event)

    def _send(self, watch: Watch, event: Object) -> None:
        if not _selected(event["object"], watch.selector):
            event = event | {"type": "DELETED"}
        watch.lines.put_nowait(json.dumps(event).encode() + b"\n")

    def _place(self, thing: Object) -> tuple[str, str]:
        meta = thing["metadata"]
        if thing.get("kind") == "Workload":
            return workloads(thing["apiVersion"].partition("/")[2]), f"{meta['namespace']}/{meta['name']}"
        if thing.get("kind") == "ResourceSlice":
            return resource_slices(thing["apiVersion"].partition("/")[2]), meta["name"]
        if "disruptionsAllowed" in thing.get("status", {}):
            return BUDGETS, f"{meta['namespace']}/{meta['name']}"
        if thing["kind"] == "Pod" if "kind" in thing else "namespace" in meta:
            return "/api/v1/pods", f"{meta['namespace']}/{meta['name']}"
        return "/api/v1/nodes", meta["name"]


def answer_with(verb: str, ending: str, code: int, reason: str = "", message: str = "") -> Fault:
    """Refuse the next such call."""

    async def refuse() -> web.StreamResponse:
        return _status(code, reason, message)

    return lambda request, _: refuse() if _is(request, verb, ending) else None


def lose_reply(verb: str, ending: str, *, after: bool = True) -> Fault:
    """Hang up on the next such call, after doing (or before doing) what it requests."""

    async def lose(request: web.Request, handler: Handler) -> web.StreamResponse:
        if after:
            await handler(request)
        hang_up(request)
        return web.Response()

    return lambda request, handler: lose(request, handler) if _is(request, verb, ending) else None


def hold(verb: str, ending: str, until: asyncio.Event, reached: asyncio.Event) -> Fault:
    """Let the next such call wait: `reached` is set when it came, it goes on when `until` is."""

    async def wait(request: web.Request, handler: Handler) -> web.StreamResponse:
        reached.set()
        await until.wait()
        return await handler(request)

    return lambda request, handler: wait(request, handler) if _is(request, verb, ending) else None


def say_raw(verb: str, ending: str, body: bytes) -> Fault:
    """Answer the next such call with these bytes."""

    async def answer() -> web.StreamResponse:
        return web.Response(body=body)

    return lambda request, _: answer() if _is(request, verb, ending) else None


def hang_up(request: web.Request) -> None:
    """Drop the connection without another word."""
    if request.transport is not None:
        request.transport.abort()


def _is(request: web.Request, verb: str, ending: str) -> bool:
    requested = "WATCH" if "watch" in request.query else request.method
    return requested == verb and request.path.endswith(ending)


def _selected(thing: Object, selector: str) -> bool:
    phase = thing.get("status", {}).get("phase", "")
    return not (selector and f"status.phase!={phase}" in selector.split(","))


def _status(code: int, reason: str, message: str, status: str = "Failure") -> web.Response:
    body = {"kind": "Status", "status": status, "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code)
