"""What `ps` says when an arbiter answers, when none does, and on a node of a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from tangramctl import records, service, view
from tangramctl.errors import Broken
from tangramctl.machine import StateRoot, prepared, try_lock
from tests.unit.tangramctl.reported import MIB, UUID, reported
from vgpu.api.grant import AssignedGpu
from vgpu.protocol.status import (
    GpuTimeStatus,
    StatusDocument,
    UngrantedStatus,
    UnlistedStatus,
    encode_status,
)

PIECE = AssignedGpu(UUID, 3, 1024, 30)
TERMS = records.RunTerms("best-effort", 4, clear=False, model="T4")


@contextlib.contextmanager
def arbiter(path: Path, answer: bytes) -> Iterator[None]:
    """Answers each connection with the bytes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    reader, _ = listener.accept()
                    with reader, contextlib.suppress(OSError):
                        reader.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def machine() -> Iterator[StateRoot]:
    """Its keeper's lock is held: `arbiter` stands for a keeper's, so that none is started."""
    folder = Path(tempfile.mkdtemp(prefix="tv-"))  # a socket's path has at most 107 characters
    made = prepared(folder / "s")
    lock = try_lock(made.keeper_lock)
    assert lock is not None
    yield made
    os.close(lock)
    shutil.rmtree(folder)


def test_memory_that_belongs_to_no_grant_is_a_line_below_the_table(machine: StateRoot) -> None:
    records.write(machine, ("python", "x"), PIECE, TERMS)
    of_run, of_pod = UngrantedStatus(UUID, 8, "miner", 700 * MIB), UngrantedStatus(UUID, 9, "", None, "a-uid")
    cluster = machine.root / "cluster.sock"
    with (
        arbiter(machine.status_socket, encode_status(StatusDocument((), ungranted=(of_run,)))),
        arbiter(cluster, encode_status(StatusDocument((reported("k"),), ungranted=(of_pod,)))),
    ):
        notes = view.read_view(machine, cluster).notes
    assert f"! process 8 (miner) uses 700 MiB of {UUID} and belongs to no grant there" in notes
    assert f"! process 9 (of unknown name) of pod a-uid uses memory of {UUID} and belongs to no grant there" in notes


def test_memory_that_is_listed_for_no_process_is_a_line_below_the_table(machine: StateRoot) -> None:
    records.write(machine, ("python", "x"), PIECE, TERMS)
    of_run, of_pod = (
        UnlistedStatus(UUID, 2560 * MIB, 3000 * MIB),
        UnlistedStatus(UUID, 700 * MIB, 700 * MIB, "u", "default/a", "main", (7, 8)),
    )
    cluster = machine.root / "cluster.sock"
    with (
        arbiter(machine.status_socket, encode_status(StatusDocument((), unlisted=(of_run,)))),
        arbiter(cluster, encode_status(StatusDocument((reported("k"),), unlisted=(of_pod,)))),
    ):
        notes = view.read_view(machine, cluster).notes
    text = f"MiB of {UUID} are in use and NVML lists them for no process: no limit counts them"
    assert f"! 2560 {text}" in notes
    assert f"! 700 {text}; default/a/main may use them (processes 7, 8)" in notes


def test_a_run_is_shown_with_its_arbiters_status(machine: StateRoot) -> None:
    run = records.write(machine, ("python", "x"), PIECE, TERMS)
    with arbiter(machine.status_socket, encode_status(StatusDocument((reported(run.key), reported("other"))))):
        (entry,) = view.read_view(machine, machine.root / "none").entries
    (gpu,) = entry.gpus
    assert (gpu.limit_bytes, gpu.leased_bytes, gpu.used_bytes, gpu.context_bytes) == (
        1024 * MIB,
        600 * MIB,
        500 * MIB,
        80 * MIB,
    )
    assert gpu.shared_bytes == 16 * MIB
    assert (entry.kind, entry.pid, entry.over, gpu.index) == ("run", run.pid, True, 3)
    assert entry.processes == (view.ProcessView(7, "python x", 500 * MIB, 80 * MIB),)


@pytest.mark.parametrize("answer", [b"", b'{"version": 9}', b'{"version": 1, "containers": [', b"\xff"])
def test_an_arbiter_that_cannot_be_understood_costs_its_numbers_and_a_note(machine: StateRoot, answer: bytes) -> None:
    records.write(machine, ("python", "x"), PIECE, TERMS)
    with arbiter(machine.status_socket, answer):
        seen = view.read_view(machine, machine.root / "none")
    assert [entry.gpus[0].used_bytes for entry in seen.entries] == [None]
    assert "does not report what is used: status document" in seen.notes[0]


