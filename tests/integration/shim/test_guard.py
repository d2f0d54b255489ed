"""The guard, by real processes: a process that bypasses the library is detected from outside, named, and killed if the policy requires it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.shim.conftest import CONTEXT_MIB, GPUS, MIB, Stage, Worker, wait_for
from tests.mounting import with_grant
from vgpu.api.codec import grant_to_text
from vgpu.api.contract import CONTAINER_DIR, EARLIER_CONTAINER_DIR
from vgpu.api.grant import Grant, GrantGpu
from vgpu.api.names import OverLimitAction

RAW = """
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include "wire.h"
/* raw SOCKET MIB [unlisted]: speaks the fake driver's own protocol, as a program that makes the driver's ioctls itself would: no libcuda, no libc to
 * preload. With `unlisted` it has no context, and NVML lists it nowhere. */
int main(int count, char **word)
{
    const int listed = count < 4;
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    strncpy(to.sun_path, word[1], sizeof to.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        return 1;
    static struct fake_message in;
    union { struct cmsghdr align; char buffer[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {&in, sizeof in};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(fd, &message, 0) < 0)
        return 2;
    int page_fd;
    memcpy(&page_fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof page_fd);
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    unsigned long long bytes = strtoull(word[2], NULL, 10) * FAKE_MIB;
    uint32_t free_turn;
    do
        free_turn = atomic_load(&page->lock.turn) & ~1u;
    while (!atomic_compare_exchange_weak(&page->lock.turn, &free_turn, free_turn + 1));
    page->slot[in.slot].kind = listed ? FAKE_CUDA : FAKE_NVML;
    page->slot[in.slot].contexts[0] = listed;
    page->unit[0].used_bytes[in.slot] += bytes;
    atomic_store(&page->lock.turn, free_turn + 2);
    puts("ready");
    fflush(stdout);
    getchar();
    return 0;
}
"""
PROGRAM = """
import ctypes, sys
cuda, context, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 == cuda.cuCtxSetCurrent(context)
assert cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t({bytes})) == 0
print("ready", flush=True)
sys.stdin.read()
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def raw(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A statically linked program that allocates memory by the driver's own protocol."""
    folder = tmp_path_factory.mktemp("raw")
    (folder / "raw.c").write_text(RAW)
    command = ["gcc", "-static", "-Werror", "-I", str(ROOT / "shim/fake"), "-o", "raw", "raw.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "raw"


class Bypass:
    """A program in the container's mount namespace without the library."""

    def __init__(self, stage: Stage, *command: str, at: str = CONTAINER_DIR, **env: str) -> None:
        plain = {k: v for k, v in stage.env().items() if not k.startswith(("TANGRAM_GRANT", "LD_PRELOAD"))}
        self.process = subprocess.Popen(
            with_grant(stage.folder / "grants" / stage.key, at, *command),
            env=plain | env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def pid(self) -> int:
        return self.process.pid

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def bypasses() -> Iterator[list[Bypass]]:
    made: list[Bypass] = []
    yield made
    for one in made:
        one.close()


def statically(stage: Stage, raw: Path, mib: int, at: str = CONTAINER_DIR) -> Bypass:
    return Bypass(stage, str(raw), str(stage.folder / "driver.sock"), str(mib), at=at)


def unloaded(stage: Stage, mib: int) -> Bypass:
    """A program that removes LD_PRELOAD from its environment."""
    return Bypass(stage, sys.executable, "-c", PROGRAM.format(bytes=mib * MIB))


def set_policy(stage: Stage, policy: OverLimitAction) -> None:
    grant = Grant("default", "a", "1", "main", (GrantGpu(GPUS[0], 1000),), over_limit_action=policy)
    stage.write_grant(grant_to_text(grant))
    wait_for(lambda: stage.status().over_limit_action == policy)


def alive(worker: Worker) -> bool:
    return worker.request("info()")[0] == 0


@pytest.mark.parametrize("way", ["static", "static in a container of the release before", "unloaded"])
def test_a_program_that_goes_around_the_library_is_reported_within_seconds(
    measured: Stage, measured_node: Stage, raw: Path, bypasses: list[Bypass], way: str
) -> None:
    worker = measured.worker()
    worker.must("alloc(100)")
    at = EARLIER_CONTAINER_DIR if "before" in way else CONTAINER_DIR
    bypass = unloaded(measured, 1500) if way == "unloaded" else statically(measured, raw, 1500, at)
    bypasses.append(bypass)
    wait_for(lambda: measured.status().over and "bypassing" in [one.reason for one in measured.status().unenforced])
    status = measured.status()
    assert status.memory_state == "unenforced"
    assert [(one.reason, one.pids) for one in status.unenforced if "memory" in one.limits] == [
        ("unconnected", (bypass.pid,)),
        ("bypassing", (bypass.pid,)),
        ("over-limit", (bypass.pid,)),
    ]
    held = {process.pid: process.gpus[0].measured_bytes for process in measured.status().processes}
    expected_mib = 1500 + CONTEXT_MIB * (way == "unloaded")
    assert held == {worker.pid: (CONTEXT_MIB + 100) * MIB, bypass.pid: expected_mib * MIB}
    line = next(line for line in reversed(measured_node.arbiter_log) if "uses more GPU memory" in line)
    assert f'"pid": {bypass.pid}' in line
    assert '"limit_mib": 1000' in line
    assert bypass.process.poll() is None, "the policy is to report"
    bypass.close()
    wait_for(lambda: not measured.status().over)
    assert measured.status().memory_state == "enforced"
    assert alive(worker)


def test_policy_kill_ends_the_offender_and_leaves_its_siblings(
    measured: Stage, raw: Path, bypasses: list[Bypass]
) -> None:
    set_policy(measured, "kill")
    worker = measured.worker()
    worker.must("alloc(600)")
    bypass = statically(measured, raw, 700)
    bypasses.append(bypass)
    assert bypass.process.wait(10) == -9
    wait_for(lambda: not measured.status().over)
    assert alive(worker)


def test_a_container_at_its_limit_is_not_over_it(measured: Stage) -> None:
    set_policy(measured, "kill")
    workers = [measured.worker(), measured.worker()]
    for worker in workers:
        while worker.request("alloc(20)")[0] == 0:
            pass
    assert measured.true_mib(*workers) > 960
    readings = measured.status().processes[0].gpus[0].measured_bytes
    wait_for(lambda: measured.status().gpus[0].used_bytes > 350 * MIB)  # stated a second later: two more readings
    assert readings
    assert not measured.status().over
    assert all(alive(worker) for worker in workers)


def test_another_containers_excess_is_not_this_ones(
    measured: Stage, measured_node: Stage, raw: Path, bypasses: list[Bypass]
) -> None:
    other = Stage(measured_node.build, measured_node.folder, f"{measured.key}-other")
    other.grant((GPUS[0], 1000))
    worker = measured.worker()
    bypasses.append(statically(other, raw, 1500))
    wait_for(lambda: other.status().over)
    assert other.status().memory_state == "unenforced", "no process of it is connected"
    assert not measured.status().over
    assert measured.status().memory_state == "enforced"
    assert [process.pid for process in measured.status().processes] == [worker.pid]
