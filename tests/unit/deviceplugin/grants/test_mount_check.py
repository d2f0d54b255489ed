"""A container that does not find its grant is reported, once, with where the grant is."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import suppress

import pytest

from deviceplugin.grants import mount_check as mounted
from deviceplugin.grants.allocation_record import Record
from deviceplugin.grants.mount_check import CHECKS, TIMEOUT_S, MountCheck
from kube.objects import Metadata, Pod

KEY, UID = "k" * 32, "uid-a"


def mount(at: str) -> str:
    return f"40 22 8:1 /var/lib/tangram/grants/{KEY} {at} ro - ext4 /dev/sda1 rw\n"


class NodeWithMounts:
    """What the plugin knows and sees. Each look has its mounts; the last one stays."""

    def __init__(self, *looks: list[tuple[str, str]]) -> None:
        self.looks, self.looked, self.reported, self.now = list(looks), 0, list[tuple[str, str, str]](), 0.0
        self.devices: list[bool | None] = [None]
        self.seen = list[tuple[str, str, bool]]()

    def pod(self, uid: str) -> Pod | None:
        return Pod(Metadata(name="a", uid=uid)) if uid == UID else None

    def records(self) -> dict[str, Record]:
        return {KEY: Record((), UID, "default", "a", "main", (), 0.0)}

    def mounts(self, uids: Collection[str]) -> Iterator[tuple[str, str, str]]:
        assert set(uids) == {UID}
        seen = self.looks[min(self.looked, len(self.looks) - 1)]
        self.looked += 1
        self.now += 1.0
        yield from ((uid, mountinfo, str(at)) for at, (uid, mountinfo) in enumerate(seen))

    def has_device(self, pid: str, name: str) -> bool | None:
        """By the number of the look; the last one stays."""
        assert (pid, name) == ("0", "nvidiactl")
        return self.devices[min(self.looked, len(self.devices)) - 1]

    def device_seen(self, pod: Pod | None, container: str, *, has_devices: bool) -> None:
        assert pod is not None
        self.seen.append((pod.uid, container, has_devices))

    def report(self, pod: Pod, container: str, note: str) -> None:
        self.reported.append((pod.uid, container, note))


async def looked(node: NodeWithMounts, monkeypatch: pytest.MonkeyPatch) -> NodeWithMounts:
    """Until it has looked as long as it wants."""
    monkeypatch.setattr(mounted, "CHECK_S", 0.0)
    looking = MountCheck(
        node, node, node, node.report, clock=lambda: node.now, device="nvidiactl", device_seen=node.device_seen
    )
    looking.starting([KEY, "a directory without a record"])
    task = asyncio.create_task(looking.run())
    async with asyncio.timeout(30):
        while looking._until.get(KEY) is not None:  # noqa: ASYNC110 (no event marks its stop)
            await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return node


async def test_a_grant_in_its_place_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await looked(NodeWithMounts([], [(UID, mount("/.tangram"))]), monkeypatch)
    assert (node.looked, node.reported) == (2, [])


async def test_a_grant_behind_a_link_of_the_image_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await looked(NodeWithMounts([(UID, mount("/shared")), (UID, "")]), monkeypatch)
    assert node.looked == CHECKS
    ((uid, container, note),) = node.reported
    assert (uid, container) == (UID, "main")
    assert "its grant is mounted at /shared instead of /.tangram" in note


async def test_a_container_that_is_still_made_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await looked(
        NodeWithMounts([(UID, mount("/shared"))], [(UID, mount("/shared"))], [(UID, mount("/.tangram"))]), monkeypatch
    )
    assert node.reported == []


async def test_a_process_of_another_container_does_not_excuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    other = mount("/.tangram").replace(KEY, "other")
    assert len((await looked(NodeWithMounts([(UID, other), (UID, mount("/shared"))]), monkeypatch)).reported) == 1


async def test_a_container_that_never_starts_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    node = await looked(NodeWithMounts([]), monkeypatch)
    assert node.reported == []
    assert node.looked == pytest.approx(TIMEOUT_S, abs=1)


@pytest.mark.parametrize(("looks", "reported"), [(1, 0), (2, 1)])
async def test_a_container_that_is_gone_early_is_reported_if_it_was_seen_twice(
    monkeypatch: pytest.MonkeyPatch, looks: int, reported: int
) -> None:
    """The arbiter may have killed it."""
    node = await looked(NodeWithMounts(*[[(UID, mount("/shared"))]] * looks, []), monkeypatch)
    assert len(node.reported) == reported


async def test_a_container_with_its_grant_and_its_device_is_reported_as_such_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = NodeWithMounts([(UID, mount("/.tangram"))])
    node.devices = [True]
    await looked(node, monkeypatch)
    assert (node.seen, node.looked) == ([(UID, "main", True)], 1)


async def test_a_container_without_its_device_is_reported_after_some_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeWithMounts([(UID, mount("/.tangram"))])
    node.devices = [False]
    await looked(node, monkeypatch)
    assert (node.seen, node.looked, node.reported) == ([(UID, "main", False)], CHECKS, [])


async def test_a_device_that_comes_between_two_looks_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeWithMounts([(UID, mount("/.tangram"))])
    node.devices = [False, False, True]
    await looked(node, monkeypatch)
    assert node.seen == [(UID, "main", True)]


async def test_a_container_whose_devices_cannot_be_seen_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeWithMounts([(UID, mount("/.tangram"))])
    await looked(node, monkeypatch)
    assert (node.seen, node.looked) == ([], 1)


async def test_of_a_container_whose_grant_is_misplaced_no_device_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeWithMounts([(UID, mount("/shared"))])
    node.devices = [False]
    await looked(node, monkeypatch)
    assert node.seen == []
    assert len(node.reported) == 1
