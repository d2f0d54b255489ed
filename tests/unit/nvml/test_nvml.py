"""NVML as the fake driver answers it, and what follows from its answers."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvml import child, usage
from nvml.binding import nv
from nvml.errors import NvmlError
from nvml.gpu_facts import profile_gb
from nvml.inventory import probe
from nvml.library import LIBRARY_FOLDERS, library_folder, load
from nvml.messages import (
    Busy,
    CountReply,
    GpuAtRequest,
    GpuReply,
    MemoryUse,
    ProcessesReply,
    ProcessesRequest,
    ProcessUsage,
    RequestPacket,
    Xid,
    XidsReply,
    decode_replies,
)
from nvml.side_by_side import SideBySide
from nvml.supervisor import NvmlSupervisor
from nvml.usage import busy
from tests.fake import FakeDriver, fake_driver
from tests.older import without
from vgpu.api.inventory import Gpu, Inventory

__all__ = ["fake_driver"]

GPU = "GPU-00000000-0000-0000-0000-000000000001"


def root_of(driver: FakeDriver, folder: Path) -> Path:
    (folder / "lib").symlink_to(driver.libraries)
    return folder


@pytest.fixture
def supervisor_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[FakeDriver], NvmlSupervisor]]:
    """Factory: a supervisor of NVML on a fake driver. All are closed after the test."""
    made: list[NvmlSupervisor] = []

    def of(driver: FakeDriver) -> NvmlSupervisor:
        monkeypatch.setenv("LD_LIBRARY_PATH", "")
        monkeypatch.setenv("TANGRAM_FAKE_DRIVER", str(driver.socket))
        made.append(NvmlSupervisor(root_of(driver, tmp_path)))
        made[-1].start()
        assert made[-1].await_open(60).found == "driver root"
        return made[-1]

    yield of
    for supervisor in made:
        supervisor.close()


def probed(supervisor: NvmlSupervisor, last: Inventory | None = None) -> Inventory:
    return probe(supervisor.nvml, unit_mib=1024, access="cdi", last=last)


Drivers = Callable[[str], FakeDriver]
Supervisors = Callable[[FakeDriver], NvmlSupervisor]


def test_gpus_are_probed_through_a_driver_root(fake_driver: Drivers, supervisor_of: Supervisors) -> None:
    driver = fake_driver("gpu h200\ngpu h200\ngpu t4 memory_mib=16384\nlink 0 1 18\n")
    inventory = probed(supervisor_of(driver))
    first, second, third = inventory.gpus
    assert (first.nvlinks, second.nvlinks, third.nvlinks) == ({second.uuid: 18}, {first.uuid: 18}, {})
    assert [(c.index, c.minor) for c in inventory.gpus] == [(0, 0), (1, 1), (2, 2)]
    assert [c.uuid for c in inventory.gpus] == [s.uuid for s in driver.status()]
    assert inventory.gpus[0].model == "NVIDIA H200"
    assert inventory.gpus[0].mib // 1024 in (140, 141)
    assert inventory.gpus[0].pci != inventory.gpus[1].pci
    assert inventory.driver
    assert all(gpu.healthy and not gpu.mig for gpu in inventory.gpus)


def test_eight_gpus_are_described_side_by_side_and_each_as_by_itself(
    fake_driver: Drivers, supervisor_of: Supervisors
) -> None:
    supervisor = supervisor_of(fake_driver("gpu h200 count=8\nlinks all 18\n"))
    together = supervisor.nvml.gpus_at(dict.fromkeys(range(9), ""))
    assert [together[index] for index in range(8)] == [supervisor.nvml.gpu_at(index) for index in range(8)]
    assert isinstance(together[8], NvmlError), "there is none with that index"


def test_one_gpu_that_hangs_is_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The child counts its answers in the order of the requests, though others were done before."""
    over, counted = threading.Event(), threading.Semaphore(0)

    described_once: list[int] = []

    def described(index: int) -> GpuReply:
        described_once.append(index)
        if index == 1:
            over.wait(60)
        return GpuReply(Gpu(f"GPU-{index}", index, "h200", 1))

    class Session:
        def answer(self, request: GpuAtRequest) -> GpuReply:
            return described(request.index)

    monkeypatch.setattr(os, "eventfd_write", lambda *_: counted.release())
    packet = [RequestPacket(7 + index, GpuAtRequest(index)) for index in range(4)]
    answered: list[bytes] = []
    thread = threading.Thread(target=lambda: answered.append(child.answers(Session(), packet, -1)))  # type: ignore[arg-type]
    thread.start()
    assert counted.acquire(timeout=60)
    assert not counted.acquire(timeout=0.05), "those behind the one that hangs do not count"
    over.set()
    thread.join(60)
    assert sorted(described_once) == [0, 1, 2, 3]
    assert [(one.number, one.reply.gpu.index) for one in decode_replies(answered[0])] == [
        (7 + at, at) for at in range(4)
    ]  # type: ignore[union-attr]


