"""Blocks that the copier saves and restores come back as they were."""

from __future__ import annotations

import os
import tempfile

import pytest

from arbiter.swap.copier import CopierAway
from tests.integration.copier.harness import Node, digest, done, restore, save, state
from tests.integration.copier.owner import MIB
from vgpu.api.errors import Refused
from vgpu.protocol import copier
from vgpu.protocol.copier import Done, Pages, Result


def copied(job: int, size_bytes: int) -> Done:
    """Its answer but for the time."""
    return Done(job, Result.COPIED, 0, size_bytes, 0)


def timeless(answer: Done) -> Done:
    return Done(answer.job, answer.result, answer.cuda_error, answer.copied_bytes, 0)


@pytest.mark.parametrize("mib", [2, 20, 64, 130])
def test_a_block_comes_back_as_it_was(node: Node, mib: int) -> None:
    size, owner, link = mib * MIB, node.owner(), node.start(pool_bytes=136 * MIB)
    owner.make("before", size, seed=1)
    save(link, owner, "before", 1, 4 * MIB, size)
    assert timeless(done(link)) == copied(1, size)
    owner.drop("before")
    owner.make("after", size, seed=None)
    restore(link, owner, "after", 2, 4 * MIB, size)
    assert timeless(done(link)) == copied(2, size)
    assert owner.digest("after") == digest(size, 1)


def test_blocks_do_not_mix(node: Node) -> None:
    owner, link = node.owner(), node.start(pool_bytes=128 * MIB)
    sizes = {f"{n}": (2 + 2 * (n % 4)) * MIB for n in range(24)}
    offset, at = 0, {}
    for job, (name, size) in enumerate(sizes.items()):
        owner.make(name, size, seed=job)
        at[name], offset = offset, offset + size
        save(link, owner, name, job, at[name], size)
    assert [timeless(done(link)) for _ in sizes] == [copied(job, size) for job, size in enumerate(sizes.values())]
    for name, size in sizes.items():
        owner.drop(name)
        owner.make(name, size, seed=None)
    for job, (name, size) in reversed(list(enumerate(sizes.items()))):
        restore(link, owner, name, job, at[name], size)
    assert {done(link).result for _ in sizes} == {Result.COPIED}
    assert {name: owner.digest(name) for name in sizes} == {
        name: digest(size, seed) for seed, (name, size) in enumerate(sizes.items())
    }


def test_answers_come_block_by_block(node: Node) -> None:
    owner, link = node.owner(), node.start(faults="hang cuEventRecord seconds=2")
    owner.make("a", 2 * MIB, seed=1)
    for job in (1, 2):
        save(link, owner, "a", job, 4 * MIB * job, 2 * MIB)
    assert done(link).job == 1
    assert state(link).jobs == 1
    assert done(link).job == 2


def test_both_directions_run_at_once(node: Node) -> None:
    # each chunk takes a second: three of them out, one in
    owner, link = node.owner(), node.start(faults="hang cuEventRecord seconds=1", pool_bytes=264 * MIB)
    owner.make("out", 192 * MIB, seed=1)
    owner.make("in", 2 * MIB, seed=2)
    save(link, owner, "out", 1, 0, 192 * MIB)
    restore(link, owner, "in", 2, 200 * MIB, 2 * MIB)
    assert [done(link).job, done(link).job] == [2, 1]


def test_the_state_tells_pool_and_context(node: Node) -> None:
    seen = state(node.start(pool_bytes=8 * MIB))
    assert seen == copier.State(8 * MIB, 8 * MIB, 8 * MIB, seen.context_mib, True, Pages.PLAIN_PAGES, 0, seen.file)
    assert seen.file is not None
    assert 300 <= seen.context_mib < 310, "a context of 300 MiB and what its streams take"


def test_a_block_is_gone_from_the_gpu_when_its_answer_comes_and_its_owner_drops_it(node: Node) -> None:
    owner, link = node.owner(), node.start()
    owner.make("a", 20 * MIB, seed=1)
    used_mib = node.driver.used_mib()
    save(link, owner, "a", 1, 0, 20 * MIB)
    assert done(link).result == Result.COPIED
    owner.drop("a")
    assert node.driver.used_mib() == used_mib - 20


def test_a_forgotten_job_that_waits_changes_nothing_and_one_in_progress_ends_early(node: Node) -> None:
    owner, link = node.owner(), node.start(faults="hang cuEventRecord seconds=1", pool_bytes=264 * MIB)
    owner.make("big", 258 * MIB, seed=1)
    owner.make("small", 2 * MIB, seed=2)
    save(link, owner, "big", 1, 0, 258 * MIB)
    save(link, owner, "small", 2, 260 * MIB, 2 * MIB)
    link.forget(2)
    link.forget(1)
    link.forget(3)
    first, second = done(link), done(link)
    assert (first.job, first.result) == (1, Result.FORGOTTEN)
    assert 0 <= first.copied_bytes < 258 * MIB
    assert timeless(second) == Done(2, Result.FORGOTTEN, 0, 0, 0)
    with node.pool.open("rb") as pool:
        pool.seek(260 * MIB)
        assert not any(pool.read(2 * MIB))


def test_what_is_no_block_or_a_smaller_one_fails_and_the_next_job_does_not(node: Node) -> None:
    owner, link = node.owner(), node.start()
    owner.make("a", 2 * MIB, seed=1)
    with tempfile.TemporaryFile() as file:
        link.save(1, 0, 2 * MIB, file.fileno())
    save(link, owner, "a", 2, 4 * MIB, 4 * MIB)
    save(link, owner, "a", 3, 8 * MIB, 2 * MIB)
    results = [done(link) for _ in range(3)]
    assert [answer.result for answer in results] == [Result.DRIVER_FAILED, Result.DRIVER_FAILED, Result.COPIED]
    assert [answer.cuda_error for answer in results] == [1, 1, 0]


def test_a_context_that_has_failed_ends_the_copier(node: Node) -> None:
    owner, link = node.owner(), node.start()
    owner.make("a", 2 * MIB, seed=1)
    node.driver.ctl("trap", node.processes[-1].pid, 719)
    save(link, owner, "a", 1, 0, 2 * MIB)
    with pytest.raises(CopierAway, match="ended with 1 jobs not answered"):
        done(link)
    assert node.processes[-1].wait(10) == 1


def test_no_more_jobs_are_sent_than_it_takes_and_no_number_twice(node: Node) -> None:
    owner, link = node.owner(), node.start(faults="hang cuEventRecord seconds=30", pool_bytes=258 * MIB)
    owner.make("a", 2 * MIB, seed=1)
    fd = owner.export("a")
    for job in range(copier.JOBS_LIMIT):
        link.save(job, 2 * MIB * job, 2 * MIB, fd)
    with pytest.raises(Refused, match="the copier has 128 jobs"):
        link.save(128, 256 * MIB, 2 * MIB, fd)
    with pytest.raises(Refused, match="job 5 is not answered yet"):
        link.restore(5, 256 * MIB, 2 * MIB, fd)
    os.close(fd)
    assert link.room == 0
    assert state(link).jobs == copier.JOBS_LIMIT
