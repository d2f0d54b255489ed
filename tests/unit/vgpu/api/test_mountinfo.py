"""Whether a container has its grant where it should be, by its mounts."""

from __future__ import annotations

import pytest

from vgpu.api.contract import GRANT_DIRS
from vgpu.api.mountinfo import misplaced

KEY = "0123456789abcdef-00000001abcdef0"


def line(root: str, at: str) -> str:
    return f"40 22 8:1 {root} {at} ro,relatime shared:1 - ext4 /dev/sda1 rw\n"


ROOT, PROC = line("/", "/"), line("/", "/proc")
GRANT = f"/var/lib/tangram/grants/{KEY}"
VOLUME = "/pods/u/volumes/kubernetes.io~empty-dir/scratch"


@pytest.mark.parametrize(
    ("mountinfo", "why"),
    [
        (ROOT + line(GRANT, "/.tangram") + line("/sockets", "/.tangram/socket"), ""),
        (ROOT + line(GRANT, "/run/tangram"), ""),
        (ROOT + line(GRANT, "/.tangram") + line(GRANT, "/run/tangram"), ""),
        (ROOT + line(VOLUME, "/run") + line(GRANT, "/.tangram") + line(VOLUME, "/run/tangram"), ""),
        (ROOT + line(f"{GRANT}//deleted", "/.tangram"), ""),
        (ROOT + line(f"/grants/{KEY}", "/.tangram"), ""),
        (ROOT + line(GRANT, "/shared") + line(VOLUME, "/shared"), "its grant is mounted at /shared instead of /.tangram"),
        (ROOT + line(VOLUME, "/shared") + line(GRANT, "/shared/x"), "its grant is mounted at /shared/x instead of /.tangram"),
        (ROOT + line(GRANT, "/.tangram") + line(VOLUME, "/.tangram"), "its grant at /.tangram is covered by another mount"),
        (ROOT + line(GRANT, "/run/tangram") + line(VOLUME, "/run"), "its grant at /run/tangram is covered by another mount"),
        (ROOT + line(VOLUME, "/run") + line(GRANT, "/run/tangram"), ""),
        (ROOT + line(GRANT, "/run/k8s.io/rootfs/.tangram"), None),
        (ROOT + line(f"{GRANT}x", "/.tangram"), None),
        (ROOT + line(f"/var/lib/tangram/sockets/{KEY}", "/.tangram"), None),
        (ROOT, None),
        ("", None),
        ("nonsense\n\n", None),
    ],
)  # fmt: skip
def test_a_grant_is_in_its_place_or_a_clause_names_where_it_is(mountinfo: str, why: str | None) -> None:
    assert misplaced(PROC + mountinfo, KEY) == why


@pytest.mark.parametrize("at", GRANT_DIRS)
def test_what_is_mounted_earlier_covers_nothing(at: str) -> None:
    assert misplaced(line(VOLUME, at) + line(GRANT, at), KEY) == ""
