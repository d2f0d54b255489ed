"""The connection to the arbiter, and the one helper thread: without them nothing is unlimited, and no thread waits for them twice."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.shim.conftest import GPUS, MIB, OUT_OF_MEMORY, Stage, wait_for
from tests.integration.shim.robust import run
from vgpu.protocol import wire

SOON_S = 1.0
"""What is answered at once, on a busy machine; a stopped arbiter used to cost 2 s for each call."""


def took_s(since_s: float) -> float:
    return time.monotonic() - since_s


# --- without a helper thread ---


def test_the_helper_starts_beside_large_thread_local_variables(stage: Stage) -> None:
    assert run(stage, "peers_tls", "threads").codes == run(stage, "peers", "threads").codes == [0, 1]
    assert run(stage, "peers", "threads", **stage.without_threads).codes == [0, 0]


def test_siblings_without_a_helper_fill_the_limit_to_the_last_mib_alternately(stage: Stage) -> None:
    one, two = stage.probe(**stage.without_threads), stage.probe(**stage.without_threads)
    for first, second in ((one, two), (two, one)):
        (code, most), (refused, *_) = first.request("alloc", 700 * MIB), second.request("alloc", 301 * MIB)
        assert (code, refused) == (0, OUT_OF_MEMORY)
        code, rest = second.request("alloc", 300 * MIB)
        assert (code, first.alloc(1)) == (0, OUT_OF_MEMORY)
        assert first.request("free", most) == second.request("free", rest) == [0]
        assert stage.status().gpus[0].leased_bytes == 0, "what is not needed is returned at once"


def test_three_processes_without_a_helper_use_at_most_one_limit_together(stage: Stage) -> None:
    probes = [stage.probe(**stage.without_threads) for _ in range(3)]
    assert sorted(probe.alloc(900) for probe in probes) == [0, OUT_OF_MEMORY, OUT_OF_MEMORY]


def test_a_process_without_a_helper_warns_once(stage: Stage) -> None:
    probe = stage.probe(**stage.without_threads)
    assert [probe.alloc(1) for _ in range(5)] == [0] * 5
    assert probe.end().count("no thread can be started") == 1


def test_a_process_without_a_helper_comes_back_to_a_restarted_arbiter(own_stage: Stage) -> None:
    probe = own_stage.probe(**own_stage.without_threads)
    assert probe.alloc(600) == 0
    own_stage.stop_arbiter(another=True)
    own_stage.start_arbiter("--grace-ms", "200")
    assert probe.alloc(300) == 0
    assert own_stage.probe().alloc(200) == OUT_OF_MEMORY, "600 and 300 were stated"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_without_a_helper_that_changed_its_root_comes_back_too(own_stage: Stage, tmp_path: Path) -> None:
    gpu = own_stage.worker(**own_stage.without_threads)
    gpu.must("alloc(600)")
    gpu.must(f"[__import__('os').chroot({str(tmp_path)!r}) or 0]")
    own_stage.stop_arbiter(another=True)
    own_stage.start_arbiter("--grace-ms", "200")
    gpu.must("alloc(300)")
    assert own_stage.probe().alloc(200) == OUT_OF_MEMORY, "600 and 300 were stated"


# --- an arbiter that is stopped, or away ---


def test_a_stopped_arbiter_is_noticed_once(own_stage: Stage) -> None:
    probe = own_stage.probe()
    code, at = probe.request("alloc", 10 * MIB)
    assert code == 0
    own_stage.signal_arbiter(signal.SIGSTOP)
    began = time.monotonic()
    assert probe.alloc(900) == OUT_OF_MEMORY
    assert 1.5 < took_s(began) < 4, "it might have been slow"
    began = time.monotonic()
    assert [probe.alloc(900) for _ in range(20)] == [OUT_OF_MEMORY] * 20
    assert probe.request("free", at) == [0]
    assert probe.alloc(10) == 0, "the lease covers it"
    probe.request("info")
    assert took_s(began) < 4, "if each waited, 40 s"
    own_stage.signal_arbiter(signal.SIGCONT)
    wait_for(lambda: probe.alloc(900) == 0)


def test_a_stopped_arbiter_delays_one_release_of_an_exported_block_and_not_each(own_stage: Stage) -> None:
    gpu = own_stage.worker()
    blocks = [gpu.must("create(2, handles=1)") for _ in range(8)]
    for block in blocks:
        assert gpu.request(f"export_block({block})")[0] == 0
    own_stage.signal_arbiter(signal.SIGSTOP)
    gpu.must(f"release({blocks[0]})")
    began = time.monotonic()
    for block in blocks[1:]:
        gpu.must(f"release({block})")
    assert took_s(began) < SOON_S
    own_stage.signal_arbiter(signal.SIGCONT)
    wait_for(lambda: own_stage.status().gpus[0].used_bytes == 0)


def test_a_process_that_starts_beside_a_stopped_arbiter_is_refused_once_slowly_and_then_at_once(
    own_stage: Stage,
) -> None:
    own_stage.signal_arbiter(signal.SIGSTOP)
    probe = own_stage.bare_probe()
    began = time.monotonic()
    assert probe.request("use", 0) == [OUT_OF_MEMORY]
    assert took_s(began) < 4
    began = time.monotonic()
    assert [probe.request("use", 0) for _ in range(5)] == [[OUT_OF_MEMORY]] * 5
    assert took_s(began) < SOON_S
    own_stage.signal_arbiter(signal.SIGCONT)
    wait_for(lambda: probe.request("use", 0) == [0])


def test_an_arbiter_that_is_away_is_waited_for_once_and_never_by_a_query_of_free_memory(own_stage: Stage) -> None:
    probe = own_stage.probe(TANGRAM_WAIT_MS="2000")
    assert probe.alloc(1) == 0
    lost = time.monotonic()  # the library counts from there, and this process may get a processor late
    own_stage.stop_arbiter()
    began = time.monotonic()
    probe.request("info")
    assert took_s(began) < SOON_S
    assert probe.alloc(900) == OUT_OF_MEMORY
    assert took_s(lost) > 1.0
    assert took_s(began) < 4
    began = time.monotonic()
    assert [probe.alloc(900) for _ in range(5)] == [OUT_OF_MEMORY] * 5
    probe.request("info")
    assert took_s(began) < SOON_S


# --- descriptors, forks, cancelled threads ---


def test_a_number_that_the_program_closed_and_uses_for_itself_is_left_alone(stage: Stage) -> None:
    assert run(stage, "peers", "reused").codes == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("when", ["rawfork", "early"])
def test_a_fork_that_runs_no_handlers_leaves_the_parents_connection_alone(own_stage: Stage, when: str) -> None:
    """The child used to lease on it, and to read the parent's WELCOME: the arbiter closed the connection, or the parent was refused."""
    assert run(own_stage, "peers", when).codes == [0, 0, 0]
    assert not any('"bad packet"' in line for line in own_stage.arbiter_log)


