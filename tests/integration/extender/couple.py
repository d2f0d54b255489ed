"""A kube-scheduler and its extender as containers of one pod: each is started again when it ends. And a kill at a moment that a test chooses.

    kube-scheduler --Door--> extender --Proxy--> kube-apiserver

Whatever passes either way is a `Moment`; at the one that is `fatal` the extender dies by SIGKILL, before the call is passed on or after it
was answered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import aiohttp
from aiohttp import web

from tests.apiserver import Program
from tests.fake_api import Handler, hang_up
from tests.integration.extender.harness import Extender, Proxy
from tests.integration.extender.scheduling import Stack, Thing
from tests.ports import free_port

AGAIN_S: Final = 0.3
"""From the end of a container to its next start."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The `nth` call about a pod whose path ends so, of kube-scheduler to the extender or of the extender to the API server."""

    ending: str
    when: Literal["before", "after"]
    about: str = "urgent"
    """What its path or its body has of the pod's name."""
    nth: int = 1
    method: str = "POST"

    async def has(self, request: web.Request) -> bool:
        """Is it such a call?"""
        if request.method != self.method or not request.path.endswith(self.ending):
            return False
        return self.about in request.path or self.about.encode() in await request.read()


@dataclass
class Couple:
    """Both, and which is killed when."""

    stack: Stack
    proxy: Proxy
    fatal: Moment
    died: asyncio.Event = field(default_factory=asyncio.Event)
    ended: int = 0
    """Times that kube-scheduler ended by itself."""
    passed: list[str] = field(default_factory=list)
    """Calls so far, to explain a failure."""
    _seen: int = 0
    _extender: Extender | None = None

    async def _passing(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        fatal = self.fatal
        hits = not self.died.is_set() and await fatal.has(request)
        self._seen += hits
        hits = hits and self._seen == fatal.nth
        if hits and fatal.when == "before":
            await self._kill()
        answer = await handler(request)
        if request.method != "GET":
            self.passed.append(f"{request.method} {request.path}")
        if hits and fatal.when == "after":
            await self._kill()
        return answer

    async def _kill(self) -> None:
        assert self._extender is not None
        self.passed.append("DIES")
        self.died.set()
        os.kill(self._extender.pid, 9)

    def _at_the_api(self, request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse] | None:
        self.proxy.faults.append(self._at_the_api)  # each call that it matches uses it up
        if "watch" in request.query:
            self.proxy.faults.remove(self._at_the_api)
            return None
        return self._passing(request, handler)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Couple]:
        """Until the end of the block."""
        door, port, metrics_port, secure_port = free_port(), free_port(), free_port(), free_port()
        name = f"ks-{secure_port}"
        configuration, variables = self.stack.configured({"scheduler": {"extender": {"port": door}}})
        variables = {**variables, "TANGRAM_EXTENDER_SCHEDULER_PROCESS": name}

        async def extend() -> None:
            self._extender = await self.stack.extender(variables, port, metrics_port, kubeconfig=self.proxy.kubeconfig)

        self.proxy.faults.append(self._at_the_api)
        async with _door(door, port, self._passing):
            await extend()
            program = self.stack.scheduler(configuration, secure_port, name=name)
            keeping = [asyncio.create_task(self._keep(extend)), asyncio.create_task(self._keep_scheduler(program))]
            try:
                yield self
            finally:
                for task in keeping:
                    task.cancel()
                results = await asyncio.gather(*keeping, return_exceptions=True)
                program.kill()
                if self._extender is not None:
                    await self._extender.kill()
                assert [one for one in results if not isinstance(one, asyncio.CancelledError)] == []

    async def _keep(self, extend: Callable[[], Awaitable[None]]) -> None:
        while True:
            assert self._extender is not None
            await self._extender.ended()
            await asyncio.sleep(AGAIN_S)
            await extend()

    async def _keep_scheduler(self, program: Program) -> None:
        while True:
            process = program.process
            assert process is not None
            while process.poll() is None:  # noqa: ASYNC110 - no event comes from another process
                await asyncio.sleep(0.02)
            self.ended += 1
            await asyncio.sleep(AGAIN_S)
            program.start()


@asynccontextmanager
async def _door(
    at: int, to: int, passing: Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]
) -> AsyncIterator[None]:
    """Passes calls on to the extender; closes the connection where it does not run."""
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{to}", connector=aiohttp.TCPConnector(force_close=True)
    ) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            with suppress(aiohttp.ClientError):
                async with http.request(request.method, request.path, data=await request.read()) as answer:
                    return web.Response(
                        body=await answer.read(), status=answer.status, content_type=answer.content_type
                    )
            hang_up(request)
            return web.Response()

        async def serve(request: web.Request) -> web.StreamResponse:
            return await passing(request, forward)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", at).start()
        try:
            yield
        finally:
            await runner.cleanup()


@asynccontextmanager
async def couple(stack: Stack, folder: Path, fatal: Moment) -> AsyncIterator[Couple]:
    """Both run, and nothing waits."""
    async with Proxy(stack.server, folder).running() as proxy, Couple(stack, proxy, fatal).running() as made:
        yield made


def waits_for(pod: Thing) -> str:
    """Why a pod is not bound, to explain a failure."""
    return "; ".join(str(one.get("message")) for one in pod["status"].get("conditions", []))
