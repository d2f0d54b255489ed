"""Library, arbiter and device plugin of this release and of the one before it, in every mixture: limits are enforced, restarts lose nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hack.previous import SOURCES
from tests.built import REPOSITORY
from tests.integration.gputime.conftest import Node, Program, until
from tests.previous_release import previous_library, previous_python, previous_sources
from vgpu.api.codec import grant_from_text, grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol.status import decode_status

MIB = 2**20
OLD_WRITER = """
import json, sys
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
given = json.load(sys.stdin)
gpus = tuple(GrantGpu(*gpu) for gpu in given.pop("gpus"))
sys.stdout.write(grant_to_text(Grant(gpus=gpus, **given)))
"""
OLD_READER = """
import dataclasses, json, sys
from vgpu.api.codec import grant_from_text
print(json.dumps(dataclasses.asdict(grant_from_text(sys.stdin.read()))))
"""
OLD_STATUS = """
import sys
from vgpu.protocol.status import decode_status
print([(one.key, one.gpu_time is not None and one.gpu_time.mode) for one in decode_status(sys.stdin.read().encode()).containers])
"""
GRANT = Grant(
    "default", "a", "uid-a", "main", (GrantGpu("GPU-00000000-aaaa-bbbb-cccc-000000000000", 1024, 20),), "best-effort", 3,
    over_limit_action="kill", clear=True,
)  # fmt: skip


def old_grant_text(grant: Grant) -> str:
    """As the previous device plugin writes it."""
    given = {
        "namespace": grant.namespace, "pod": grant.pod, "uid": grant.uid, "container": grant.container,
        "service_class": grant.service_class, "level": grant.level, "over_limit_action": grant.over_limit_action, "clear": grant.clear,
        "gpus": [[gpu.uuid, gpu.mib, gpu.core_percent] for gpu in grant.gpus],
    }  # fmt: skip
    return previous_python(OLD_WRITER, json.dumps(given))


@dataclass(frozen=True)
class Mixture:
    """Which of them is of the previous release."""

    library: bool = False
    arbiter: bool = False
    plugin: bool = False


MIXTURES = {
    "old library": Mixture(library=True),
    "old arbiter": Mixture(arbiter=True),
    "old plugin": Mixture(plugin=True),
    "new library": Mixture(arbiter=True, plugin=True),
    "new arbiter": Mixture(library=True, plugin=True),
    "new plugin": Mixture(library=True, arbiter=True),
}


@pytest.fixture
def mixed(library: Path) -> Iterator[Callable[[Mixture], Node]]:
    made: list[Node] = []

    def start(of: Mixture) -> Node:
        made.append(
            Node(
                previous_library() if of.library else library,
                arbiter=previous_sources() if of.arbiter else REPOSITORY,
                grant_text=old_grant_text if of.plugin else grant_to_text,
            )
        )
        return made[-1]

    yield start
    for node in made:
        node.close()


def takes(program: Program, mib: int) -> int:
    """CUresult of an allocation."""
    return int(program.do(f"cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t({mib * MIB}))"))


def percent(node: Node, program: Program, seconds: float = 2.0) -> float:
    began = node.ran_us(program)
    assert program.do(f"time.sleep({seconds})") is None
    return (node.ran_us(program) - began) / seconds / 1e4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("of", MIXTURES.values(), ids=MIXTURES.keys())
def test_releases_that_differ_by_one_hold_the_limits_and_survive_a_restart(
    of: Mixture, mixed: Callable[[Mixture], Node]
) -> None:
    node = mixed(of)
    program, other = node.run("a", core=20), node.run("b", "best-effort")
    assert (takes(program, 600), takes(program, 600)) == (0, 2), "of 1024 MiB"
    program.do("work_on(2000)")
    other.do("work_on(2000)")
    until(lambda: node.held(program), 20)
    gpu_time = node.gpu_time("a")
    assert gpu_time is not None
    assert (gpu_time.mode, gpu_time.trouble, gpu_time.requested_percent) == ("suspend", "", 20)
    assert percent(node, program) < 30
    node.arbiter.send_signal(signal.SIGKILL)
    node.arbiter.wait()
    until(lambda: not node.held(program), 5)
    (node.folder / "status.sock").unlink()
    node.start_arbiter()
    until(
        lambda: (gpu_time := node.gpu_time("a")) is not None and gpu_time.processes == 1 and gpu_time.suspends > 0, 20
    )
    assert (takes(program, 300), takes(program, 300)) == (0, 2), "what it had is counted"
    assert percent(node, program) < 30
    assert node.misuses() == ""


def test_the_previous_releases_grants_are_read_and_this_ones_are_read_by_it() -> None:
    assert grant_from_text(old_grant_text(GRANT)) == GRANT
    read = json.loads(previous_python(OLD_READER, grant_to_text(GRANT)))
    gpus = tuple(GrantGpu(**gpu) for gpu in read.pop("gpus"))
    assert Grant(gpus=gpus, **read) == GRANT


def test_each_release_reads_the_others_status(mixed: Callable[[Mixture], Node]) -> None:
    def document(node: Node) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(node.folder / "status.sock"))
            return b"".join(iter(lambda: sock.recv(65536), b""))

    new, old = mixed(Mixture()), mixed(Mixture(arbiter=True))
    for node in (new, old):
        node.run("a", core=20)
    assert previous_python(OLD_STATUS, document(new).decode()).strip() == "[('a', 'suspend')]"
    (container,) = decode_status(document(old)).containers
    assert (container.key, container.gpu_time is not None and container.gpu_time.mode) == ("a", "suspend")


def test_the_archive_is_of_the_commit_that_it_names() -> None:
    """Where the history is there; a shallow clone has only the archive."""
    commit = SOURCES.with_name("commit").read_text().strip()
    tree = subprocess.run(
        ["git", "ls-tree", "-r", "--format=%(objectname) %(path)", commit, "arbiter", "vgpu", "shim/src"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if tree.returncode:
        pytest.skip("the history ends after the previous release")
    for line in tree.stdout.splitlines():
        name, path = line.split(" ", 1)
        hashed = subprocess.run(
            ["git", "hash-object", "--no-filters", str(previous_sources() / path)],
            cwd=REPOSITORY, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert hashed.stdout.strip() == name, path
