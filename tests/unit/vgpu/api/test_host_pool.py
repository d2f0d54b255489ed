"""What a reader of the host pool's files concludes."""

from __future__ import annotations

import msgspec
import pytest

from vgpu.api.errors import BadDocument
from vgpu.api.host_pool import (
    NO_STATUS,
    SILENT,
    STALE_S,
    PoolGpu,
    PoolStatus,
    SharedGpus,
    from_text,
    missing_on_gpu,
    missing_on_node,
    to_text,
)

WELL = PoolStatus(boot_id="b", written_s=100.0, gpus=(PoolGpu("GPU-a", ready=True), PoolGpu("GPU-b", ready=True)))


def on_node(status: PoolStatus | None, now_s: float = 100.0) -> str:
    return missing_on_node(status, boot_id="b", now_s=now_s)


def on_gpu(status: PoolStatus | None, uuid: str, now_s: float = 100.0) -> str:
    return missing_on_gpu(status, uuid, boot_id="b", now_s=now_s)


def test_documents_are_read_as_they_were_written() -> None:
    shared = SharedGpus(boot_id="b", gpus=("GPU-a", "GPU-b"), whole=("GPU-b",))
    assert from_text(SharedGpus, to_text(shared)) == shared
    assert from_text(PoolStatus, to_text(WELL)) == WELL


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"v":2}', b'{"boot_id":1}', b"\xff"])
def test_what_is_no_document_is_refused(text: bytes) -> None:
    for kind in (SharedGpus, PoolStatus):
        with pytest.raises(BadDocument):
            from_text(kind, text)


def test_a_gpu_that_is_given_whole_or_released_has_no_copier() -> None:
    shared = SharedGpus(gpus=("GPU-a", "GPU-b"), whole=("GPU-b",))
    assert shared.served == ("GPU-a",)
    assert msgspec.structs.replace(shared, released=True).served == ()


def test_a_node_whose_gpus_are_all_ready_misses_nothing() -> None:
    assert on_node(WELL) == ""
    assert on_gpu(WELL, "GPU-a") == ""


@pytest.mark.parametrize("status", [None, PoolStatus(boot_id="earlier", written_s=100.0)])
def test_no_status_of_this_boot_is_a_reason(status: PoolStatus | None) -> None:
    assert on_node(status) == on_gpu(status, "GPU-a") == NO_STATUS


def test_a_status_that_is_no_longer_renewed_is_of_a_program_that_is_gone() -> None:
    assert on_node(WELL, 100.0 + STALE_S) == ""
    assert on_node(WELL, 101.0 + STALE_S) == on_gpu(WELL, "GPU-a", 101.0 + STALE_S) == SILENT


def test_the_reason_of_a_gpu_is_its_own_and_that_of_the_node_names_it() -> None:
    gpus = (PoolGpu("GPU-a", ready=True), PoolGpu("GPU-b", reason="no memory"))
    status = msgspec.structs.replace(WELL, gpus=gpus)
    assert on_gpu(status, "GPU-a") == ""
    assert on_gpu(status, "GPU-b") == "no memory"
    assert on_node(status) == "GPU-b: no memory"
    assert on_gpu(status, "GPU-c").startswith("no copier serves this GPU")
    refused = msgspec.structs.replace(status, reason="too large")
    assert on_node(refused) == on_gpu(refused, "GPU-a") == "too large"
