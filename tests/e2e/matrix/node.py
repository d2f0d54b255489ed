"""The local cluster's node from outside: its files, its processes, the fake driver's counters, the arbiter's status. Decides nothing."""

from __future__ import annotations

import re
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hack.cluster.layout import Layout
from hack.stack import FAKE_DRIVER_ROOT
from tests.e2e.cluster import runs_in_a_container
from tests.e2e.matrix.seen import GpuProcess
from vgpu.api.cgroup import place_of
from vgpu.api.codec import grant_from_text
from vgpu.api.contract import GRANT_DIRS
from vgpu.api.errors import BadDocument
from vgpu.api.grant import Grant
from vgpu.protocol.status import StatusDocument, decode_status

NODE: Final = Layout().node(1)
STATE: Final = NODE.own("/var/lib/tangram")
DEVICE_PLUGINS: Final = NODE.own("/var/lib/kubelet/device-plugins")
CDI_SPEC: Final = NODE.own("/run/cdi") / "tangram.sh-gpu.json"
DRIVER: Final = NODE.own(FAKE_DRIVER_ROOT)
PROGRAMS: Final = {
    "device plugin": "tangram-deviceplugin",
    "arbiter": "arbiter",
    "supervisor": "tangram-arbiter-supervisor",
    "NVML child": "nvml",
    "extender": "tangram-extender",
    "webhook": "tangram-webhook",
}
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{36}")


def driver(*words: str) -> str:
    """What the fake driver's daemon answers."""
    command = [DRIVER / "bin/nvidia-fake-driverd", "ctl", "--socket", DRIVER / "run/nvidia-persistenced/socket"]
    return subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=30).stdout


def started(pid: int) -> int:
    """When, by the kernel's count. Raises OSError when it is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def pids_of(part: str) -> list[int]:
    """Of a part that runs in a container, the oldest first: an arbiter's spare is younger than the arbiter."""
    found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if runs_in_a_container(p, PROGRAMS[part])]
    return sorted(found, key=started)


def ran_us() -> dict[int, int]:
    """Host pid -> GPU time of each process that was given channels."""
    return kernel()[1]


def kernel() -> tuple[int, dict[int, int]]:
    """How often the kernel's side of the driver was misused, and `ran_us`."""
    first, *lines = driver("kernel").splitlines()
    seen: dict[int, int] = {}
    for line in lines:
        numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}
        seen[numbers["pid"]] = seen.get(numbers["pid"], 0) + numbers["ran_us"]
    return int(first.partition(" ")[0].partition("=")[2]), seen


def gpu_processes() -> tuple[GpuProcess, ...]:
    """Everything that the driver counts and that still lives."""
    return tuple(one for pid, mib in records().items() if (one := gpu_process(pid, mib)) is not None)


def records() -> dict[int, dict[str, int]]:
    """Host pid -> GPU UUID -> MiB, as the driver counts them."""
    held: dict[int, dict[str, int]] = {}
    uuid = ""
    for line in driver("status").splitlines():
        if found := _UUID.search(line):
            uuid = found[0]
        elif process := re.match(r"\s+pid=(\d+) used_mib=(\d+)", line):
            held.setdefault(int(process[1]), {})[uuid] = int(process[2])
    return held


def gpu_process(pid: int, held_mib: Mapping[str, int]) -> GpuProcess | None:
    """None when it has ended."""
    folder = Path("/proc") / str(pid)
    try:
        uid = place_of((folder / "cgroup").read_text()).pod
        maps = (folder / "maps").read_text()
        mounted = (folder / "mountinfo").read_text()
        at, grants = shown(mounted)
        text = (folder / f"root{at}/grant").read_text() if at else ""
    except OSError:
        return None
    if not maps:
        return None  # it is ending
    return GpuProcess(pid, uid, held_mib, read_grant(text), grants, "/libtangram.so" in maps)


def shown(mountinfo: str) -> tuple[str, str]:
    """Where a process has its grant, and the name of the grant directory; empty where it has none."""
    for at in GRANT_DIRS:
        if found := re.search(rf" \S*/grants/([^/\s]+?)(?://deleted)? {re.escape(at)} ", mountinfo):
            return at, found[1]
    return "", ""


def read_grant(text: str) -> Grant | None:
    """None when it is none."""
    try:
        return grant_from_text(text)
    except BadDocument:
        return None


def grants() -> dict[str, Grant]:
    """Name of the grant directory -> its grant."""
    found: dict[str, Grant] = {}
    for path in (STATE / "grants").glob("[!.]*/grant"):
        try:
            grant = read_grant(path.read_text())
        except OSError:
            continue
        if grant is not None:
            found[path.parent.name] = grant
    return found


def status(within_s: float = 5.0) -> StatusDocument:
    """The arbiter's status. Raises OSError without an answer, BadDocument."""
    with socket.socket(socket.AF_UNIX) as requested:
        requested.settimeout(within_s)
        requested.connect(str(STATE / "arbiter/status.sock"))
        return decode_status(b"".join(iter(lambda: requested.recv(65536), b"")))


def page(address: str, port: int, path: str, token: str = "") -> str:
    """A page of one of Tangram's programs; what is wrong, when there is none."""
    request = urllib.request.Request(f"http://{address}:{port}{path}")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=3) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())
    except OSError as error:
        return f"no answer: {error}"
