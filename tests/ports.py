"""TCP ports for programs that get one when they start.

A port that is free now may be taken when the program opens it: any connection of this machine begins at one of the ports of
`ip_local_port_range`, and other tests look for ports at the same time. So these lie below that range, and each is given to one
process at a time: it has a lock on that byte of a file, which ends with it. Where that range leaves none, they lie in it.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO, Final

FIRST: Final = 12_400
"""Past the ports of the local cluster's etcd, beside which unit tests run."""
END: Final = 30_000
"""Where the ports of Kubernetes' services begin."""
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """One that nobody listens on, and that no other test is given. Raises OSError when there is none."""
    for port in _candidates():
        try:
            fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no TCP port from {FIRST} to {END} is free")


@cache
def _candidates() -> Iterator[int]:
    """Each once."""
    end = min(END, int(_RANGE.read_text().split()[0]))
    ports = range(FIRST, end) or range(FIRST, END)
    begin = os.getpid() % len(ports)
    return itertools.chain(ports[begin:], ports[:begin])


@cache
def _locks() -> BinaryIO:
    file = (Path(tempfile.gettempdir()) / f"tangram-test-ports-{os.getuid()}").open("a+b")
    atexit.register(file.close)
    return file
