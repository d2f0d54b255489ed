"""What a real plugin process puts back when it is missing, and a start that waits for the arbiter's socket."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time

import grpc
import grpc.aio
import pytest

from deviceplugin.admission import listens
from tests.built import REPOSITORY
from tests.integration.deviceplugin.plugin_kit import (
    CORE,
    GPU,
    MEM,
    Start,
    fake_driver,
    inventory,
    running,
    sharing,
)
from vgpu.api.codec import grant_from_text
from vgpu.api.names import DEFAULT

__all__ = ["fake_driver", "running"]


async def test_what_a_container_mounts_is_restored_when_it_was_removed(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        folder = made.grant_folder("a")
        shutil.rmtree(folder)
        (made.state / "preload").unlink()
        (made.state / "ld.so.preload").unlink()
        start = asyncio.create_task(made.kubelet.start_container("a", "main"))
        await made.logged("what a container mounts was missing and is restored")
        made.arbiter_listens("a")
        await start
        assert (folder / "libtangram.so").exists()
        assert (made.state / "preload").exists()
        assert (made.state / "ld.so.preload").exists()


async def test_a_grant_removed_from_a_running_container_is_back_within_seconds(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        made.arbiter_listens("a")
        await made.kubelet.start_container("a", "main")
        path = made.grant_folder("a") / "grant"
        text = path.read_text()
        path.unlink()
        await made.logged("what a container was granted was missing and is put back")
        assert path.read_text() == text


async def test_a_removed_cdi_specification_is_back_before_the_container_starts(running: Start) -> None:
    async with running() as made:
        one, spec = sharing("a", inventory(made), 0, 8), made.folder / "cdi/tangram.sh-gpu.json"
        content = spec.read_bytes()
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        made.arbiter_listens("a")
        spec.unlink()
        await made.kubelet.start_container("a", "main")
        assert spec.read_bytes() == content


async def test_without_an_arbiter_the_container_does_not_start(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 8)
        made.api.put(one.plain())
        await made.kubelet.admit(one.plain())
        with pytest.raises(grpc.aio.AioRpcError, match="the arbiter does not listen"):
            await made.kubelet.start_container("a", "main")


async def test_the_real_arbiter_listens_in_a_new_folder_before_the_container_starts(running: Start) -> None:
    async with running() as made:
        grants, sockets = made.state / "grants", made.state / "sockets"
        earlier = (
            grants / "0123456789abcdef0123456789abcdef"
        )  # as a plugin made it that knew no other folder for sockets
        earlier.mkdir(parents=True, exist_ok=True)
        before = {path: path.lstat().st_mtime_ns for path in (grants, *grants.rglob("*"))}
        arbiter = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "arbiter", "--grants-dir", str(grants), "--sockets-dir", str(sockets),
            "--metrics-host", "127.0.0.1", "--metrics-port", "0", cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert arbiter.stderr
            async with asyncio.timeout(20):
                while b"serving" not in (line := await arbiter.stderr.readline()):
                    assert line, "the arbiter ended"
            assert {path: path.lstat().st_mtime_ns for path in (grants, *grants.rglob("*"))} == before, (
                "it writes beside"
            )
            assert listens(sockets / earlier.name / "arbiter.sock")
            one = sharing("a", inventory(made), 0, 8)
            made.api.put(one.plain())
            await made.kubelet.admit(one.plain())
            await made.kubelet.start_container("a", "main")
            folder = made.grant_folder("a")
            assert listens(sockets / folder.name / "arbiter.sock")
            mounted = {m.container_path: m.host_path for m in made.kubelet.answers["a", "main", DEFAULT.gpu_mem].mounts}
            assert mounted["/.tangram/socket"] == str(sockets / folder.name)
            assert str((folder / "arbiter.sock").readlink()) == "socket/arbiter.sock"
            assert grant_from_text((folder / "grant").read_text()).pod == "a"
        finally:
            arbiter.terminate()
            _, output = await arbiter.communicate()
        assert b'"level": "error"' not in output
        assert arbiter.returncode == 0


async def test_removed_sockets_are_back_within_a_second(running: Start) -> None:
    async with running() as made:
        one = sharing("a", inventory(made), 0, 4, 30)
        made.api.put(one.plain())  # bound, and not admitted yet
        sockets = sorted(made.kubelet.plugins.glob("tangram-*.sock"))
        assert len(sockets) == 3
        made.kubelet.registered.clear()
        for socket in sockets:
            socket.unlink()
        began = time.monotonic()
        while not all(socket.exists() for socket in sockets):  # noqa: ASYNC110 (another process makes them)
            await asyncio.sleep(0.01)
        back_s = time.monotonic() - began
        names = {MEM, CORE, GPU}
        await made.kubelet.until(
            lambda: names <= set(made.kubelet.registered) and all(map(made.kubelet.healthy, names))
        )
        assert back_s < 1.0
        await made.kubelet.admit(one.plain())
