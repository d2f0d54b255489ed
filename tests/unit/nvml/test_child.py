"""A real child: it ends with its program, and meets the driver that is there now."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvml import child, supervisor
from nvml import messages as m
from nvml.child import Session
from nvml.driver import DriverIdentity, identity
from nvml.errors import NvmlAway
from nvml.replacing import EndReason
from nvml.supervisor import NvmlSupervisor, TimeLimits
from tests.built import REPOSITORY
from tests.fake import FakeDriver, fake_driver
from tests.older import without
from tests.unit.nvml.stand import wait_for

__all__ = ["fake_driver"]

PROGRAM = """
import sys, threading
from pathlib import Path
from nvml.supervisor import NvmlSupervisor
one = NvmlSupervisor(Path(sys.argv[1]))
one.start()
while one.pid is None:
    threading.Event().wait(0.01)
print(one.pid, flush=True)
threading.Event().wait()
"""
HANGS = "#include <unistd.h>\nint nvmlInitWithFlags(unsigned flags) { (void)flags; for (;;) pause(); }\n"


def test_a_child_ends_with_its_program_also_in_the_middle_of_a_call(tmp_path: Path) -> None:
    library = tmp_path / "lib/libnvidia-ml.so.1"
    library.parent.mkdir()
    compiler = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=HANGS, text=True, check=True)
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    wait_for(lambda: library.name.encode() in Path(f"/proc/{pid}/maps").read_bytes())
    started.kill()
    started.communicate()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


@pytest.fixture
def opened(
    fake_driver: Callable[[str], FakeDriver], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[FakeDriver, NvmlSupervisor, Path]]:
    """A driver with two GPUs whose library is a file of its own, and a supervisor that has it open."""
    driver = fake_driver("gpu t4 count=2\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("TANGRAM_FAKE_DRIVER", str(driver.socket))
    monkeypatch.setattr(supervisor, "TICK_S", 0.05)
    library = tmp_path / "lib/libnvidia-ml.so.1"
    library.parent.mkdir()
    shutil.copyfile(driver.libnvml, library)
    started = NvmlSupervisor(tmp_path)
    started.start()
    started.await_open(60)
    yield driver, started, library
    driver.process.send_signal(signal.SIGCONT)
    started.close()


class Slow(Session):
    """NVML that is slow, and records that it was called."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.requested = seconds, list[str]()

    def answer(self, request: m.AnyRequest) -> m.AnyReply:
        self.requested.append(request.key)
        time.sleep(self.seconds)
        return m.HealthReply(None)


@pytest.mark.parametrize(("seconds", "answered"), [(0.0, 4), (2 * child.SLOW_S, 1)])
def test_a_caller_behind_a_slow_packet_is_served_before_the_rest_of_it(seconds: float, answered: int) -> None:
    counting, session = os.eventfd(0), Slow(seconds)
    packet = child.answers(session, [m.RequestPacket(at, m.HealthRequest(f"GPU-{at}")) for at in range(4)], counting)
    assert m.decode_replies(packet) == [m.ReplyPacket(at, m.HealthReply(None)) for at in range(answered)]
    assert len(session.requested) == answered, "what is not answered was not done: an XID event is reported once"
    assert os.eventfd_read(counting) == answered
    os.close(counting)


def test_a_new_library_under_the_same_path_is_met_by_a_new_child(
    opened: tuple[FakeDriver, NvmlSupervisor, Path],
) -> None:
    driver, started, library = opened
    uuid = driver.status()[0].uuid
    assert started.nvml.processes(uuid) == ()
    before = started.pid
    fresh = library.with_suffix(".new")
    without(driver.libnvml, ["nvmlDeviceGetComputeRunningProcesses_v3"], fresh)
    fresh.rename(library)
    wait_for(lambda: started.ends[EndReason.DRIVER] == 1)
    wait_for(lambda: not started.failing)
    assert started.pid != before
    with pytest.raises(Exception, match="the oldest supported driver is"):
        started.nvml.processes(uuid)


def test_a_driver_that_hangs_at_the_start_is_survived(
    opened: tuple[FakeDriver, NvmlSupervisor, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, started, _ = opened
    driver.process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patch:  # a start of a driver that does not hang takes as long as the machine needs
        patch.setattr(started, "_limits", TimeLimits(start_s=1.5))
        started.reopen("a test wants it")
        wait_for(lambda: "the start of NVML did not return within 1.5 s" in started.failing)
        with pytest.raises(NvmlAway):
            started.nvml.count()
    driver.process.send_signal(signal.SIGCONT)
    wait_for(lambda: not started.failing)
    assert started.nvml.count().count == 2


def test_a_driver_is_reported_from_another_by_its_file_its_version_and_its_module(tmp_path: Path) -> None:
    library, version, module = tmp_path / "lib64/libnvidia-ml.so.1", tmp_path / "version", tmp_path / "nvidia"

    def there() -> DriverIdentity:
        return identity(tmp_path, "", version, module)

    seen = [there()]
    library.parent.mkdir()
    library.write_bytes(b"one")
    seen.append(there())
    version.write_text("NVRM version: 580.65.06")
    seen.append(there())
    module.mkdir()
    seen.append(there())
    assert there() == seen[-1]
    version.write_text("NVRM version: 595.10.01")
    seen.append(there())
    module.rename(tmp_path / "unloaded")
    module.mkdir()
    seen.append(there())
    (tmp_path / "new").write_bytes(b"two")
    (tmp_path / "new").rename(library)
    seen.append(there())
    assert len(set(seen)) == len(seen) == 7


def test_a_library_that_the_loader_found_is_reported_by_the_file_that_is_mapped(tmp_path: Path) -> None:
    mapped = tmp_path / "libnvidia-ml.so.580"
    mapped.write_bytes(b"one")
    before = identity(tmp_path, str(mapped))
    assert before.library
    mapped.unlink()
    assert identity(tmp_path, str(mapped)).library == ()