def test_without_threads_gpus_are_described_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuses)
    packet = [RequestPacket(at, GpuAtRequest(at)) for at in range(2)]
    begun = SideBySide(packet, lambda request: CountReply(request.index, ""))
    assert not begun.left
    assert [begun.reply(at) for at in range(2)] == [None, None]


def test_mig_instances_have_nvidias_profile_names(fake_driver: Drivers, supervisor_of: Supervisors) -> None:
    driver = fake_driver("gpu a100-40\nmig 0 3g.20gb 1g.5gb.me 1g.5gb\n")
    (gpu,) = probed(supervisor_of(driver)).gpus
    assert gpu.mig
    assert not gpu.shareable
    assert sorted(i.profile for i in gpu.instances) == ["1g.5gb", "1g.5gb.me", "3g.20gb"]
    assert len({i.uuid for i in gpu.instances}) == 3
    assert all(i.uuid.startswith("MIG-") and i.mib > 0 for i in gpu.instances)


def test_what_is_read_of_mig_in_brief_differs_after_each_change(
    fake_driver: Drivers, supervisor_of: Supervisors
) -> None:
    driver = fake_driver("gpu t4 memory_mib=16384\ngpu h100\n")
    nvml, (t4, h100) = supervisor_of(driver).nvml, (one.uuid for one in driver.status())
    assert not nvml.mig(t4, brief=True).capable
    seen = [nvml.mig(h100, brief=True)]
    for words in (("on",), ("create", "1g.10gb"), ("create", "1g.10gb"), ("destroy",), ("off",)):
        numbers = [str(one.gi) for one in driver.status() if one.gi is not None]
        driver.ctl("mig", 1, *words, *(numbers[:1] if words == ("destroy",) else ()))
        seen.append(nvml.mig(h100, brief=True))
        whole = nvml.mig(h100)
        assert (seen[-1].mig, [one.uuids for one in seen[-1].instances]) == (
            whole.mig,
            [one.uuids for one in whole.instances],
        )
    assert all(one != other for one, other in itertools.pairwise(seen))


def test_a_gpu_that_was_lost_stands_unhealthy_in_the_next_probe(
    fake_driver: Drivers, supervisor_of: Supervisors
) -> None:
    driver = fake_driver("gpu t4\ngpu t4\n")
    supervisor = supervisor_of(driver)
    first = probed(supervisor)
    driver.xid(1, 79)
    second = probed(supervisor, first)
    assert [c.uuid for c in first.gpus] == [c.uuid for c in second.gpus]
    assert [c.healthy for c in second.gpus] == [True, False]
    assert supervisor.nvml.answers(first.gpus[0].uuid) is None
    trouble = supervisor.nvml.answers(first.gpus[1].uuid)
    assert trouble is not None
    assert trouble.startswith("GPU GPU-")
    assert "NVML reports" in trouble


def test_xid_events_are_reported_once_and_name_the_gpu(fake_driver: Drivers, supervisor_of: Supervisors) -> None:
    driver = fake_driver("gpu t4\ngpu t4\n")
    nvml = supervisor_of(driver).nvml
    uuids = tuple(status.uuid for status in driver.status())
    assert nvml.xids(uuids) == XidsReply((), {})
    driver.xid(1, 48)
    driver.xid(0, 31)
    assert nvml.xids(uuids).xids == (Xid(uuids[1], 48), Xid(uuids[0], 31))
    assert nvml.xids(uuids).xids == ()


