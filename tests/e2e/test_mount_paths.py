"""Attacks on the place where a container has its grant: by a volume that two containers share, and by the pod's own mounts.

What each line of an attack must come to is in the test's name: harmless, refused, or killed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hack.cluster import images
from hack.cluster.layout import Layout
from hack.waiting import eventually
from tests.e2e import linked_image
from tests.e2e.cluster import Cluster
from tests.e2e.objects import RESTRICTED, container, pod, share

VOLUMES = [{"name": "scratch", "emptyDir": {}}]
LINKED = "localhost/tangram-workload:linked"
SEES = "set -e; grep -c libtangram.so /proc/self/maps; cat /.tangram/grant /etc/ld.so.preload; grep -c ' /.tangram ' /proc/self/mountinfo"
REMOVE = "rm -rf /shared/* /shared/.[!.]* 2>/dev/null; mkdir -p /shared/tangram; find /shared; exec sleep 600"


def at(*paths: str) -> list[dict[str, str]]:
    return [{"name": "scratch", "mountPath": path} for path in paths]


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> str:
    cluster.make_namespace(namespace, **{"pod-security.kubernetes.io/enforce": "restricted"})
    return namespace


@pytest.mark.parametrize("path", ["/run", "/var/run", "/etc/nginx"])
def test_a_neighbour_that_empties_a_shared_volume_unloads_nothing(cluster: Cluster, restricted: str, path: str) -> None:
    """In the release before, a volume at /run held the mount point of the grant: removed there, the kernel detached the grant."""
    main = container(mem="8Gi", run=["sleep", "600"], volumeMounts=at(path), securityContext=RESTRICTED)
    helper = container(
        "helper", run=["sh", "-c", REMOVE], volumeMounts=at("/shared"), securityContext=RESTRICTED
    )  # as any user may in an emptyDir
    cluster.run(restricted, pod("shared", main, helper, volumes=VOLUMES))
    cluster.exec(restricted, "shared", "sh", "-c", REMOVE.replace("exec sleep 600", "true"), container="helper")
    seen = cluster.exec(restricted, "shared", "sh", "-c", SEES, container="main")
    assert "container main" in seen
    assert "/.tangram/libtangram.so" in seen
    with pytest.raises(Exception, match="after 7 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY"):
        cluster.exec(restricted, "shared", "gpuview", "grab", "12Gi", container="main")
    with pytest.raises(Exception, match="after 7 GiB the driver said CUDA_ERROR_OUT_OF_MEMORY"):
        cluster.exec(restricted, "shared", "env", "-u", "LD_PRELOAD", "gpuview", "grab", "12Gi", container="main")


def test_a_container_whose_root_is_read_only_has_its_grant(cluster: Cluster, restricted: str) -> None:
    security = RESTRICTED | {"readOnlyRootFilesystem": True}
    cluster.run(restricted, share("frozen", "8Gi", securityContext=security))
    with pytest.raises(Exception, match="Read-only file system"):
        cluster.exec(restricted, "frozen", "touch", "/tmp/x")
    assert "container main" in cluster.exec(restricted, "frozen", "sh", "-c", SEES)


def test_root_in_its_container_cannot_remove_or_move_the_mount_point(cluster: Cluster, namespace: str) -> None:
    cluster.run(namespace, share("root", "8Gi", run=["sleep", "600"]))
    tried = (
        "rmdir /.tangram; mv /.tangram /elsewhere; rm -rf /.tangram; umount /.tangram; rm -f /etc/ld.so.preload; true"
    )
    cluster.exec(namespace, "root", "sh", "-c", tried)
    assert "container main" in cluster.exec(namespace, "root", "sh", "-c", SEES)


@pytest.mark.parametrize(
    "path",
    ["/", "/etc/.", "/etc/ld.so.preload", "//.tangram", "/var/run/tangram", "/run/../etc", "/proc/self/root/etc"],
)
def test_a_volume_over_the_grant_or_its_parents_is_refused(cluster: Cluster, namespace: str, path: str) -> None:
    """By the webhook, and by the policy in a namespace that the webhook leaves out."""
    thing = pod("covering", container(mem="8Gi", volumeMounts=at(path)), volumes=VOLUMES)
    for where in (namespace, "kube-system"):
        assert (
            f"container main mounts volume scratch at {path}, which a pod with a GPU share may not"
            in cluster.refused(where, thing)
        )


@pytest.fixture
def linked(tmp_path: Path) -> str:
    """Name of an image with a link where the grant is mounted. Nobody sees it at admission: the runtime mounts the grant at /shared."""
    (workload,) = (path for path in images.current() if path.name.startswith("tangram-workload"))
    linked_image.write(workload, tmp_path / "linked.tar", LINKED, {".tangram": "/shared"})
    images.load(Layout(), tmp_path / "linked.tar")
    return LINKED


def behind_a_link(name: str, image: str, *run: str, **more: Any) -> dict[str, Any]:
    """The volume covers the grant, and the library is not loaded."""
    main = container(mem="8Gi", run=run, image=image, volumeMounts=at("/shared"))
    return pod(name, main, volumes=VOLUMES, **more)


def test_an_image_with_a_link_where_the_grant_belongs_is_reported(
    cluster: Cluster, namespace: str, linked: str
) -> None:
    cluster.run(namespace, behind_a_link("linked", linked, "sleep", "600"))
    assert "libtangram" not in cluster.exec(namespace, "linked", "sh", "-c", "cat /proc/self/maps")
    told = eventually(
        lambda: [event for event in cluster.events(namespace, "linked") if event.startswith("GrantMisplaced")],
        "an Event about the grant",
        timeout_s=20,
    )
    assert "its grant is mounted at /shared instead of /.tangram" in told[0]


def test_a_link_in_a_volume_that_leads_to_the_grant_is_reported(cluster: Cluster, restricted: str) -> None:
    """Without an image of one's own: an init container makes the link, and a second volume is mounted at it."""
    volumes = [*VOLUMES, {"name": "second", "emptyDir": {}}]
    mounts = [*at("/shared"), {"name": "second", "mountPath": "/shared/link"}]
    init = container(
        "init", run=["ln", "-s", "/.tangram", "/shared/link"], volumeMounts=at("/shared"), securityContext=RESTRICTED
    )
    main = container(mem="8Gi", run=["sleep", "600"], volumeMounts=mounts, securityContext=RESTRICTED)
    cluster.run(restricted, pod("nested", main, init=[init], volumes=volumes))
    told = eventually(
        lambda: [event for event in cluster.events(restricted, "nested") if event.startswith("GrantMisplaced")],
        "an Event about the grant",
        timeout_s=20,
    )
    assert "its grant at /.tangram is covered by another mount" in told[0]


def test_an_image_with_a_link_where_the_grant_belongs_is_killed_above_its_limit(
    cluster: Cluster, namespace: str, linked: str
) -> None:
    """The arbiter knows the process by its cgroup."""
    kill = {"tangram.sh/over-limit": "kill"}
    cluster.create(namespace, behind_a_link("linked", linked, "gpuview", "hold", "12Gi", annotations=kill))
    cluster.ended(namespace, "linked", "Failed")
    (status,) = cluster.pod(namespace, "linked")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 137
    eventually(
        lambda: any(event.startswith("OverMemoryLimit") for event in cluster.events(namespace, "linked")), "an Event"
    )
