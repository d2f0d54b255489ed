"""Elastic memory that other processes open by its IPC handle: to the programs what the driver's handles are, and nothing to a process of another pod.

Each case of the table runs twice: with plain memory and without the library, which is the driver's own answer, and with elastic memory. The container has
1000 MiB of the one GPU that it sees.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shim.burst_kit import ANCHOR_MIB, SENDS_LIMITS, burst, bursting_node, bursting_stage, worker
from tests.integration.shim.conftest import GPUS, INVALID_VALUE, MIB, OUT_OF_MEMORY, Stage, Worker, a_node, wait_for
from tests.integration.shim.ipc_cases import (
    TABLE,
    Company,
    case_freed_before_it_is_opened,
    case_handles_that_no_process_made,
    case_opened_in_its_own_process,
    gpu_bytes,
)
from tests.signals import send_signal
from vgpu.api.codec import grant_to_text
from vgpu.api.grant import Grant, GrantGpu
from vgpu.protocol import wire
from vgpu.protocol.passing_wire import key_of

__all__ = ["bursting_node", "bursting_stage"]

INVALID_CONTEXT, INVALID_HANDLE = 201, 400
MAGIC = b"TNGRIPC\1"


@pytest.fixture
def stage(bursting_stage: Stage) -> Stage:
    """A container of a pod of its own, which may burst."""
    container(bursting_stage, bursting_stage.key, uid=bursting_stage.key)
    return bursting_stage


def container(stage: Stage, key: str, uid: str) -> None:
    stage.write_grant(grant_to_text(Grant("default", "a", uid, key, (GrantGpu(GPUS[0], 1000),))), key)
    burst(stage, wait_s=1, key=key)


def native(stage: Stage) -> Worker:
    """A program without the library."""
    return worker(stage, LD_PRELOAD="")


@pytest.mark.parametrize("case", TABLE.values(), ids=TABLE.keys())
def test_it_is_as_with_the_driver(stage: Stage, case: Callable[[Company], list[Any]]) -> None:
    drivers = case(Company(lambda: native(stage)))
    assert case(Company(lambda: worker(stage))) == drivers


def test_the_handles_of_the_table_are_worker(stage: Stage) -> None:
    _, handle = Company(lambda: worker(stage)).made()
    assert bytes.fromhex(handle).startswith(MAGIC)


def test_the_drivers_own_answers(stage: Stage) -> None:
    """What the table compares with: a change of the fake driver shows here."""
    company = Company(lambda: native(stage))
    assert case_opened_in_its_own_process(company) == [INVALID_CONTEXT]
    assert case_freed_before_it_is_opened(company) == [INVALID_HANDLE]
    assert case_handles_that_no_process_made(company) == [INVALID_VALUE] * 3


def test_both_see_what_kernels_of_the_other_write_while_both_run(stage: Stage) -> None:
    company = Company(lambda: worker(stage))
    at, handle = company.made(4)
    there = company.opened(handle)
    company.maker.must(f"fill({at}, 4, 0)")
    for gpu, base in ((company.maker, at), (company.guest, there)):
        gpu.must(f"fill({base} + {(gpu is company.guest) * 2 * MIB}, 2, {1 + (gpu is company.guest)})")
        gpu.start("busy(300)")
    for gpu in (company.maker, company.guest):
        assert gpu.finish()[0] == 0
    for gpu, base in ((company.maker, at), (company.guest, there)):
        assert {gpu_bytes(gpu, base), gpu_bytes(gpu, base + 3 * MIB)} == {"01" * 16, "02" * 16}


def test_a_container_of_the_same_pod_opens_it(stage: Stage) -> None:
    container(stage, f"{stage.key}b", uid=stage.key)
    maker, guest = worker(stage), worker(stage, f"{stage.key}b")
    at = maker.must("alloc(10)")
    maker.must(f"fill({at}, 10, 7)")
    there = guest.must(f"ipc_open('{maker.must(f'ipc_get({at})')}')")
    assert gpu_bytes(guest, there) == "07" * 16
    assert guest.free_mib() == 990, "it is charged in this container, too: the maker's is not here"


def test_another_pod_gets_the_drivers_error_and_a_sentence(stage: Stage) -> None:
    container(stage, f"{stage.key}c", uid="another")
    maker, outsider = worker(stage), worker(stage, f"{stage.key}c")
    handle = maker.must(f"ipc_get({maker.must('alloc(10)')})")
    assert outsider.request(f"ipc_open('{handle}')")[0] == INVALID_HANDLE
    assert "is not opened: no process of this pod has such memory" in outsider.end()


@pytest.mark.parametrize("byte", [8, 31, 32, 40, 48, 63])
def test_a_handle_with_a_bit_flipped_opens_nothing(stage: Stage, byte: int) -> None:
    company = Company(lambda: worker(stage))
    _, handle = company.made()
    raw = bytearray.fromhex(handle)
    raw[byte] ^= 0x10
    assert company.guest.request(f"ipc_open('{raw.hex()}')")[0] == INVALID_HANDLE
    company.opened(handle)


def left_mib_is(gpu: Worker, mib: int) -> bool:
    """Beside the page by which cuMemFree of the maker waits (anchor.c)."""
    code, at = gpu.request(f"managed({mib})")
    too_much = gpu.request(f"managed({mib + 1 if code else 1})")[0]
    if code == 0:
        gpu.must(f"free({at})")
    return (code, too_much) == (0, OUT_OF_MEMORY)


def test_it_is_charged_once_while_any_process_has_it(stage: Stage) -> None:
    company, onlooker = Company(lambda: worker(stage)), worker(stage)
    at, handle = company.made(600)
    there = company.opened(handle)
    assert left_mib_is(onlooker, 398)
    company.maker.must(f"free({at})")
    assert left_mib_is(onlooker, 398), "the guest has it still"
    company.guest.must(f"ipc_close({there})")
    assert left_mib_is(onlooker, 998)


def test_what_is_freed_and_not_open_is_free_at_once(stage: Stage) -> None:
    company = Company(lambda: worker(stage))
    at, _ = company.made(600)
    company.maker.must(f"free({at})")
    assert stage.true_mib(company.maker) == ANCHOR_MIB, "it is not kept: others might write into it"


def test_a_stopped_maker_keeps_no_process_waiting(stage: Stage) -> None:
    company = Company(lambda: worker(stage))
    _, handle = company.made()
    send_signal(company.maker.pid, signal.SIGSTOP)
    try:
        assert company.guest.request(f"ipc_open('{handle}')")[0] == INVALID_HANDLE
    finally:
        send_signal(company.maker.pid, signal.SIGCONT)
    company.opened(handle)
    assert "the process that has the memory does not answer" in company.guest.end()


def descriptors(gpu: Worker) -> int:
    """Of memory that is passed."""
    files = [str(fd.readlink()) for fd in Path(f"/proc/{gpu.pid}/fd").iterdir()]
    return sum("fake-gpu-handle" in file or "no memory" in file for file in files)


def test_no_descriptor_is_left_anywhere(stage: Stage) -> None:
    company = Company(lambda: worker(stage))
    _, handle = company.made(900)
    company.guest.must(f"ipc_close({company.opened(handle)})")
    for _ in range(20):
        company.guest.must(f"ipc_close({company.opened(handle)})")
    assert [descriptors(gpu) for gpu in (company.maker, company.guest)] == [0, 0]


def test_without_descriptors_it_is_refused_and_works_later(stage: Stage) -> None:
    company = Company(lambda: worker(stage))
    _, handle = company.made()
    company.guest.must("use_up_descriptors()")
    assert company.guest.request(f"ipc_open('{handle}')")[0] == INVALID_HANDLE
    company.guest.must("free_descriptors()")
    company.opened(handle)
    assert "no file descriptor is free" in company.guest.end()


def test_after_a_restart_of_the_arbiter_a_handle_still_opens(build: Path) -> None:
    with a_node(build, prelude=SENDS_LIMITS) as stage:
        container(stage, stage.key, uid="one")
        stage.start_arbiter("--grace-ms", "0")
        company = Company(lambda: worker(stage))
        _, handle = company.made()
        stage.stop_arbiter(another=True)
        stage.start_arbiter("--grace-ms", "1000")
        company.opened(handle)


BEYOND_THE_GUARANTEE = f"""
{SENDS_LIMITS}
from vgpu.memory.ledger import Ledger
from vgpu.memory.records import Denied
Ledger.convert = lambda self, process, gpu, seq, amount: Denied(process, gpu, seq)
"""
OF_AN_EARLIER_RELEASE = f"""
{SENDS_LIMITS}
import arbiter.page
from vgpu.protocol import wire
arbiter.page.FEATURES &= ~wire.UNDERSTANDS_OPEN
"""


@pytest.mark.parametrize(
    ("prelude", "why"),
    [
        (BEYOND_THE_GUARANTEE, "that does not fit into the container's guarantee"),
        (OF_AN_EARLIER_RELEASE, "the arbiter does not answer, or is of an earlier release"),
    ],
)
def test_where_it_cannot_stay_on_the_gpu_there_is_no_handle_and_it_stays_elastic(
    build: Path, prelude: str, why: str
) -> None:
    with a_node(build, prelude=prelude) as stage:
        container(stage, stage.key, uid="one")
        stage.start_arbiter("--grace-ms", "0")
        gpu = worker(stage)
        at = gpu.must("alloc(900)")
        assert gpu.request(f"ipc_get({at})")[0] == INVALID_VALUE
        gpu.must(f"free({at})")
        assert gpu.must("alloc(900)") == at, "it was kept, as elastic memory is"
        assert f"no IPC handle for memory that can be swapped: {why}" in gpu.end().replace(
            "memory that others open stays on the GPU, and ", ""
        )


def test_processes_open_and_close_while_the_maker_frees_and_nothing_is_left(stage: Stage) -> None:
    maker, guests = worker(stage), [worker(stage) for _ in range(3)]
    made = [maker.must(f"alloc({mib})") for mib in (0.25, 0.3, 20, 0.25, 100)]
    handles = [maker.must(f"ipc_get({at})") for at in made]
    for guest in guests:
        guest.start(f"open_and_close({handles}, 60)")
    for _ in range(10):
        for at in made[1:]:
            maker.must(f"free({at})")
        made[1:] = [maker.must(f"alloc({mib})") for mib in (0.3, 20, 0.25, 100)]
        for at in made:
            maker.must(f"ipc_get({at})")
    for guest in guests:
        code, codes = guest.finish()
        assert code == 0
        assert {0, 1000, 2000} <= set(codes) <= {0, INVALID_HANDLE, 1000, 2000}
    for at in made:
        maker.must(f"free({at})")
    assert [descriptors(gpu) for gpu in (maker, *guests)] == [0] * 4
    assert left_mib_is(guests[0], 998)


class Liar:
    """A process of the container that speaks the protocol by hand, and states that it has memory."""

    def __init__(self, stage: Stage, handle: bytes, mib: int) -> None:
        self.handle = handle
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(20)
        self.sock.connect(str(stage.folder / "grants" / stage.key / "arbiter.sock"))
        key = key_of(handle)
        assert key is not None
        for seq, message in enumerate(
            (
                wire.Hello(1, 0, "liar"),
                wire.Lease(0, mib * MIB, 0),
                wire.Hold(0, wire.HoldState.MADE, wire.Space.IPC, mib * MIB, key),
                wire.Convert(0, mib * MIB),
            )
        ):
            self.sock.send(wire.encode(seq, message))
        for _ in range(3):  # WELCOME, and two answers
            wire.decode(self.sock.recv(wire.PACKET_LIMIT))

    def answer(self, answer: wire.Exported) -> None:
        seq, message = wire.decode(self.sock.recv(wire.PACKET_LIMIT))
        assert message == wire.Export(self.handle)
        fds = array.array("i", [os.memfd_create("no memory") for _ in answer.blocks])
        self.sock.sendmsg([wire.encode(seq, answer)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        for fd in fds:
            os.close(fd)


def forged(offset: int = 0, requested: int = MIB) -> bytes:
    return MAGIC + os.urandom(24) + struct.pack("<4Q", offset, requested, 1, 0)


@pytest.mark.parametrize(
    ("handle", "answer"),
    [
        (forged(), wire.Exported(0, 4 * MIB, 2, 0, (2 * MIB, 2 * MIB))),
        (forged(), wire.Exported(0, 2**62, 1, 0, (2**62,))),
        (forged(offset=2 * MIB), wire.Exported(0, 2 * MIB, 1, 0, (2 * MIB,))),
        (forged(requested=2**63), wire.Exported(0, 2 * MIB, 1, 0, (2 * MIB,))),
        (forged(offset=2**64 - MIB), wire.Exported(0, 2 * MIB, 1, 0, (2 * MIB,))),
    ],
    ids=["no memory", "too large", "offset behind it", "longer than it", "offset before it"],
)
def test_a_process_that_lies_hurts_no_process_that_opens(stage: Stage, handle: bytes, answer: wire.Exported) -> None:
    guest = worker(stage)
    guest.must("alloc(1)")
    liar = Liar(stage, handle, 4)
    guest.start(f"ipc_open('{handle.hex()}')")
    liar.answer(answer)
    assert guest.finish()[0] in (INVALID_HANDLE, OUT_OF_MEMORY)
    assert descriptors(guest) == 0
    liar.sock.close()
    wait_for(lambda: left_mib_is(guest, 996))