def test_a_thread_cancelled_in_a_launch_leaves_no_lock_behind(stage: Stage) -> None:
    kernel = f"{stage.library}:{stage.build}/fake/libfake-kernel.so"
    assert run(stage, "peers", "launches", LD_PRELOAD=kernel).codes == [0, 0, 0, 0]


def test_forks_in_a_storm_of_launches_neither_hang_nor_escape_the_limit(stage: Stage) -> None:
    kernel = f"{stage.library}:{stage.build}/fake/libfake-kernel.so"
    assert run(stage, "peers", "storm", seconds=20, LD_PRELOAD=kernel).codes == [0, 0, 0, OUT_OF_MEMORY]


# --- what a process reports that it cannot enforce ---

REPORT = 17
NO_THREAD = 1
FEATURES_AT = 1040


def _received(sock: socket.socket) -> bytes:
    packet = sock.recv(4096)
    if not packet:
        sock.close()
    return packet


@contextmanager
def scripted_arbiter(folder: Path, features: int) -> Iterator[list[tuple[int, int]]]:
    """Answers HELLO and every LEASE, and keeps the REPORTs, (reason, active) each."""
    reports: list[tuple[int, int]] = []
    page = os.memfd_create("page")
    os.ftruncate(page, 4096)
    os.pwrite(page, struct.pack("<I", features), FEATURES_AT)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "arbiter.sock"))
    listener.listen()
    ended = threading.Event()

    def serve(sock: socket.socket) -> None:
        while packet := _received(sock):
            kind, seq = struct.unpack_from("<HI", packet, 6)
            body = packet[16:]
            if kind == 1:
                gpu = wire.WelcomeGpu(bytes.fromhex(GPUS[0][4:].replace("-", "")), 1000 * MIB, 0, 1)
                passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [page]))]
                sock.sendmsg([wire.encode(0, wire.Welcome((gpu,)))], passed)
            elif kind == 3:
                need, want = struct.unpack_from("<QQ", body, 8)
                sock.send(wire.encode(seq, wire.Leased(0, False, max(need, want), 0)))
            elif kind == 9:
                sock.send(wire.encode(seq, wire.Leased(0, False, 1, 0)))
            elif kind == 5:
                sock.send(wire.encode(seq, wire.Leased(0, False, 0, 0)))
            elif kind == REPORT:
                reports.append(struct.unpack("<II", body))

    def accept() -> None:
        while not ended.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield reports
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        os.close(page)


def test_an_arbiter_that_understands_it_gets_a_report_of_the_missing_thread(bare_stage: Stage) -> None:
    bare_stage.grant((GPUS[0], 1000))
    with scripted_arbiter(bare_stage.folder / "grants" / bare_stage.key, features=1) as reports:
        probe = bare_stage.probe(**bare_stage.without_threads)
        assert probe.alloc(1) == 0
        wait_for(lambda: reports == [(NO_THREAD, 1)])


def test_an_older_arbiter_is_sent_no_packet_that_it_does_not_know(bare_stage: Stage) -> None:
    bare_stage.grant((GPUS[0], 1000))
    with scripted_arbiter(bare_stage.folder / "grants" / bare_stage.key, features=0) as reports:
        probe = bare_stage.probe(**bare_stage.without_threads)
        assert [probe.alloc(1) for _ in range(3)] == [0, 0, 0]
        probe.end()
        assert reports == []
