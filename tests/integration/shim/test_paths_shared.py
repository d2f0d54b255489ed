"""Memory that processes of one container share is charged once, in whatever way and order the processes release it.

The container has 1000 MiB. The onlooker opens nothing: what it can allocate is what the container has left.
"""

from __future__ import annotations

import signal
from itertools import permutations
from threading import Timer

import pytest

from tests.integration.shim.conftest import GPUS, OUT_OF_MEMORY, Stage, Worker, wait_for

SHARED_MIB, LEFT_MIB = 600, 400
WAYS = ("ipc", "pool")


class Company:
    """A maker, the processes that opened its memory, and an onlooker."""

    def __init__(self, stage: Stage, way: str, guests: int, maker_key: str = "") -> None:
        self.way, self.onlooker = way, stage.worker()
        self.maker = stage.worker(key=maker_key)
        self.guests = [stage.worker() for _ in range(guests)]
        self.pool = pool = self.maker.must("pool_new(handles=1)") if way == "pool" else 0
        self.made = self.maker.must(f"pool_alloc({SHARED_MIB}, {pool})" if pool else f"alloc({SHARED_MIB})")
        if way == "ipc":
            name = self.maker.must(f"ipc_get({self.made})")
            self.how = f"ipc_open('{name}')"
        else:
            _, pid, fd, name = self.maker.request(f"pool_export({pool}, {self.made})")
            self.how = f"pool_import({pid}, {fd}, '{name}')"

    def open(self) -> None:
        self.opened = [guest.must(self.how) for guest in self.guests]

    def let_go(self, number: int, how: str) -> None:
        """0 is the maker."""
        process = self.guests[number - 1] if number else self.maker
        if how == "killed":
            process.kill()
        elif how == "reset":
            process.must("reset(0)")
        elif number and self.way == "ipc":
            process.must(f"ipc_close({self.opened[number - 1]})")
        else:
            process.must(f"free({self.opened[number - 1] if number else self.made})")
            process.must("context_sync()")
            if self.pool and not number:
                process.must(f"pool_trim({self.pool})")


def fits(gpu: Worker, mib: int) -> bool:
    code, at = gpu.request(f"alloc({mib})")
    if code == 0:
        gpu.must(f"free({at})")
    assert code in (0, OUT_OF_MEMORY)
    return bool(code == 0)


def left_mib_is(gpu: Worker, mib: int) -> bool:
    return fits(gpu, mib) and not fits(gpu, mib + 1)


@pytest.mark.parametrize("how", ["let go", "killed", "reset"])
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_ipc_memory_is_charged_once_until_the_last_has_let_go(stage: Stage, order: tuple[int, ...], how: str) -> None:
    company = Company(stage, "ipc", 2)
    company.open()
    assert left_mib_is(company.onlooker, LEFT_MIB)
    for number in order[:-1]:
        company.let_go(number, how)
        wait_for(lambda: left_mib_is(company.onlooker, LEFT_MIB))
    company.let_go(order[-1], how)
    wait_for(lambda: left_mib_is(company.onlooker, 1000))


POOL_ENDS = [
    (order, how) for order in permutations(range(3)) for how in ("let go", "killed") if how == "killed" or order[2] == 0
]
"""All processes that imported a pointer must free it before its maker does: otherwise the memory is charged twice."""


@pytest.mark.parametrize(("order", "how"), POOL_ENDS, ids=str)
def test_a_pools_pointer_is_charged_once_until_the_last_has_let_go(
    stage: Stage, order: tuple[int, ...], how: str
) -> None:
    company = Company(stage, "pool", 2)
    company.open()
    assert left_mib_is(company.onlooker, LEFT_MIB)
    for number in order[:-1]:
        company.let_go(number, how)
        wait_for(lambda: left_mib_is(company.onlooker, LEFT_MIB))
    company.let_go(order[-1], how)
    wait_for(lambda: left_mib_is(company.onlooker, 1000))


@pytest.mark.parametrize("way", WAYS)
def test_what_another_container_made_is_charged_once_here(stage: Stage, way: str) -> None:
    stage.grant((GPUS[0], 4000), key="other")
    company = Company(stage, way, 2, maker_key="other")
    company.open()
    assert left_mib_is(company.onlooker, LEFT_MIB)
    company.let_go(1, "let go")
    assert left_mib_is(company.onlooker, LEFT_MIB)
    company.let_go(2, "killed")
    wait_for(lambda: left_mib_is(company.onlooker, 1000))


def test_what_is_opened_twice_is_held_until_it_is_closed_twice(stage: Stage) -> None:
    company = Company(stage, "ipc", 1)
    company.open()
    again = company.guests[0].must(company.how)
    company.maker.kill()
    company.let_go(1, "let go")
    wait_for(lambda: left_mib_is(company.onlooker, LEFT_MIB))
    company.guests[0].must(f"ipc_close({again})")
    wait_for(lambda: left_mib_is(company.onlooker, 1000))


def test_freed_shared_memory_is_free_at_once_for_its_process_however_late_the_arbiter_reads(own_stage: Stage) -> None:
    company = Company(own_stage, "ipc", 1)
    company.open()
    company.maker.kill()
    wait_for(lambda: company.guests[0].free_mib() == LEFT_MIB)
    own_stage.signal_arbiter(signal.SIGSTOP)
    company.let_go(1, "let go")
    Timer(0.2, own_stage.signal_arbiter, (signal.SIGCONT,)).start()
    assert company.guests[0].free_mib() == 1000


def test_freed_memory_at_the_same_address_is_reported_from_what_was_there(stage: Stage) -> None:
    company = Company(stage, "ipc", 1)
    company.open()
    company.let_go(0, "let go")
    again = company.maker.must("alloc(300)")
    company.maker.must(f"ipc_get({again})")
    wait_for(lambda: left_mib_is(company.onlooker, 100))
    company.maker.must(f"free({again})")
    wait_for(lambda: left_mib_is(company.onlooker, LEFT_MIB))


def test_without_an_arbiter_a_process_opens_only_what_fits_its_own_lease(own_stage: Stage) -> None:
    company = Company(own_stage, "ipc", 1)
    own_stage.stop_arbiter()
    assert company.guests[0].request(company.how)[0] == OUT_OF_MEMORY


@pytest.mark.parametrize("meanwhile", ["nothing", "maker", "guest"])
def test_after_a_restart_the_arbiter_learns_which_process_has_what(own_stage: Stage, meanwhile: str) -> None:
    company = Company(own_stage, "ipc", 2)
    company.open()
    own_stage.stop_arbiter(another=True)
    if meanwhile != "nothing":
        company.let_go(0 if meanwhile == "maker" else 1, "let go")
    if meanwhile == "maker":
        assert not fits(company.maker, SHARED_MIB), "others may have it: it does not come back into the lease"
    own_stage.start_arbiter()
    wait_for(lambda: left_mib_is(company.onlooker, LEFT_MIB))
    for number in range(3):
        assert left_mib_is(company.onlooker, LEFT_MIB), "it is there until the last has gone"
        company.guests[number - 1].kill() if number else company.maker.kill()
    wait_for(lambda: left_mib_is(company.onlooker, 1000))