def test_an_arbiter_that_cannot_be_started_costs_its_numbers_and_a_note(
    machine: StateRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise Broken("no arbiter answers")

    monkeypatch.setattr(service, "await_socket", broken)
    records.write(machine, ("python", "x"), PIECE, TERMS)
    seen = view.read_view(machine, machine.root / "none")
    assert (len(seen.entries), seen.entries[0].processes) == (1, None)
    assert "no arbiter answers" in seen.notes[0]


def test_a_run_that_cannot_be_read_stands_among_the_others_with_a_note(machine: StateRoot) -> None:
    run = records.write(machine, ("python", "x"), PIECE, TERMS)
    (machine.grants / run.key / "run.json").write_text("{")
    with arbiter(machine.status_socket, encode_status(StatusDocument((reported(run.key),)))):
        seen = view.read_view(machine, Path("/nonexistent"))
    (entry,) = seen.entries
    assert (entry.key, entry.command, entry.gpus[0].limit_bytes) == (run.key, "?", 1024 * MIB)
    assert (entry.gpus[0].index, entry.gpus[0].used_bytes) == (None, 500 * MIB)
    assert "run.json cannot be read" in seen.notes[0]


def test_on_a_node_of_a_cluster_the_pods_containers_stand_beside_the_runs(machine: StateRoot) -> None:
    node = machine.root / "node.sock"
    with arbiter(node, encode_status(StatusDocument((reported("k", "team/pod"),)))):
        (entry,) = view.read_view(machine, node).entries
    assert (entry.kind, entry.name, entry.pid, entry.command) == ("container", "team/pod/main", None, "python x")
    assert (entry.gpus[0].limit_bytes, entry.gpus[0].shared_bytes) == (1024 * MIB, 16 * MIB)


GPU_TIME = GpuTimeStatus(
    on=True, working=False, processes=1, requested_percent=30, on_s=0.0, off_s=0.0, capped_s=0.0, suspends=0, trouble=""
)


@pytest.mark.parametrize(
    ("percent", "context", "gpu_time", "noted"),
    [(30, 80, None, True), (30, 80, GPU_TIME, False), (0, 80, None, False), (30, 0, None, False)],
    ids=["requested, has a context, reported nothing", "reported channels", "requested no part", "has no context"],
)
def test_a_run_whose_share_of_time_is_not_enforced_is_noted(
    machine: StateRoot, percent: int, context: int, gpu_time: GpuTimeStatus | None, noted: bool
) -> None:
    node = machine.root / "node.sock"
    status = reported("k", "team/pod")
    gpu = structs.replace(status.gpus[0], core_percent=percent, context_bytes=context * MIB)
    with arbiter(node, encode_status(StatusDocument((structs.replace(status, gpus=(gpu,), gpu_time=gpu_time),)))):
        notes = view.read_view(machine, node).notes
    assert [note.startswith("team/pod/main requested 30 %") for note in notes] == [True] * noted


def test_as_a_kubectl_plugin_it_notes_how_pods_are_seen(machine: StateRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "CLUSTER_SOCKET", Path("/nonexistent"))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tangramctl"])
    assert view.seen_at(machine.root) == view.StateRootView(())
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-tangram"])
    (note,) = view.seen_at(machine.root).notes
    assert note.endswith("kubectl -n tangram-system exec ds/tangram-node -c arbiter -- tangramctl ps")


def test_a_named_state_folder_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "default_root", lambda: Path("/nonexistent/default"))
    assert view.seen_at(None).notes == ()
    assert view.seen_at(Path("/nonexistent/s")).notes == (
        "there is no state folder /nonexistent/s: nothing has run with it",
    )


def test_a_nodes_arbiter_that_does_not_answer_is_a_note(machine: StateRoot) -> None:
    node = machine.root / "node.sock"
    node.touch()
    seen = view.read_view(machine, node)
    assert seen.entries == ()
    assert "does not list pods" in seen.notes[0]


def test_the_document_for_programs_carries_a_version_and_every_field(machine: StateRoot) -> None:
    node = machine.root / "node.sock"
    with arbiter(node, encode_status(StatusDocument((reported("k"),)))):
        document = msgspec.json.decode(view.encode(view.read_view(machine, node)))
    assert document["version"] == 1
    assert document["entries"][0]["class"] == "best-effort"
    assert set(document["entries"][0]) == {field.encode_name for field in msgspec.structs.fields(view.RunView)}


@pytest.mark.parametrize(
    ("guarantee", "charged", "excess"),
    [(None, (5, 1, 1), None), (8, (5, 1, 1), 0), (8, (8, 0, 0), 0), (8, (10, 2, 1), 5), (8, (0, 0, 9), 1)],
)
def test_what_is_above_the_guarantee_is_all_that_is_charged_without_it(
    guarantee: int | None, charged: tuple[int, int, int], excess: int | None
) -> None:
    leased, context, shared = charged
    gpu = structs.replace(
        reported("k").gpus[0],
        guarantee_bytes=guarantee,
        leased_bytes=leased,
        context_bytes=context,
        shared_bytes=shared,
    )
    (seen,) = view._container(structs.replace(reported("k"), gpus=(gpu,))).gpus
    assert seen.excess_bytes == excess
