"""What the driver answers about IPC handles, as a table of cases: each function gets two processes with a GPU and returns what they were answered.

Run as a program on a machine with a GPU, it prints the driver's own answers, to compare with what test_ipc.py expects of the fake driver:

    python -m tests.integration.shim.ipc_cases
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.integration.shim.conftest import Worker

MIB = 2**20


class Company:
    """Processes of one kind, by the order in which the case needs them."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self.maker, self.guest = start(), start()
        self.start = start

    def made(self, mib: float = 10) -> tuple[int, str]:
        at: int = self.maker.must(f"alloc({mib})")
        return at, self.maker.must(f"ipc_get({at})")

    def opened(self, handle: str, by: Worker | None = None) -> int:
        at: int = (by or self.guest).must(f"ipc_open('{handle}')")
        return at


def gpu_bytes(gpu: Worker, at: int, count: int = 16) -> str:
    content: str = gpu.must(f"bytes_at({at}, {count})")
    return content


def case_opened(company: Company) -> list[Any]:
    at, handle = company.made()
    company.maker.must(f"fill({at}, 10, 7)")
    there = company.opened(handle)
    seen = gpu_bytes(company.guest, there)
    company.guest.must(f"fill({there}, 10, 8)")
    closed = company.guest.request(f"ipc_close({there})")
    return [seen, gpu_bytes(company.maker, at), closed]


def case_opened_in_its_own_process(company: Company) -> list[Any]:
    _, handle = company.made()
    return company.maker.request(f"ipc_open('{handle}')")[:1]


def case_opened_twice_is_one_pointer_until_it_is_closed_twice(company: Company) -> list[Any]:
    _, handle = company.made()
    first, second = company.opened(handle), company.opened(handle)
    codes = [company.guest.request(f"ipc_close({first})")[0]]
    codes.append(company.guest.request(f"fill({first}, 10, 3)")[0])
    codes += [company.guest.request(f"ipc_close({first})")[0] for _ in range(2)]
    return [first == second, codes]


def case_closed_early(company: Company) -> list[Any]:
    at, handle = company.made()
    company.guest.must(f"ipc_close({company.opened(handle)})")
    company.maker.must(f"fill({at}, 10, 9)")
    again = company.opened(handle)
    return [gpu_bytes(company.guest, again), company.maker.request(f"free({at})")]


def case_freed_while_it_is_open(company: Company) -> list[Any]:
    at, handle = company.made()
    company.maker.must(f"fill({at}, 10, 5)")
    there = company.opened(handle)
    freed = company.maker.request(f"free({at})")
    company.maker.must("alloc(10)")
    return [freed, gpu_bytes(company.guest, there), company.guest.request(f"ipc_close({there})")]


def case_freed_before_it_is_opened(company: Company) -> list[Any]:
    at, handle = company.made()
    company.maker.must(f"free({at})")
    return company.guest.request(f"ipc_open('{handle}')")[:1]


def case_maker_killed_before(company: Company) -> list[Any]:
    _, handle = company.made()
    company.maker.kill()
    return company.guest.request(f"ipc_open('{handle}')")[:1]


def case_maker_killed_after(company: Company) -> list[Any]:
    at, handle = company.made()
    company.maker.must(f"fill({at}, 10, 6)")
    there = company.opened(handle)
    company.maker.kill()
    company.guest.must(f"fill({there} + {5 * MIB}, 5, 4)")
    return [
        gpu_bytes(company.guest, there),
        gpu_bytes(company.guest, there + 9 * MIB),
        company.guest.request(f"ipc_close({there})"),
    ]


def case_guest_killed(company: Company) -> list[Any]:
    at, handle = company.made()
    company.guest.must(f"fill({company.opened(handle)}, 10, 2)")
    company.guest.kill()
    other = company.start()
    return [gpu_bytes(company.maker, at), gpu_bytes(other, company.opened(handle, other))]


def case_the_same_handle_each_time_and_another_for_another_allocation(company: Company) -> list[Any]:
    at, handle = company.made()
    same = company.maker.must(f"ipc_get({at})") == handle
    company.maker.must(f"free({at})")
    _, other = company.made()
    third, small = company.made(0.01)[1], company.made(0.01)[1]
    return [same, other != handle, len({handle, other, third, small})]


