"""Spellings of paths at which a pod with a share may mount nothing, and of those at which it may: for the webhook, and for the admission policy.

Where a path led was tried with runc 1.1, which resolves it in the container's root: /proc/self/root/etc was mounted at /etc.
"""

from __future__ import annotations

from typing import Final

REFUSED: Final = {
    "/": "root directory", "//": "root directory", "/.": "root directory", "/./": "root directory", ".": "root directory", "./": "root directory",
    "/etc": "directory /etc", "/etc/": "directory /etc", "//etc": "directory /etc", "/etc/.": "directory /etc", "/./etc//.": "directory /etc",
    "etc": "directory /etc", "./etc": "directory /etc", "/etc//": "directory /etc",
    "/etc/ld.so.preload": "choose another path", "//etc//ld.so.preload/": "choose another path", "etc/./ld.so.preload": "choose another path",
    "/etc/ld.so.preload/x": "choose another path",
    "/.tangram": "grant is mounted at /.tangram", "/.tangram/": "grant is mounted at /.tangram", ".tangram": "grant is mounted at /.tangram",
    "//.tangram/.": "grant is mounted at /.tangram", "/./.tangram": "grant is mounted at /.tangram",
    "/.tangram/libtangram.so": "grant is mounted at /.tangram", "/.tangram//socket": "grant is mounted at /.tangram",
    "/run/tangram": "earlier release", "/run//tangram/": "earlier release", "/run/./tangram/grant": "earlier release", "run/tangram": "earlier release",
    "/var/run/tangram": "earlier release", "/var//run/tangram/.": "earlier release", "var/run/tangram/a/b": "earlier release",
    "/run/../etc": "without ..", "/var/run/../etc": "without ..", "/data/..": "without ..", "..": "without ..", "/..": "without ..",
    "/../etc": "without ..", "/a/../b": "without ..", "../.tangram": "without ..",
    "/proc/self/root": "mount outside of /proc", "/proc/self/root/etc": "mount outside of /proc", "//proc/./1/root/.tangram": "mount outside of /proc",
    "/proc/thread-self/root/etc/ld.so.preload": "mount outside of /proc", "proc/self/cwd": "mount outside of /proc",
}  # fmt: skip
"""Path -> what the reason says."""

ALLOWED: Final = (
    "/run", "/run/", "/var/run", "/var", "/data", "data", "/etc/nginx", "/etc/ld.so.preload.d", "/etc/ld.so.conf.d/own.conf", "/etc/passwd",
    "/etcetera", "/run/tangrams", "/run/nvidia", "/run/tangram-data/x", "/.tangrams", "/.config", "/tangram", "/home/.tangram", "/srv/etc", "/srv/etc/ld.so.preload",
    "/home/x/run/tangram", "/...", "/a/..b", "/a/b..", "/proc/cpuinfo", "/proc/meminfo", "/process/a/b", "/dev/shm", "/dev/termination-log", "/etc\n", " /etc",
    "/opt/run/tangram", "/ETC", "/usr/lib/x86_64-linux-gnu",
)  # fmt: skip
