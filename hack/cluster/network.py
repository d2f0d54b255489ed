"""Addresses of the nodes, and the clean-up of what pods' networking left in the host.

Pods are wired by the CNI plugin `ptp`: a veth pair each and a host route, no bridge. Every packet between two pods then
passes the host's routing and connection tracking, so a service's address works from every pod on every kernel, with no
bridge netfilter module. A node's address has to exist before its kubelet starts, so it is put on the loopback device.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import socket
import struct
import subprocess
from typing import Final

SIOCSIFADDR: Final = 0x8916
SIOCGIFADDR: Final = 0x8915
SIOCSIFNETMASK: Final = 0x891C
SIOCSIFFLAGS: Final = 0x8914
"""From linux/sockios.h. Plain ioctls, since a machine with no network may have no `ip` command either."""

_OURS: Final = re.compile(r"KUBE-|CNI-DN-|CNI-HOSTPORT-")


def _label(index: int) -> str:
    """Name of the loopback alias that carries node `index`'s address; at most 15 bytes."""
    return f"lo:tangram{index}"


def _request(label: str, address: str) -> bytes:
    """A `struct ifreq` with a `sockaddr_in`."""
    return struct.pack("16sHH4s24x", label.encode(), socket.AF_INET, 0, socket.inet_aton(address))


def address_of(index: int) -> str | None:
    """The address that node `index`'s alias has now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = fcntl.ioctl(control, SIOCGIFADDR, _request(_label(index), "0.0.0.0"))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def add_address(index: int, address: str) -> None:
    if address_of(index) == address:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFADDR, _request(_label(index), address))
        fcntl.ioctl(control, SIOCSIFNETMASK, _request(_label(index), "255.255.255.255"))


def remove_address(index: int) -> None:
    """Setting an alias down removes it."""
    if address_of(index) is None:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", _label(index).encode(), 0))


def without_cluster_rules(saved: str) -> str:
    """What `iptables-save` printed, less the rules and chains of kube-proxy and of the port mapping plugin."""
    return "".join(line for line in saved.splitlines(keepends=True) if not _OURS.search(line))


def remove_rules() -> None:
    """Take the cluster's rules out of the host's tables and leave all others as they are."""
    for family in ("iptables", "ip6tables"):
        if shutil.which(f"{family}-save") is None:
            continue
        saved = subprocess.run([f"{family}-save"], capture_output=True, text=True, check=True).stdout
        kept = without_cluster_rules(saved)
        if kept != saved:
            subprocess.run([f"{family}-restore"], input=kept, text=True, check=True)