def test_processes_are_listed_with_their_memory(fake_driver: Drivers, supervisor_of: Supervisors) -> None:
    driver = fake_driver("gpu t4 memory_mib=16384 context_mib=0\n")
    driver.ctl("process", 0, 4242, 512, "other")
    uuid = driver.status()[0].uuid
    assert supervisor_of(driver).nvml.processes(uuid) == (ProcessUsage(4242, uuid, 512 * 2**20),)


def held(supervisor: NvmlSupervisor, uuid: str) -> ProcessesReply:
    found = supervisor.nvml.held_of([uuid])[uuid]
    assert isinstance(found, ProcessesReply)
    return found


def test_the_memory_in_use_is_without_what_the_driver_reserves(
    fake_driver: Drivers, supervisor_of: Supervisors
) -> None:
    driver = fake_driver("gpu h200\n")
    uuid = driver.status()[0].uuid
    supervisor = supervisor_of(driver)
    empty = held(supervisor, uuid)
    assert empty.memory is not None
    usable_bytes = empty.memory.usable_bytes
    assert 140_000 < usable_bytes / 2**20 < 143_771, "an H200 has 143,771 MiB, some of which the driver reserves"
    assert empty == ProcessesReply((), MemoryUse(0, usable_bytes))
    driver.ctl("process", 0, 4242, 512, "other")
    expected = MemoryUse(512 * 2**20, usable_bytes)
    assert held(supervisor, uuid) == ProcessesReply((ProcessUsage(4242, uuid, 512 * 2**20),), expected)


def test_a_mig_instance_has_its_own_memory_in_use(fake_driver: Drivers, supervisor_of: Supervisors) -> None:
    driver = fake_driver("gpu a100-40\nmig 0 3g.20gb 1g.5gb\n")
    supervisor = supervisor_of(driver)
    first, second = (one.uuid for one in probed(supervisor).gpus[0].instances)
    instance = next(status for status in driver.status() if status.uuid == first).gi
    driver.ctl("process", f"0:{instance}", 4242, 512, "other")
    used = [memory.used_bytes for uuid in (first, second) if (memory := held(supervisor, uuid).memory) is not None]
    assert used == [512 * 2**20, 0]


