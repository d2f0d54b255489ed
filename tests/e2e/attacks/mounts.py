"""Volumes at, above and below the places where a container has its grant and its preload file."""

from __future__ import annotations

from typing import Any, Final

from tests.e2e.attacks.attack import BOTH, Attack, Outcome
from tests.e2e.objects import RESTRICTED, container, pod

SCRATCH: Final = [{"name": "scratch", "emptyDir": {}}]
EMPTY: Final = "while true; do rm -rf /shared/* /shared/.[!.]* 2>/dev/null; mkdir -p /shared/tangram; sleep 0.2; done"
"""As any user may in an emptyDir. The kernel detaches a mount whose mount point is removed in another mount namespace."""
LOOK: Final = """
time.sleep(2)
mounts = pathlib.Path("/proc/self/mountinfo").read_text()
log(f"tried: grant mounted {' /.tangram ' in mounts}, preload file {pathlib.Path('/etc/ld.so.preload').read_text()!r}")
again("take()", PATH=os.environ["PATH"])
"""
LINKED: Final = "localhost/tangram-workload:linked"
"""Tests put it on the node: linked_image.py."""


def at(path: str) -> list[dict[str, str]]:
    return [{"name": "scratch", "mountPath": path}]


def covering(path: str) -> dict[str, Any]:
    return pod("covering", container(mem=1, volumeMounts=at(path)), volumes=SCRATCH)


def emptied(path: str) -> dict[str, Any]:
    """`main` has the volume at the path, and `helper` empties it all the time."""
    helper = container("helper", run=["sh", "-c", EMPTY], volumeMounts=at("/shared"), securityContext=RESTRICTED)
    return pod("emptied", container(mem=1, volumeMounts=at(path)), helper, volumes=SCRATCH)


def linked() -> dict[str, Any]:
    """The runtime mounts the grant into the volume, and the volume covers it."""
    return pod("linked", container(mem=1, image=LINKED, volumeMounts=at("/shared")), volumes=SCRATCH)


def nested() -> dict[str, Any]:
    """Without an image of one's own: an init container makes a link in a volume, and a second volume is mounted at it."""
    link = ["sh", "-c", "ln -s /.tangram /shared/link"]
    init = container("init", run=link, volumeMounts=at("/shared"), securityContext=RESTRICTED)
    main = container(mem=1, volumeMounts=[*at("/shared"), {"name": "second", "mountPath": "/shared/link"}])
    return pod("nested", main, init=[init], volumes=[*SCRATCH, {"name": "second", "emptyDir": {}}])


PLAIN: Final = 'os.environ.pop("LD_PRELOAD", None); again("take()", PATH=os.environ["PATH"])'

COVERED: Final = (
    "/",
    "/etc/.",
    "/etc/ld.so.preload",
    "//.tangram",
    "/.tangram/socket",
    "/var/run/tangram",
    "/run/../etc",
    "/proc/self/root/etc",
)

ATTACKS: Final = (
    *(
        Attack(
            name=f"volume-{number}",
            does=f"A volume is mounted at {path}, by the path as it is written.",
            outcome=Outcome.REFUSED,
            unwatched=True,
            prints=f"container main mounts volume scratch at {path}, which a pod with a GPU share may not",
            pod=covering(path),
        )
        for number, path in enumerate(COVERED, 1)
    ),
    *(
        Attack(
            name=f"emptied{path.replace('/', '-')}",
            does=f"A container has an emptyDir at {path}, and another container of the pod removes what is in it.",
            outcome=Outcome.HARMLESS,
            prints="tried: grant mounted True, preload file '/.tangram/libtangram.so",
            pod=emptied(path),
            script=LOOK,
        )
        for path in ("/run", "/var/run", "/etc/nginx")
    ),
    Attack(
        name="moved-mount-point",
        does="Root of the container removes, moves and unmounts the grant and the preload file.",
        outcome=Outcome.HARMLESS,
        levels=BOTH,
        prints="tried: grant mounted True, preload file '/.tangram/libtangram.so",
        script='os.system("rmdir /.tangram; mv /.tangram /x; rm -rf /.tangram; umount /.tangram; rm -f /etc/ld.so.preload; true")'
        + LOOK,
    ),
    Attack(
        name="linked-image",
        does="In the image, /.tangram is a symbolic link into a volume, which admission cannot see.",
        outcome=Outcome.KILLED,
        pod=linked(),
        event="GrantMisplaced",
        script=PLAIN,
    ),
    Attack(
        name="linked-volume",
        does="An init container makes a symbolic link to /.tangram in a volume, and a second volume is mounted at it.",
        outcome=Outcome.KILLED,
        pod=nested(),
        event="GrantMisplaced",
        script=PLAIN,
    ),
)
