"""An upgrade from the release before this one, back to it, and again: pods go on with what they have, processes that start meanwhile wait, and new pods are placed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hack.images.catalogue import previous_image
from hack.kubectl import ROOT
from hack.stack import NAMESPACE, RELEASE, install_chart, uninstall_chart
from hack.waiting import eventually
from tests.e2e.cluster import Cluster
from tests.e2e.objects import container, pod, share
from tests.e2e.starting import processes_start
from tests.e2e.test_uninstall import left_in_its_namespace, node_files, second_process

WAITS_S = 30.0
"""Longest time that a process waits for an arbiter that is replaced."""


@pytest.fixture(scope="module")
def upgraded(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the previous release; afterwards with this one, as the other tests need it."""
    image = previous_image()
    built = [sys.executable, "-m", "hack.images", "build", "previous"]
    archive = subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()[-1]
    subprocess.run([sys.executable, "-m", "hack.cluster", "load", archive], cwd=ROOT, check=True)
    try:
        uninstall_chart(cluster.kubectl)
        eventually(lambda: left_in_its_namespace(cluster) == [], "the pods of this release have ended")
        assert node_files() == [], [
            one["note"] for one in cluster.api.listed("event", "default") if one.get("reason") == "FilesKept"
        ]
        repository, _, tag = image.name.rpartition("/")[2].partition(":")
        install_chart(cluster.kubectl, {"image": {"repository": repository, "tag": tag}}, str(image.root))
        cluster.wait_for_gpus()
        yield cluster
    finally:
        cluster.upgrade({})


def image_of(cluster: Cluster) -> str:
    """Which image the node's programs run."""
    (node,) = cluster.own_pods("node")
    image: str = cluster.pod(NAMESPACE, node)["spec"]["containers"][0]["image"]
    return image


def to_this_release(cluster: Cluster) -> None:
    cluster.upgrade({})


def back(cluster: Cluster) -> None:
    """As the page says."""
    cluster.kubectl.helm("rollback", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "3m")
    cluster.wait_for_the_new_parts()


@contextmanager
def amounts(cluster: Cluster) -> Iterator[set[tuple[str, str]]]:
    """(resource, capacity) of ours that the node shows meanwhile, looked at five times a second. While a device plugin is away, the kubelet has
    nothing allocatable, whoever's plugin it is."""
    seen: set[tuple[str, str]] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            capacity = cluster.node()["status"]["capacity"]
            seen.update((key, value) for key, value in capacity.items() if key.startswith("tangram.sh/"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


STEPS: tuple[tuple[str, Callable[[Cluster], None]], ...] = (
    ("upgraded", to_this_release), ("rolled-back", back), ("upgraded-again", to_this_release),
)  # fmt: skip


@pytest.mark.timeout(900)
def test_pods_go_on_and_new_ones_are_placed_while_releases_replace_each_other(
    upgraded: Cluster, namespace: str
) -> None:
    before = image_of(upgraded)
    assert before == previous_image().name
    upgraded.run(namespace, share("steady", 8, run=["gpuview", "hold", "5Gi"]), pod("whole", container(gpu=1)))
    names = ["steady", "whole"]
    with amounts(upgraded) as seen, processes_start(upgraded, namespace, pause_s=0.3) as started:
        for name, step in STEPS:
            step(upgraded)
            assert (image_of(upgraded) == before) is (name == "rolled-back")
            assert "after 1 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY" in eventually(
                lambda: second_process(upgraded, namespace), "the new arbiter serves the pod that was there before it"
            )
            upgraded.run(namespace, share(name, 1))
            assert upgraded.sees(namespace, name) == upgraded.assigned(namespace, name)
            names.append(name)
    started.must_have_waited_at_most(WAITS_S)
    for name in names:
        (status,) = upgraded.pod(namespace, name)["status"]["containerStatuses"]
        assert (status["ready"], status["restartCount"]) == (True, 0), name
    assert seen
    assert len(seen) == len({resource for resource, _ in seen}), f"an amount changed: {sorted(seen)}"
