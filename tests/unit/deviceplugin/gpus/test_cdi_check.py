"""A node whose container runtime ignores CDI devices says so."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from deviceplugin.gpus.cdi_check import CDI_IGNORED, CDI_SETTING, CdiCheck
from kube.objects import Metadata, Pod

POD = Pod(Metadata(name="a", namespace="default", uid="uid-a"))


class Told:
    """What operators and users are told."""

    def __init__(self) -> None:
        self.node, self.pods, self.used = list[tuple[str, str, str]](), list[tuple[str, str, str]](), True
        self.changes = asyncio.Queue[int]()
        self.check = CdiCheck(self, lambda: self.used, lambda _: self.changes.get())

    def cdi_on_node(self, reason: str, note: str, level: str) -> None:
        self.node.append((reason, level, note))

    def cdi_ignored(self, pod: Pod, container: str, note: str) -> None:
        self.pods.append((pod.uid, container, note))

    @property
    def reasons(self) -> list[tuple[str, str]]:
        return [(reason, level) for reason, level, _ in self.node]


def test_containerd_2_is_no_subject() -> None:
    told = Told()
    told.check.runtime("containerd://2.1.5")
    told.check.started(POD, "main", has_devices=True)
    assert (told.node, told.pods, told.check.failing) == ([], [], "")


def test_containerd_1_7_is_reported_once_and_may_serve_pods() -> None:
    """Nothing shows yet that the setting is missing."""
    told = Told()
    for _ in range(3):
        told.check.runtime("containerd://1.7.27")
        told.check.described()
    assert told.reasons == [(CDI_SETTING, "Normal")]
    assert "enable_cdi = true" in told.node[0][2]
    assert told.check.failing == ""


def test_a_container_without_devices_makes_the_node_not_ready_and_its_pod_is_told() -> None:
    told = Told()
    told.check.runtime("containerd://1.7.27")
    told.check.started(POD, "main", has_devices=False)
    assert told.reasons == [(CDI_SETTING, "Normal"), (CDI_IGNORED, "Warning")]
    ((uid, container, note),) = told.pods
    assert (uid, container) == ("uid-a", "main")
    assert "containerd 1.7.27" in note
    assert "enable_cdi = true" in note
    assert "started without its devices by containerd 1.7.27" in told.check.failing


def test_each_pod_is_told_and_the_node_once() -> None:
    told = Told()
    for _ in range(3):
        told.check.started(POD, "main", has_devices=False)
    told.check.started(None, "main", has_devices=False)  # its pod is gone
    assert (len(told.pods), told.reasons) == (3, [(CDI_IGNORED, "Warning")])


def test_a_container_with_devices_ends_it() -> None:
    told = Told()
    told.check.runtime("containerd://1.7.27")
    told.check.started(POD, "main", has_devices=False)
    told.check.started(POD, "main", has_devices=True)
    assert told.check.failing == ""
    told.check.started(POD, "main", has_devices=False)
    assert told.reasons[-2:] == [(CDI_IGNORED, "Warning")] * 2


def test_another_version_of_the_runtime_is_given_a_chance() -> None:
    told = Told()
    told.check.runtime("containerd://1.7.27")
    told.check.started(POD, "main", has_devices=False)
    told.check.runtime("containerd://2.0.2")
    assert told.check.failing == ""


def test_a_runtime_without_cdi_is_not_ready_before_any_container_starts() -> None:
    told = Told()
    told.check.runtime("containerd://1.6.33")
    assert told.reasons == [(CDI_IGNORED, "Warning")]
    assert "containerd 1.6.33 does not know CDI" in told.check.failing
    told.check.started(POD, "main", has_devices=True)  # whatever the version says
    assert told.check.failing == ""


def test_where_nvidias_runtime_gives_the_devices_nothing_is_reported() -> None:
    told = Told()
    told.used = False
    told.check.runtime("containerd://1.6.33")
    told.check.started(POD, "main", has_devices=False)
    assert (told.node, told.pods, told.check.failing) == ([], [], "")


async def test_what_the_version_says_is_reported_when_the_access_mode_is_known() -> None:
    told = Told()
    told.used = False
    told.check.runtime("containerd://1.7.27")
    running = asyncio.create_task(told.check.run())
    await asyncio.sleep(0)
    told.used = True
    told.changes.put_nowait(1)
    async with asyncio.timeout(10):
        while not told.node:  # noqa: ASYNC110 (no event marks it)
            await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert told.reasons == [(CDI_SETTING, "Normal")]


@pytest.mark.parametrize("version", ["docker://27.0.1", "", "cri-o://1.34.0"])
def test_of_other_runtimes_only_a_container_is_proof(version: str) -> None:
    told = Told()
    told.check.runtime(version)
    assert (told.node, told.check.failing) == ([], "")
    told.check.started(POD, "main", has_devices=False)
    assert told.check.failing