def case_an_interior_pointer_names_its_allocation(company: Company) -> list[Any]:
    at, handle = company.made()
    company.maker.must(f"fill({at}, 10, 1)")
    inside = company.maker.must(f"ipc_get({at} + {3 * MIB} + 512)")
    there = company.opened(inside)
    return [inside == handle, gpu_bytes(company.guest, there), company.guest.request(f"range_of({there} + 100)")[2]]


def case_what_is_no_pointer_to_close(company: Company) -> list[Any]:
    at, handle = company.made()
    there = company.opened(handle)
    codes = [company.guest.request(f"ipc_close({wrong})")[0] for wrong in (there + 512, 0, 12345)]
    return [*codes, company.maker.request(f"ipc_close({at})"), company.guest.request(f"free({there})")]


def case_small_allocations_side_by_side(company: Company) -> list[Any]:
    """Two of them share a block of the GPU's memory."""
    pairs = [company.made(0.25) for _ in range(2)]
    for number, (at, _) in enumerate(pairs):
        company.maker.must(f"fill({at}, 0.25, {number + 1})")
    there = [company.opened(handle) for _, handle in pairs]
    seen = [gpu_bytes(company.guest, at) for at in there]
    company.guest.must(f"fill({there[0]}, 0.25, 9)")
    sizes = [company.guest.request(f"range_of({at})")[1:] == [at, MIB // 4] for at in there]
    closed = [company.guest.request(f"ipc_close({at})") for at in there]
    return [seen, sizes, [gpu_bytes(company.maker, at) for at, _ in pairs], closed]


def case_a_large_allocation_of_several_blocks(company: Company) -> list[Any]:
    at, handle = company.made(900)
    company.maker.must(f"fill({at} + {890 * MIB}, 10, 6)")
    there = company.opened(handle)
    company.guest.must(f"fill({there} + {508 * MIB}, 8, 3)")
    ends = gpu_bytes(company.guest, there + 899 * MIB), gpu_bytes(company.maker, at + 515 * MIB)
    return [ends, company.guest.request(f"range_of({there})")[2], company.guest.request(f"ipc_close({there})")]


def case_handles_that_no_process_made(company: Company) -> list[Any]:
    _, handle = company.made()
    raw = bytes.fromhex(handle)
    wrong = [bytes(64), b"\xff" * 64, bytes([raw[0] ^ 1]) + raw[1:]]
    return [company.guest.request(f"ipc_open('{one.hex()}')")[0] for one in wrong]


def case_without_a_context(company: Company) -> list[Any]:
    at, handle = company.made()
    there = company.opened(handle)
    for gpu in (company.maker, company.guest):
        gpu.must("no_context()")
    return [
        company.maker.request(f"ipc_get({at})")[0],
        company.guest.request(f"ipc_open('{handle}')")[0],
        company.guest.request(f"ipc_close({there})")[0],
    ]


def case_a_forked_child(company: Company) -> list[Any]:
    """CUDA does not survive a fork, whoever forks."""
    at, handle = company.made()
    there = company.opened(handle)
    children = [
        company.maker.request(f"in_child(lambda: ipc_open('{handle}'))"),
        company.maker.request(f"in_child(lambda: ipc_get({at}))")[:1],
        company.guest.request(f"in_child(lambda: ipc_close({there}))"),
    ]
    return [children, company.guest.request(f"fill({there}, 10, 1)"), company.guest.request(f"ipc_close({there})")]


def case_a_context_that_ends(company: Company) -> list[Any]:
    _, handle = company.made()
    context = company.guest.must("context_new()")
    there = company.opened(handle)
    company.guest.must(f"context_end({context})")
    company.guest.must("use(0)")
    return company.guest.request(f"ipc_close({there})")


TABLE = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}


def answers() -> None:
    """Of each case, a line."""
    for name, case in TABLE.items():
        workers: list[Worker] = []

        def start(workers: list[Worker] = workers) -> Worker:
            workers.append(Worker({**os.environ, "CUDA_VISIBLE_DEVICES": "0"}))
            assert workers[-1].request("use(0)")[0] == 0
            return workers[-1]

        try:
            print(name, case(Company(start)), flush=True)
        except AssertionError as error:
            print(name, "ended with", str(error).splitlines()[:1], flush=True)
        for worker in workers:
            with suppress(AssertionError):
                worker.close()


if __name__ == "__main__":
    sys.exit(answers())
