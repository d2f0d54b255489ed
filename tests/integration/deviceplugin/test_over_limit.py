"""A plugin process and an arbiter that reports containers over the limit: what users see, what is deleted, what a broken arbiter changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from tests.fake import fake_driver
from tests.integration.deviceplugin.harness import Node
from tests.integration.deviceplugin.test_plugin import Start, inventory, running, sharing
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import CONTAINER_ID
from vgpu.api.names import DEFAULT
from vgpu.protocol.status import (
    BypassStatus,
    ContainerStatus,
    GpuStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    StatusDocument,
    SwapStatus,
    UngrantedStatus,
    UnlistedStatus,
    encode_status,
)

__all__ = ["fake_driver", "running"]

MIB = 2**20
SILENT = "tangram_deviceplugin_arbiter_status_failures_total"


def over(pod: str, uuid: str, action: str, *, over: bool = True) -> ContainerStatus:
    """A container granted 4096 MiB; one process uses 5000, another 96."""
    gpus = (GpuStatus(uuid, 4096 * MIB, 0, 0, 0, 0),)
    processes = tuple(
        ProcessStatus(pid, 1, command, (ProcessGpu(uuid, 0, 0, mib * MIB),))
        for pid, command, mib in ((4711, "/bin/miner --all", 5000), (4712, "sh", 96))
    )
    uid = f"uid-default-{pod}"
    return ContainerStatus("k", f"default/{pod}", uid, "main", "standard", 2, action, over, gpus, processes)


async def admitted(made: Node, name: str) -> str:
    """A pod that runs; the UUID of its GPU."""
    one = sharing(name, inventory(made), 0, 4)
    made.api.put(one.plain())
    await made.kubelet.admit(one.plain())
    return inventory(made).gpus[0].uuid


async def reported(made: Node, count: int) -> list[str]:
    async with asyncio.timeout(10):
        while len(made.api.events) < count:
            await made.api.news.wait()
    return [event["note"] for event in made.api.events]


async def count(made: Node, metric: str) -> float:
    _, numbers = await made.get("/metrics")
    return sum(float(line.rpartition(" ")[2]) for line in numbers.splitlines() if line.startswith(metric))


async def until_more(made: Node, metric: str, than: float) -> None:
    async with asyncio.timeout(10):
        while await count(made, metric) <= than:  # noqa: ASYNC110 (in another process: there is no event to wait for)
            await asyncio.sleep(0.05)


async def test_a_container_over_its_limit_is_reported_once_and_its_pod_stays(running: Start) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        async with await made.arbiter_says(encode_status(StatusDocument((over("a", uuid, "report"),)))):
            (note,) = await reported(made, 1)
            await until_more(made, "tangram_deviceplugin_over_limit_containers", 0)
        assert note == (
            f"container main uses 5096 MiB of {uuid} and was granted 4096 MiB, 5000 MiB of it by process 4711"
            " (/bin/miner --all); policy report: nothing more is done"
        )
        (event,) = made.api.events
        assert (event["reason"], event["type"]) == ("OverMemoryLimit", "Warning")
        assert event["regarding"]["fieldPath"] == "spec.containers{main}"
        assert made.api.deleted == []


async def test_with_policy_evict_the_pod_is_deleted_once(running: Start) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        document = encode_status(StatusDocument((over("a", uuid, "evict"),)))
        async with await made.arbiter_says(document):
            await reported(made, 1)
            await made.logged("pod deleted", pod="default/a", reason="over-limit")
        before = await count(made, SILENT)
        await until_more(made, SILENT, before)  # at least one look without an arbiter
        async with await made.arbiter_says(document):
            await reported(made, 1)
            await until_more(made, "tangram_deviceplugin_over_limit_containers", 0)
        ((name, options),) = made.api.deleted
        assert (name, options["preconditions"]) == ("a", {"uid": "uid-default-a"})
        assert len(made.api.events) == 1


@pytest.mark.parametrize(
    "broken",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b'"version":1', b'"version":2'),
        lambda _: b"",
    ],
    ids=["cut off", "newer", "nothing"],
)
async def test_a_status_that_cannot_be_read_is_counted_and_changes_nothing(
    running: Start, broken: Callable[[bytes], bytes]
) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        document = encode_status(StatusDocument((over("a", uuid, "evict"),)))
        async with await made.arbiter_says(broken(document)):
            await until_more(made, f'{SILENT}{{reason="unreadable"}}', 1)
        assert made.api.events == []
        assert made.api.deleted == []
        assert (await made.get("/readyz"))[0] == 200
        warned = [line for line in made.log if line["event"] == "the arbiter's status cannot be read"]
        assert len(warned) == 1
        async with await made.arbiter_says(document):
            await reported(made, 1)


async def test_without_an_arbiter_only_a_number_reports(running: Start) -> None:
    async with running() as made:
        await until_more(made, f'{SILENT}{{reason="unreachable"}}', 0)
        warnings = [line["event"] for line in made.log if line["level"] in ("warning", "error")]
        assert set(warnings) <= {"tried whether the driver suspends"}, "the program that tries it is not installed here"
        assert (await made.get("/readyz"))[0] == 200


@pytest.mark.parametrize(("preference", "operator", "expected"), [("evict", "report", "evict"), ("evict", "kill", "kill"), ("", "report", "report")])  # fmt: skip
async def test_the_grant_carries_the_stricter_policy(
    running: Start, preference: str, operator: str, expected: str
) -> None:
    async with running("--guard-policy", operator, "--clear-memory", "true") as made:
        one = sharing("a", inventory(made), 0, 4)
        one = one.annotated(over_limit=preference) if preference else one
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        folder = made.arbiter_listens("a")
        await made.kubelet.start_container("a", "main")
        grant = grant_from_text((folder / "grant").read_text())
        assert (grant.over_limit_action, grant.clear) == (expected, True)


async def test_a_bypass_makes_an_event_on_the_pod_and_with_evict_the_pod_is_deleted(running: Start) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        bypass = BypassStatus(uuid, (4711,), 5096 * MIB, 4096 * MIB, "evict")
        found = msgspec.structs.replace(over("a", uuid, "report", over=False), bypasses=(bypass,))
        async with await made.arbiter_says(encode_status(StatusDocument((found,)))):
            (note,) = await reported(made, 1)
            await made.logged("pod deleted", pod="default/a", reason="bypass")
        assert note.endswith(
            "process 4711 (/bin/miner --all) goes around the library; arbiter.bypass: the pod is deleted"
        )
        (event,) = made.api.events
        assert (event["reason"], event["regarding"]["name"]) == ("LimitBypassed", "a")
        assert [name for name, _ in made.api.deleted] == ["a"]


async def test_a_relay_of_processes_that_are_killed_makes_one_event(running: Start) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        of = "uid-default-a", "default/a", "main", uuid
        relay = tuple(
            KillStatus(f"{pid}-1", *of, pid, "miner", (5000 + pid) * MIB, 4096 * MIB, bypass=True) for pid in range(60)
        )
        async with await made.arbiter_says(encode_status(StatusDocument((), kills=relay))):
            (note,) = await reported(made, 1)
            await made.logged(
                "killed over the memory limit", note=note.replace("process 0", "process 59").replace("5000", "5059")
            )
        async with await made.arbiter_says(encode_status(StatusDocument((over("a", uuid, "report"),)))):
            notes = await reported(made, 2)
    assert note.endswith("process 0 (miner) went around the library and was killed")
    assert [event["reason"] for event in made.api.events] == ["LimitBypassed", "OverMemoryLimit"], notes
    assert made.api.events[0]["series"]["count"] == 32, "written when it has doubled"


async def test_memory_that_belongs_to_no_grant_makes_an_event_on_the_node(running: Start) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        found = UngrantedStatus(uuid, 4711, "/bin/miner", 700 * MIB)
        async with await made.arbiter_says(encode_status(StatusDocument((), ungranted=(found,)))):
            (note,) = await reported(made, 1)
        assert note.startswith(f"process 4711 (/bin/miner) uses 700 MiB of {uuid}")
        (event,) = made.api.events
        regarding = event["regarding"]
        assert (event["reason"], event["type"], event["metadata"]["namespace"]) == (
            "UngrantedMemory",
            "Warning",
            "default",
        )
        assert (regarding["kind"], regarding["name"], regarding["uid"]) == ("Node", "n1", "n1")
        assert made.api.deleted == []


async def test_memory_that_is_listed_for_no_process_makes_an_event_on_the_node_and_on_the_pod_that_may_use_it(
    running: Start,
) -> None:
    async with running() as made:
        uuid = await admitted(made, "a")
        found = UnlistedStatus(uuid, 2560 * MIB, 3000 * MIB, "uid-default-a", "default/a", "main", (4711,))
        async with await made.arbiter_says(encode_status(StatusDocument((), unlisted=(found,)))):
            (note, _) = await reported(made, 2)
        assert note.startswith(
            f"2560 MiB of {uuid}, which containers share, are in use and NVML lists them for no process"
        )
        regarding = {event["regarding"]["kind"]: event["regarding"]["name"] for event in made.api.events}
        assert regarding == {"Node": "n1", "Pod": "a"}
        assert {event["reason"] for event in made.api.events} == {"UnlistedMemory"}
        assert made.api.deleted == []


async def test_the_id_of_a_container_is_beside_its_grant_once_the_pods_status_has_it(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 4)
        plain = one.plain()
        made.api.put(plain)
        await made.kubelet.admit(plain)
        folder = made.arbiter_listens("a")
        await made.kubelet.start_container("a", "main")
        assert not (folder / CONTAINER_ID).exists()
        plain["status"]["containerStatuses"] = [{"name": "main", "containerID": f"containerd://{'c0' * 32}"}]
        made.api.put(plain)
        await made.logged("container known", container_id="c0" * 32)
        assert (folder / CONTAINER_ID).read_text() == f"{'c0' * 32}\n"


@pytest.mark.parametrize("enabled", [True, False])
async def test_a_stranded_container_is_a_condition_of_its_pod_where_that_is_enabled(
    running: Start, enabled: bool
) -> None:
    stays = SwapStatus(True, 400.0, "is stranded", "", 0, "", "", "kill", "no room for 300 s", "keep")
    async with running("--pod-conditions", str(enabled).lower()) as made:
        uuid = await admitted(made, "a")
        stranded = msgspec.structs.replace(over("a", uuid, "report", over=False), swap=stays)
        async with await made.arbiter_says(encode_status(StatusDocument((stranded,)))):
            await reported(made, 1)
            async with asyncio.timeout(10):
                while enabled and not conditions(made, "a"):
                    await made.api.news.wait()
            await until_more(made, "tangram_deviceplugin_stranded_containers", 0)
        assert conditions(made, "a") == ([(DEFAULT.memory_stranded, "True", "MemoryStranded")] if enabled else [])
        assert made.api.requests.count("PATCH /api/v1/namespaces/default/pods/a/status") == enabled


def conditions(made: Node, name: str) -> list[tuple[str, str, str]]:
    found = made.api.pod(f"default/{name}") or {}
    ours = [one for one in found["status"].get("conditions", []) if one["type"].startswith(DEFAULT.domain)]
    assert all("no room for 300 s" in one["message"] for one in ours)
    return [(one["type"], one["status"], one["reason"]) for one in ours]