def test_a_driver_without_version_2_of_the_call_does_not_report(
    fake_driver: Drivers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = fake_driver("gpu t4\n")
    driver.ctl("process", 0, 4242, 512, "other")
    uuid = driver.status()[0].uuid
    (tmp_path / "lib").mkdir()
    without(driver.libnvml, ["nvmlDeviceGetMemoryInfo_v2"], tmp_path / "lib" / "libnvidia-ml.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("TANGRAM_FAKE_DRIVER", str(driver.socket))
    supervisor = NvmlSupervisor(tmp_path)
    supervisor.start()
    try:
        supervisor.await_open(60)
        assert held(supervisor, uuid) == ProcessesReply((ProcessUsage(4242, uuid, 512 * 2**20),), None)
    finally:
        supervisor.close()


@pytest.mark.parametrize(("numa", "memory"), [(True, None), (False, MemoryUse(7, 90))])
def test_memory_that_is_a_numa_node_of_the_machine_reports_nothing(
    monkeypatch: pytest.MonkeyPatch, *, numa: bool, memory: MemoryUse | None
) -> None:
    """The kernel's own use of it is in the number."""

    def node(_: object) -> int:
        if not numa:
            raise nv.NVMLError(nv.NVML_ERROR_NOT_SUPPORTED)
        return 1

    monkeypatch.setattr(nv, "nvmlDeviceGetHandleByUUID", lambda _: None)
    monkeypatch.setattr(nv, "nvmlDeviceGetNumaNodeId", node)
    info = SimpleNamespace(used=7, total=100, reserved=10)
    monkeypatch.setattr(nv, "nvmlDeviceGetMemoryInfo", lambda *_, **__: info)
    assert usage.memory(GPU) == memory


@pytest.mark.parametrize(
    ("before", "after", "processes", "used"),
    [(5, 7, 2, 5), (7, 5, 2, 5), (None, 5, 2, None), (5, None, 2, None), (5, 5, 4, None)],
)
def test_the_smaller_of_two_numbers_around_the_list_counts_and_none_beside_a_list_that_is_cut(
    monkeypatch: pytest.MonkeyPatch, before: int | None, after: int | None, processes: int, used: int | None
) -> None:
    numbers = iter([None if number is None else MemoryUse(number, 90) for number in (before, after)])
    listed = tuple(ProcessUsage(pid, GPU, 1) for pid in range(processes))
    monkeypatch.setattr(usage, "memory", lambda _: next(numbers))
    monkeypatch.setattr(usage, "processes", lambda _: listed)
    monkeypatch.setattr(child, "MOST_PROCESSES", 3)
    assert child.Session().answer(ProcessesRequest(GPU)) == ProcessesReply(
        listed[:3], None if used is None else MemoryUse(used, 90)
    )


@pytest.mark.parametrize("folder", LIBRARY_FOLDERS)
def test_the_library_is_found_where_installers_put_it(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "libnvidia-ml.so.1").touch()
    assert library_folder(tmp_path) == tmp_path / folder


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvidia-ml.so.1").write_text("no library")
    with pytest.raises(NvmlError, match=r"lib/libnvidia-ml.so.1 cannot be loaded"):
        load(tmp_path)


def test_the_error_on_a_machine_without_a_driver_names_the_places_searched(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"no libnvidia-ml.so.1 in .*/lib64.* is the NVIDIA driver installed"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("instance_mib", "total_mib", "gb"),
    [
        (4864, 40_536, 5),
        (9984, 40_536, 10),
        (19_968, 40_536, 20),
        (40_192, 40_536, 40),
        (9728, 81_920, 10),
        (40_448, 81_920, 40),
        (16_384, 143_771, 18),
    ],
)
def test_profile_sizes_are_as_nvidia_documents_them(instance_mib: int, total_mib: int, gb: int) -> None:
    assert profile_gb(instance_mib * 2**20, total_mib * 2**20) == gb


class Samples:
    """The binding's module, as far as utilisation uses it: one answer a call, an error where it is one."""

    NVMLError_NotFound, NVMLError_NotSupported = nv.NVMLError_NotFound, nv.NVMLError_NotSupported
    NVMLError_InsufficientSize = nv.NVMLError_InsufficientSize

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def nvmlDeviceGetProcessUtilization(self, _handle: str, _since_us: int) -> object:  # noqa: N802 - its name
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calls of the binding about utilisation get these answers, one each."""

    def answer(*answers: object) -> None:
        monkeypatch.setattr(usage, "nv", Samples(*answers))
        monkeypatch.setattr(usage.handles, "of_uuid", str)

    return answer


def sample(pid: int, percent: int, at_us: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=percent, timeStamp=at_us)


def test_samples_count_that_are_new_and_not_of_a_clock_that_was_set_back(answering: Callable[..., None]) -> None:
    reported = [sample(1, 10, 99), sample(2, 20, 100), sample(3, 30, 101), sample(4, 0, 150), sample(5, 50, 201)]
    reported += [sample(6, 4_000_000, 120)]  # one that the driver has lost sight of
    answering(reported)
    assert busy(GPU, 100, 200) == Busy({3: 30}, 150)


def test_a_process_more_than_were_counted_is_called_again(answering: Callable[..., None]) -> None:
    late = nv.NVMLError_InsufficientSize()
    answering(late, late, [sample(3, 30, 101)])
    assert busy(GPU, 100, 200) == Busy({3: 30}, 101)
    answering(late, late, late)
    with pytest.raises(NvmlError, match=f"utilisation of GPU {GPU}"):
        busy(GPU, 100, 200)


def test_a_gpu_without_samples_has_no_process_and_one_that_does_not_count_by_process_reports_that(
    answering: Callable[..., None],
) -> None:
    for error, by_process in ((nv.NVMLError_NotFound(), True), (nv.NVMLError_NotSupported(), False)):
        answering(error)
        assert busy(GPU, 100, 200) == Busy({}, 100, by_process=by_process)
