"""A start of a pod that the watch does not show: is it gone, or is that unknown?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from deviceplugin import admission as prestart
from deviceplugin.admission import ApiUnavailable, PodGone, PreStart, StartRefused
from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.grants.allocation_record import RECORD, Record
from deviceplugin.grants.grant_directories import GrantDirectories
from deviceplugin.pods.burst import BurstUpdater
from deviceplugin.pods.node_pods import NodePods, fetch_pod
from deviceplugin.pods.usage_records import UsageRecords
from tests.builders import pod
from tests.fake_api import FakeApi, answer_with, lose_reply, say_raw
from tests.unit.deviceplugin.builders import inventory, uuid
from tests.unit.deviceplugin.simulated_plugin import SilentObserver
from vgpu.api.codec import assignment_to_json
from vgpu.api.grant import AssignedGpu, Assignment, Grant, GrantGpu
from vgpu.api.names import DEFAULT

MEM = DEFAULT.gpu_mem
IDS = [f"{uuid(0)}-0"]
RETRIES = 8
"""More than the client makes of one call."""


@dataclass
class FixedRecords:
    """The kubelet's: it starts container main of pod a."""

    named: tuple[str, str] | None = ("default", "a")

    async def holders(self, resource: str, ids: Collection[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:  # noqa: ARG002
        return self.named, ("main",)


@dataclass
class NodeUnderAdmission:
    """A plugin whose watch brings nothing, and an API server."""

    api: FakeApi
    grants: GrantDirectories
    start: PreStart
    records: FixedRecords

    usage_records: UsageRecords
    arbiters: list[socket.socket] = field(default_factory=list)

    def allocated(self, name: str = "a") -> str:
        """The kubelet called Allocate for the pod; the arbiter listens. Returns the key."""
        record = Record(tuple(IDS), f"uid-default-{name}", "default", name, "main", (uuid(0),), 0.0, 0)
        key = self.grants.prepare(record)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(self.grants.socket(key)))
        listening.listen()
        self.arbiters.append(listening)
        return key

    def granted(self, name: str = "a") -> str:
        """The container started before."""
        key = self.allocated(name)
        self.grants.write(key, Grant("default", name, f"uid-default-{name}", "main", (GrantGpu(uuid(0), 1024),)))
        return key

    def there(self, phase: str = "Pending") -> None:
        """The pod, where only the API server knows it."""
        text = assignment_to_json(Assignment({"main": (AssignedGpu(uuid(0), 0, 1024),)}))
        one = pod("a").asking(mib=1024).on("n1").assigned(text=text).with_phase(phase, started=True)
        self.api.put(one.plain(), reported=False)

    def away(self, fault: Any) -> None:
        self.api.faults += [fault] * RETRIES


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's must be below 108 characters."""
    with TemporaryDirectory(prefix="node-") as made:
        yield Path(made)


@pytest.fixture
def on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(prestart, "WATCH_WAIT_S", 0.0)
    (folder / "image.so").write_bytes(b"library")

    @asynccontextmanager
    async def made() -> AsyncIterator[NodeUnderAdmission]:
        pods, grants = NodePods(DEFAULT, 1024), GrantDirectories(folder / "state", folder / "image.so")
        grants.install()
        never = asyncio.Event()

        async def changed() -> None:
            await never.wait()

        pods.attach(changed, lambda: True)
        records, usage_records = FixedRecords(), UsageRecords(folder / "state", "boot")
        async with FakeApi() as api, api.client() as client:
            start = PreStart(
                DEFAULT, 1024, pods=pods, records=records, ledger=DeviceLedger(pods, inventory, DEFAULT), grants=grants,
                usage_records=usage_records, bursts=BurstUpdater(pods, grants, inventory, SilentObserver()), inventory=inventory, fetch=partial(fetch_pod, client),
            )  # fmt: skip
            node = NodeUnderAdmission(api, grants, start, records, usage_records)
            try:
                yield node
            finally:
                for listening in node.arbiters:
                    listening.close()

    return made


AWAY = {
    "refuses": answer_with("GET", "/pods/a", 503, "ServiceUnavailable", "etcd is away"),
    "hangs up": lose_reply("GET", "/pods/a", after=False),
    "forbids": answer_with("GET", "/pods/a", 403, "Forbidden", "not yours"),
    "garbles": say_raw("GET", "/pods/a", b"<html>"),
}


@pytest.mark.parametrize("fault", AWAY.values(), ids=AWAY)
async def test_an_api_server_that_does_not_report_refuses_this_start_only(on: Any, fault: Any) -> None:
    async with on() as node:
        node.there()
        key = node.allocated()
        node.away(fault)
        with pytest.raises(
            ApiUnavailable, match=r"does not answer whether it exists \(.+\).*the kubelet tries it again"
        ):
            await node.start(MEM, IDS)
        node.api.faults.clear()
        await node.start(MEM, IDS)
        assert node.grants.read(key).pod == "a"


async def test_a_container_that_started_before_starts_with_its_grant_while_the_api_server_is_away(on: Any) -> None:
    async with on() as node:
        key = node.granted()
        before = node.grants.read(key)
        node.away(AWAY["refuses"])
        await node.start(MEM, IDS)
        assert node.grants.read(key) == before


async def test_the_grant_of_another_pod_starts_no_container(on: Any) -> None:
    async with on() as node:
        node.granted("b")
        node.away(AWAY["refuses"])
        with pytest.raises(ApiUnavailable, match="pod default/a is not known here yet"):
            await node.start(MEM, IDS)


@pytest.mark.parametrize("granted", [False, True])
async def test_a_pod_that_is_gone_does_not_start_whatever_it_was_granted(on: Any, *, granted: bool) -> None:
    async with on() as node:
        if granted:
            node.granted()
        with pytest.raises(PodGone, match="pod default/a is gone: the API server has none of that name"):
            await node.start(MEM, IDS)


async def test_a_pod_that_has_ended_is_gone(on: Any) -> None:
    async with on() as node:
        node.there("Succeeded")
        with pytest.raises(PodGone, match="pod default/a is gone: it ended in phase Succeeded"):
            await node.start(MEM, IDS)


async def test_devices_that_are_in_no_record_start_no_container(on: Any) -> None:
    async with on() as node:
        node.records.named = None
        with pytest.raises(
            StartRefused, match=f"the kubelet's records name no container with these 1 devices of {MEM}"
        ):
            await node.start(MEM, IDS)


DAMAGE = {
    "empty": b"",
    "truncated": b'{"v":2,"sha256":"0',
    "corrupt": b'{"v":2,"sha256":"00","body":{}}',
    "missing": None,
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
async def test_an_init_container_whose_record_is_damaged_is_known_by_its_grant(on: Any, content: bytes | None) -> None:
    async with on() as node:
        key = node.granted()
        record_file = node.grants.folder(key) / RECORD
        record_file.unlink() if content is None else record_file.write_bytes(content)
        node.records.named = None
        node.there()
        await node.start(MEM, IDS)
        record = node.grants.record(key)
        assert (record.key, record.pod) == (key, "a")


async def test_a_record_of_a_later_plugin_is_left_as_it_is_and_its_container_starts_with_its_grant(on: Any) -> None:
    async with on() as node:
        key = node.granted()
        record_file = node.grants.folder(key) / RECORD
        record_file.write_bytes(b'{"v": 3, "body": "of later"}')
        node.there()
        await node.start(MEM, IDS)
        assert record_file.read_bytes() == b'{"v": 3, "body": "of later"}'
        assert node.grants.read(key).pod == "a"


async def test_a_container_without_a_directory_does_not_start(on: Any) -> None:
    async with on() as node:
        node.there()
        with pytest.raises(
            StartRefused, match="container main with 1 devices has no grant directory: it was removed"
        ) as no:
            await node.start(MEM, IDS)
        assert no.value.pod.metadata.name == "a"


async def test_the_directory_of_another_pod_is_never_written_again(on: Any) -> None:
    async with on() as node:
        theirs = node.granted("b")
        before = [(path, path.lstat().st_mtime_ns) for path in sorted(node.grants.folder(theirs).iterdir())]
        node.there()
        with pytest.raises(StartRefused, match=f"the newest of these devices is {theirs}, of pod UID uid-default-b"):
            await node.start(MEM, IDS)
        ours = node.allocated()
        await node.start(MEM, IDS)
        assert node.grants.read(ours).pod == "a"
        assert node.grants.read(theirs).pod == "b"
        assert before == [(path, path.lstat().st_mtime_ns) for path in sorted(node.grants.folder(theirs).iterdir())]


async def test_what_a_pod_uses_is_in_its_record_before_it_starts(on: Any) -> None:
    async with on() as node:
        node.there()
        node.allocated()
        await node.start(MEM, IDS)
        (record_file,) = node.usage_records
        assert (record_file.uid, record_file.namespace, record_file.pod) == ("uid-default-a", "default", "a")
        assert record_file.held == (AssignedGpu(uuid(0), 0, 1024),)
        assert record_file.ids == {MEM: tuple(IDS)}
        again = UsageRecords(node.grants.folder("x").parents[1], "boot")
        again.load()
        assert list(again) == [record_file]


async def test_a_whole_gpu_is_in_the_record_of_its_pod_before_it_starts(on: Any) -> None:
    async with on() as node:
        text = assignment_to_json(Assignment({"main": (AssignedGpu(uuid(0), 0, 16 * 1024, 100, "whole"),)}))
        one = pod("a").asking(gpus=1).on("n1").assigned(text=text).with_phase("Pending", started=True)
        node.api.put(one.plain(), reported=False)
        await node.start(DEFAULT.gpu, [uuid(0)])
        (record_file,) = node.usage_records
        assert record_file.held == (AssignedGpu(uuid(0), 0, 16 * 1024, 100, "whole"),)
        assert record_file.ids == {DEFAULT.gpu: (uuid(0),)}
