"""The pool outlives its copier, whatever ends that one, and is refused where it does not fit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from arbiter.swap.copier import Copier, CopierAway
from tests.built import shim_build
from tests.integration.copier.harness import LIMIT_S, UUID, Node, Owner, digest, done, restore, save, state
from tests.integration.copier.owner import MIB
from vgpu.protocol.copier import Done, Pages, Result

POOL = 16 * MIB
BLOCK = 2 * MIB
KILLS, BLOCKS = 12, 24
HUGE_POOL = 2**45
"""More than any host has. The copier could not map it, either, so that a test that fails takes no memory."""
BOUND = ("prlimit", "--as=8589934592")


def test_a_new_copier_finds_what_was_saved(node: Node) -> None:
    owner, link = node.owner(), node.start(pool_bytes=POOL)
    owner.make("a", 4 * MIB, seed=1)
    save(link, owner, "a", 1, 8 * MIB, 4 * MIB)
    assert done(link).result == Result.COPIED
    node.processes[-1].send_signal(signal.SIGTERM)
    assert node.processes[-1].wait(LIMIT_S) == 0
    again = node.start(pool_bytes=POOL)
    owner.make("b", 4 * MIB, seed=None)
    restore(again, owner, "b", 1, 8 * MIB, 4 * MIB)
    assert done(again).result == Result.COPIED
    assert owner.digest("b") == digest(4 * MIB, 1)


def test_a_larger_pool_keeps_what_was_saved(node: Node) -> None:
    owner, link = node.owner(), node.start(pool_bytes=POOL)
    owner.make("a", 4 * MIB, seed=1)
    save(link, owner, "a", 1, 8 * MIB, 4 * MIB)
    assert done(link).result == Result.COPIED
    node.processes[-1].kill()
    node.processes[-1].wait()
    again = node.start(pool_bytes=2 * POOL)
    assert state(again).registered_bytes == 2 * POOL
    owner.make("b", 4 * MIB, seed=None)
    restore(again, owner, "b", 1, 8 * MIB, 4 * MIB)
    assert done(again).result == Result.COPIED
    assert owner.digest("b") == digest(4 * MIB, 1)


def test_jobs_in_flight_are_answered_before_the_copier_ends(node: Node) -> None:
    owner, link = node.owner(), node.start(faults="hang cuEventRecord seconds=1")
    owner.make("a", BLOCK, seed=1)
    fd = owner.export("a")
    for job in range(3):
        link.save(job, BLOCK * job, BLOCK, fd)
    os.close(fd)
    assert state(link).ready, "it has read the jobs"
    node.processes[-1].send_signal(signal.SIGTERM)
    assert node.processes[-1].stderr is not None
    while (line := node.processes[-1].stderr.readline()) == "tangram-copier: alive\n":
        pass
    assert line.startswith("tangram-copier: ends after ")
    save(link, owner, "a", 9, BLOCK * 9, BLOCK)
    answers = sorted((done(link) for _ in range(4)), key=lambda one: one.job)
    assert [(one.job, one.result) for one in answers] == [
        (0, Result.COPIED), (1, Result.COPIED), (2, Result.COPIED), (9, Result.ENDING),
    ]  # fmt: skip
    with pytest.raises(CopierAway, match="ended with 0 jobs not answered"):
        done(link)
    assert node.processes[-1].wait(LIMIT_S) == 0


def answers_until_the_end(link: Copier) -> list[Done]:
    """Also those that were sent before the copier was killed."""
    found = []
    try:
        while True:
            found.append(done(link))
    except CopierAway:
        return found


def restored(link: Copier, owner: Owner, slots: dict[int, tuple[int, int]]) -> dict[int, str]:
    """Digest by slot number of what the pool has."""
    found = {}
    for slot, (_, size) in slots.items():
        owner.make("back", size, seed=None)
        restore(link, owner, "back", slot, slot * 4 * MIB, size)
        assert done(link).result == Result.COPIED
        found[slot] = owner.digest("back")
        owner.drop("back")
    return found


def test_a_copier_that_is_killed_in_the_middle_of_copies_leaves_every_answered_slot_intact(node: Node) -> None:
    chosen, owner = random.Random(5), node.owner()
    sizes = {seed: BLOCK * (1 + seed % 2) for seed in range(BLOCKS)}
    for seed, size in sizes.items():
        owner.make(f"{seed}", size, seed=seed)
    intact: dict[int, tuple[int, int]] = {}  # slot -> seed and size of what was answered last
    answered = 0
    for _ in range(KILLS):
        link = node.start(pool_bytes=256 * MIB)
        assert restored(link, owner, intact) == {slot: digest(size, seed) for slot, (seed, size) in intact.items()}
        batch = {job: (chosen.randrange(64), chosen.randrange(BLOCKS)) for job in range(60)}
        batch = {job: one for job, one in batch.items() if one[0] not in [b[0] for j, b in batch.items() if j < job]}
        killing = threading.Timer(chosen.random() * 0.15, node.processes[-1].kill)
        killing.start()
        try:
            for job, (slot, seed) in batch.items():
                intact.pop(slot, None)
                save(link, owner, f"{seed}", job, slot * 4 * MIB, sizes[seed])
        except CopierAway:
            pass
        for answer in answers_until_the_end(link):
            assert answer.result == Result.COPIED
            slot, seed = batch[answer.job]
            intact[slot] = (seed, sizes[seed])
            answered += 1
        killing.join()
        node.processes[-1].wait()
    assert answered > KILLS, "some were answered before the kills"
    assert len(restored(node.start(pool_bytes=256 * MIB), owner, intact)) == len(intact)


def test_a_second_copier_of_the_same_pool_or_socket_ends_and_the_first_goes_on(node: Node) -> None:
    link = node.start(pool_bytes=POOL)
    assert f"socket {node.socket}: another copier serves it" in node.failure(pool_bytes=POOL)
    other = node.folder / "other.sock"
    assert f"pool {node.pool}: another copier uses it" in node.failure(pool_bytes=POOL, path=other)
    assert state(link).ready


def test_a_pool_larger_than_allowed_is_refused_and_keeps_its_content(node: Node) -> None:
    node.pool.write_bytes(b"x" * 2 * POOL)
    assert "pool has 32 MiB, and 16 are allowed" in node.failure(pool_bytes=POOL).replace(str(node.pool), "pool")
    assert node.pool.read_bytes() == b"x" * 2 * POOL


def test_a_pool_that_the_host_has_no_memory_for_is_refused_and_leaves_nothing(node: Node) -> None:
    errors = node.failure(pool_bytes=HUGE_POOL, under=BOUND)
    assert "the host or the cgroup has not so much memory left" in errors
    assert "there is no pool of 33554432 MiB" in errors
    assert list(node.pools.iterdir()) == []


def test_a_pool_that_cannot_grow_keeps_its_size_and_content(node: Node) -> None:
    node.pool.write_bytes(b"x" * POOL)
    assert "has not so much memory left" in node.failure(pool_bytes=HUGE_POOL, under=BOUND)
    assert node.pool.read_bytes() == b"x" * POOL


def test_a_file_on_a_disk_is_no_pool(node: Node) -> None:
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as on_disk:
        pool = Path(on_disk) / "pool"
        assert "it is not a file on a hugetlbfs or tmpfs" in node.failure(pool, pool_bytes=POOL)
        assert not pool.exists()


def test_two_pools_that_exist_are_refused(node: Node) -> None:
    pools = [node.pools / "a", node.pools / "b"]
    for pool in pools:
        pool.write_bytes(bytes(POOL))
    assert f"pools {pools[0]} and {pools[1]} both exist" in node.failure(*pools, pool_bytes=POOL)


def test_a_pool_that_exists_is_used_before_one_that_is_named_earlier(node: Node) -> None:
    first, second = node.pools / "a", node.pools / "b"
    second.write_bytes(b"x" * POOL)
    assert state(node.start(first, second, pool_bytes=POOL)).ready
    assert not first.exists()
    assert second.read_bytes() == b"x" * POOL


def test_a_pool_that_the_driver_does_not_register_ends_the_copier(node: Node) -> None:
    errors = node.failure(pool_bytes=POOL, faults="fail cuMemHostRegister_v2")
    assert "the driver cannot register the pool's memory after 0 of 16 MiB: CUDA error 2" in errors


def test_the_pool_is_roots_alone(node: Node) -> None:
    node.start(pool_bytes=POOL)
    assert node.pool.stat().st_mode & 0o777 == 0o600
    assert node.socket.stat().st_mode & 0o777 == 0o600


MOUNTS = """
mount -t hugetlbfs -o min_size=0 none "$0/huge" && mount -t tmpfs -o size=64m,huge=advise none "$0/thp" && mount -t tmpfs -o size=8m none "$0/small" &&
exec "$@"
"""


def mounted(node: Node, *pools: str) -> subprocess.Popen[str]:
    """A copier that sees a hugetlbfs, a tmpfs with huge pages and one of 8 MiB."""
    for name in ("huge", "thp", "small"):
        (node.folder / name).mkdir()
    named = [word for pool in pools for word in ("--pool", str(node.folder / pool / "pool"))]
    words = [str(shim_build() / "tangram-copier"), "--gpu", UUID, "--socket", str(node.socket), *named]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", MOUNTS, str(node.folder), *words, "--pool-bytes", str(POOL)],
        env=node.driver.env(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    node.processes.append(process)
    return process


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_without_huge_pages_in_reserve_the_next_pool_named_is_used(node: Node) -> None:
    spare = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    link = node.connect(mounted(node, "huge", "small", "thp"))
    seen = state(link)
    assert seen.pages == (Pages.HUGETLB_PAGES if spare * BLOCK >= POOL else Pages.TRANSPARENT_PAGES)
    assert seen.registered_bytes == POOL


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_tmpfs_that_is_too_small_fails_at_the_start(node: Node) -> None:
    _, errors = mounted(node, "small").communicate(timeout=LIMIT_S)
    assert node.processes[-1].returncode == 1
    assert "of 16 MiB: No space left on device" in errors
    assert "there is no pool of 16 MiB" in errors


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "--gpu, --socket, --pool and --pool-bytes are needed"),
        (["--gpu", "GPU-0000000a"], "are needed"),
        (["--gpu", "GPU-0000000a", "--socket", "s", "--pool", "p", "--pool-bytes", "2097152"], "a whole UUID"),
        (["--gpu", f"{UUID},{UUID}", "--socket", "s", "--pool", "p", "--pool-bytes", "2097152"], "a whole UUID"),
        (["--pool-bytes", "0"], "--pool-bytes must be a number of bytes, a multiple of 2097152"),
        (["--pool-bytes", "-2097152"], "--pool-bytes must be"),
        (["--pool-bytes", "2097153"], "--pool-bytes must be"),
        (["--pool-bytes", "99999999999999999999"], "--pool-bytes must be"),
        (["--pool-bytes", "2 MiB"], "--pool-bytes must be"),
        (["--pool"], "each option has a value"),
        (["--pool", "a"] * 5, "--pool can be given four times"),
        (["--speed", "9"], "unknown option"),
    ],
)
def test_wrong_arguments_end_the_copier_with_a_sentence(words: list[str], error: str) -> None:
    ran = subprocess.run([str(shim_build() / "tangram-copier"), *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert error in ran.stderr
    assert "usage: tangram-copier --gpu UUID" in ran.stderr
