"""A copier on the fake driver, and a process whose blocks it copies."""

from __future__ import annotations

import json
import os
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from arbiter.swap.copier import Copier
from tests.built import REPOSITORY, shim_build
from tests.fake import FakeDriver, start_fake_driver
from tests.integration.copier.owner import MIB, content
from tests.line_process import LineProcess
from vgpu.protocol import copier as protocol

UUID = "GPU-0000000a-aaaa-bbbb-cccc-00000000000a"
POOL_BYTES = 64 * MIB
LIMIT_S = 60
"""Of a wait for an event that comes within milliseconds on an idle machine."""


class Owner(LineProcess):
    """owner.py as a process."""

    def __init__(self, driver: FakeDriver) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("owner.py"))
        super().__init__(
            [program, str(theirs.fileno())], driver.env(PYTHONPATH=str(REPOSITORY)), pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def _request(self, *words: Any) -> Any:
        self.send(json.dumps(words))
        return self.answer(f"in {words}")

    def make(self, name: str, size_bytes: int, seed: int | None) -> None:
        self._request("make", name, size_bytes, seed)

    def export(self, name: str) -> int:
        self._request("export", name)
        _, (fd,), _, _ = socket.recv_fds(self._ours, 16, 1)
        return fd

    def digest(self, name: str) -> str:
        found: str = self._request("digest", name)
        return found

    def drop(self, name: str) -> None:
        self._request("drop", name)

    def end(self) -> None:
        super().end()
        self._ours.close()


def digest(size_bytes: int, seed: int | None) -> str:
    """Of a block of that seed."""
    return sha256(content(size_bytes, seed)).hexdigest()


def receive(link: Copier) -> protocol.Done | protocol.State:
    """The next answer."""
    while (answer := link.receive()) is None:
        readable, _, _ = select.select([link.fd], [], [], LIMIT_S)
        assert readable, f"no answer within {LIMIT_S} s"
    return answer


def done(link: Copier) -> protocol.Done:
    answer = receive(link)
    assert isinstance(answer, protocol.Done)
    return answer


def state(link: Copier) -> protocol.State:
    link.request_state()
    answer = receive(link)
    assert isinstance(answer, protocol.State)
    return answer


class Node:
    """A GPU, and copiers one after the other at the same socket and pool."""

    def __init__(self, description: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="copier-"))
        self.pools = Path(tempfile.mkdtemp(prefix="tangram-test-", dir="/dev/shm"))
        self.driver = start_fake_driver(description, self.folder)
        self.socket, self.pool = self.folder / "copier.sock", self.pools / "pool"
        self.processes: list[subprocess.Popen[str]] = []
        self.links: list[Copier | socket.socket] = []
        """Closed at the end."""
        self._owners: list[Owner] = []

    def owner(self) -> Owner:
        self._owners.append(Owner(self.driver))
        return self._owners[-1]

    def run(
        self,
        *pools: Path,
        pool_bytes: int = POOL_BYTES,
        faults: str = "",
        path: Path | None = None,
        under: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Start a copier, and wait for nothing. `under`: a command that runs it."""
        words = [*under, str(shim_build() / "tangram-copier"), "--gpu", UUID, "--socket", str(path or self.socket)]
        for pool in pools or (self.pool,):
            words += ["--pool", str(pool)]
        env = self.driver.env(TANGRAM_FAKE_FAULTS=faults)
        process = subprocess.Popen(
            [*words, "--pool-bytes", str(pool_bytes)], env=env, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def connect(self, process: subprocess.Popen[str]) -> Copier:
        """To a copier, when its socket is there and its pool is ready."""
        assert process.stderr is not None
        for line in process.stderr:
            if line == "tangram-copier: ready\n":
                break
        assert process.poll() is None
        return self.link()

    def link(self) -> Copier:
        """A connection."""
        made = Copier(self.socket)
        self.links.append(made)
        return made

    def start(self, *pools: Path, **how: Any) -> Copier:
        """A copier that is ready."""
        return self.connect(self.run(*pools, **how))

    def failure(self, *pools: Path, **how: Any) -> str:
        """What a copier writes that ends by itself with status 1."""
        process = self.run(*pools, **how)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1, errors
        return errors

    def end(self) -> None:
        for link in self.links:
            link.close()
        for process in self.processes:
            process.kill()
            process.communicate()
        for owner in self._owners:
            owner.end()
        self.driver.stop()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.pools)


def save(link: Copier, owner: Owner, name: str, job: int, slot_offset: int, size_bytes: int) -> None:
    """Begin to save a block."""
    fd = owner.export(name)
    link.save(job, slot_offset, size_bytes, fd)
    os.close(fd)


def restore(link: Copier, owner: Owner, name: str, job: int, slot_offset: int, size_bytes: int) -> None:
    """Begin to restore a block."""
    fd = owner.export(name)
    link.restore(job, slot_offset, size_bytes, fd)
    os.close(fd)
