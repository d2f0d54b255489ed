"""The kernel driver's double: channels that can be suspended, by the process itself and by one that was sent its descriptor."""

from __future__ import annotations

import array
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.built import fake_build
from tests.fake import FakeDriver
from tests.line_process import LineProcess
from tests.signals import send_signal

PROCESS = """
import array, ctypes, fcntl, json, os, socket, sys, time
from vgpu.gputime import resource_manager as rm
cuda = ctypes.CDLL("libcuda.so.1")
socket_path = sys.argv[1]
assert cuda.cuInit(0) == 0
context = ctypes.c_void_p()
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
fd = next(int(n) for n in os.listdir("/proc/self/fd") if "nvidia-fake-driver" in os.readlink(f"/proc/self/fd/{n}"))
module, function = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuModuleLoadData(ctypes.byref(module), b"//fake spin us=param0\\n.entry spin() {}\\n"
    b"//fake beat us=param1 counter=param0\\n.entry beat() {}\\0") == 0
assert cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin") == 0
beat, pinned = ctypes.c_void_p(), ctypes.c_void_p()
assert cuda.cuModuleGetFunction(ctypes.byref(beat), module, b"beat") == 0
assert cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(4), 0) == 0
counter = ctypes.c_uint32.from_address(pinned.value)
def count(us, at=pinned.value):
    values = (ctypes.c_uint64(at), ctypes.c_uint32(us))
    parameters = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values))
    assert cuda.cuLaunchKernel(beat, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) == 0
def past(number):
    while counter.value <= number:
        time.sleep(0.001)
    return counter.value
def still(seconds):
    before = counter.value
    time.sleep(seconds)
    return counter.value == before
def launch(us):
    value = ctypes.c_uint32(us)
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(value), ctypes.c_void_p))
    assert cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, parameters, None) == 0
def query(): return cuda.cuStreamQuery(None)
def wait():
    began = time.monotonic()
    assert cuda.cuCtxSynchronize() == 0
    return time.monotonic() - began
def send():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(socket_path)
        s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
def switch(client, subdevice, channels, disable):
    p = ctypes.create_string_buffer(rm.disable_parameters(client, channels, disable=disable), rm.PARAMETERS_BYTES)
    argument = rm.control(client, subdevice, ctypes.addressof(p))
    fcntl.ioctl(fd, rm.CONTROL_REQUEST, argument)
    return rm.status(argument)
def bad(parameters, offset, value, client, subdevice):
    p = ctypes.create_string_buffer(parameters, rm.PARAMETERS_BYTES)
    p[offset] = bytes([value])
    argument = rm.control(client, subdevice, ctypes.addressof(p))
    fcntl.ioctl(fd, rm.CONTROL_REQUEST, argument)
    return rm.status(argument)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


class Process(LineProcess):
    def __init__(self, driver: FakeDriver, socket_path: str = "") -> None:
        preload = str(fake_build() / "libfake-kernel.so")
        super().__init__(["-c", PROCESS, socket_path], driver.env(LD_PRELOAD=preload))
        assert self.answer() == "ready"

    def do(self, code: str) -> Any:
        self.send(code)
        return self.answer(f"in {code}")


BAD_ARGUMENT, BAD_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 0x1F, 0x21, 600, 700


def kernel(driver: FakeDriver) -> tuple[int, str, list[dict[str, int]]]:
    """Misuses, the last one in words, and a dict for each process."""
    first, *lines = driver.ctl("kernel").splitlines()
    count, _, words = first.removeprefix("misuses=").partition(" ")
    return int(count), words, [{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)} for line in lines]


class Handles:
    """What the fake libcuda names its objects; the real one's differ from process to process."""

    def __init__(self, of: Process, slot: int = 0, group: int = 0) -> None:
        self.client = 0xC1D00000 | of.process.pid << 10 & 0xFFC00 | slot
        self.subdevice = 0x5C000001
        self.compute = [0x5C000000 + 0x1000 + group * 0x10 + 1 + at for at in range(8)]
        self.copy = [0x5C000000 + 0x100 + group * 0x10 + 1 + at for group in range(3) for at in range(4)]

    def switch(self, channels: list[int], disable: bool) -> str:
        return f"switch({self.client}, {self.subdevice}, {channels}, {disable})"


@pytest.fixture
def driver(fake_driver: Callable[[str], FakeDriver]) -> FakeDriver:
    return fake_driver("gpu h200 context_mib=0")


@pytest.fixture
def start(driver: FakeDriver) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def one(socket_path: str = "") -> Process:
        started.append(Process(driver, socket_path))
        return started[-1]

    yield one
    for each in started:
        each.end()


def test_a_context_has_eight_compute_channels_and_twelve_for_copies(driver, start):
    start()
    misuses, words, [process] = kernel(driver)
    assert (misuses, words) == (0, "")
    assert process["channels"] == 20


def test_a_suspended_process_stops_in_mid_kernel_and_goes_on_where_it_was(driver, start):
    one = start()
    names = Handles(one)
    one.do("launch(300_000)")
    assert one.do(names.switch(names.compute, True)) == 0
    ran = kernel(driver)[2][0]["ran_us"]
    assert 0 < ran < 300_000
    other = start()
    assert other.do("launch(50_000) or wait()") < 0.2, "the other one has the GPU alone"
    assert one.do("query()") == NOT_READY
    assert kernel(driver)[2][0]["ran_us"] == ran
    assert one.do(names.switch(names.compute, False)) == 0
    assert one.do("wait()") > (300_000 - ran) / 1e6 * 0.9
    assert kernel(driver)[2][0]["ran_us"] == 300_000
    assert kernel(driver)[0] == 0


def test_disables_are_counted_and_extra_enables_are_harmless(driver, start):
    one = start()
    names = Handles(one)
    for disable in (False, True, True, False):
        assert one.do(names.switch(names.compute, disable)) == 0
    assert kernel(driver)[2][0]["held"] == 1
    one.do(names.switch(names.compute, False))
    assert kernel(driver)[2][0]["held"] == 0
    assert kernel(driver)[2][0]["enables_owed"] == 0


def test_a_process_that_another_one_disabled_is_suspended_until_it_is_enabled(driver, start):
    one, other = start(), start()
    names = Handles(one)
    one.do("launch(100_000)")
    driver.ctl("disable", one.process.pid)
    first, second = kernel(driver)[2]
    assert (first["pid"], first["held"], first["enables_owed"]) == (one.process.pid, 1, 8)
    assert (second["held"], second["enables_owed"]) == (0, 0)
    assert other.do("launch(1000) or wait()") > 0
    assert one.do("query()") == NOT_READY
    assert one.do(names.switch(names.compute, False)) == 0
    assert one.do("wait()") > 0
    assert kernel(driver)[0] == 0


def test_a_process_without_channels_cannot_be_disabled(driver):
    with pytest.raises(AssertionError, match="pid: found 4711, must be a process with compute channels"):
        driver.ctl("disable", 4711)


def test_a_bad_handle_leaves_those_before_it_disabled(driver, start):
    one = start()
    names = Handles(one)
    assert one.do(names.switch([*names.compute, 0x12345], True)) == BAD_HANDLE
    misuses, words, [process] = kernel(driver)
    assert (misuses, process["held"], process["enables_owed"]) == (1, 1, 8)
    assert "0x12345" in words


def test_copy_channels_do_not_suspend_the_compute_channels(driver, start):
    one = start()
    names = Handles(one)
    assert one.do(names.switch(names.copy, True)) == 0
    assert kernel(driver)[2][0]["held"] == 0


def test_one_that_was_sent_the_descriptor_can_suspend_even_a_stopped_process(driver, start, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        one = start(str(path))
        names = Handles(one)
        one.send("send()")
        connection, _ = listener.accept()
        with connection:
            _, [(_, _, data)], _, _ = connection.recvmsg(1, socket.CMSG_SPACE(4))
        one.answer()
    fd = array.array("i", data)[0]
    one.do("launch(200_000)")
    send_signal(one.process.pid, signal.SIGSTOP)
    code = f"""
import ctypes, fcntl
from vgpu.gputime import resource_manager as rm
p = ctypes.create_string_buffer(rm.disable_parameters({names.client}, {names.compute}, disable=True), rm.PARAMETERS_BYTES)
argument = rm.control({names.client}, {names.subdevice}, ctypes.addressof(p))
fcntl.ioctl({fd}, rm.CONTROL_REQUEST, argument)
print(rm.status(argument))
"""
    env = driver.env(LD_PRELOAD=str(fake_build() / "libfake-kernel.so"))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, pass_fds=[fd], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
    assert kernel(driver)[2][0]["held"] == 1
    one.end()
    os.close(fd)
    while kernel(driver)[2]:
        pass
    assert start().do("launch(1000) or wait()") < 0.2, "a process that died suspended delays no other"


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (1, 1, "not 0"),
        (4, 0, "this many"),
        (4, 65, "this many"),
        (8, 1, "must be 0"),
        (9, 1, "must be 0"),
        (16, 1, "must be 0"),
        (24 + 4 * 40, 7, "not 0"),
    ],
)
def test_every_byte_of_a_list_is_checked(driver, start, offset, value, reason):
    one = start()
    names = Handles(one)
    code = f"bad(rm.disable_parameters({names.client}, {names.compute}, disable=True), {offset}, {value}, {names.client}, {names.subdevice})"
    assert one.do(code) == BAD_ARGUMENT
    misuses, words, [process] = kernel(driver)
    assert misuses == 1
    assert reason in words
    assert process["held"] == 0


def test_a_command_to_a_process_that_has_just_ended_is_no_misuse_and_one_to_nobody_is(driver, start):
    gone, one = start(), start()
    names = Handles(gone)
    gone.process.kill()
    while len(kernel(driver)[2]) > 1:
        pass
    assert one.do(names.switch(names.compute, True)) == BAD_HANDLE
    assert one.do(f"switch({Handles(one, 1).client}, {names.subdevice}, {names.compute}, True)") == 0
    assert kernel(driver)[:2] == (0, "")
    names.client ^= 1 << 10
    assert one.do(names.switch(names.compute, True)) == BAD_HANDLE
    assert kernel(driver)[0] == 1


def test_destroying_a_suspended_context_lets_the_process_go(driver, start):
    one = start()
    names = Handles(one)
    one.do(names.switch(names.compute, True))
    assert one.do("cuda.cuCtxDestroy_v2(context)") == 0
    assert one.do("cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)") == 0
    assert one.do("launch(1000) or wait()") < 0.2


def test_a_process_without_the_double_works_as_before(driver, worker):
    one = worker(driver)
    one.must("launch", 10_000)
    one.must("synchronize")
    assert kernel(driver)[2][0]["channels"] == 0


def test_a_scripted_suspend_answers_success_and_changes_nothing(driver, start):
    one = start()
    names = Handles(one)
    driver.ctl("fault", "suspend-without-effect")
    assert one.do(names.switch(names.compute, disable=True)) == 0
    _, _, (process,) = kernel(driver)
    assert (process["enables_owed"], process["held"]) == (0, 0)
    driver.ctl("fault", "none")
    assert one.do(names.switch(names.compute, disable=True)) == 0
    _, _, (process,) = kernel(driver)
    assert (process["enables_owed"], process["held"]) == (8, 1)


def test_a_counting_kernel_counts_until_it_ends(driver, start):
    one = start()
    one.do("count(30_000)")
    assert one.do("past(299)") == 300, "one each 100 us"
    assert one.do("wait() and still(0.02)") is True


def test_the_counter_stands_still_from_the_suspend_to_the_resume(driver, start):
    one = start()
    names = Handles(one)
    one.do("count(10_000_000)")
    one.do("past(10)")
    for _ in range(5):
        assert one.do(f"({names.switch(names.compute, True)}, still(0.02))") == [0, True]
        one.do(names.switch(names.compute, False))
        one.do("past(counter.value)")


def test_the_counter_goes_on_if_the_suspend_has_no_effect(driver, start):
    one = start()
    names = Handles(one)
    driver.ctl("fault", "suspend-without-effect")
    one.do("count(10_000_000)")
    one.do("past(10)")
    assert one.do(names.switch(names.compute, True)) == 0
    one.do("past(counter.value + 100)")


def test_a_counter_that_is_no_pinned_memory_ends_the_kernel_in_an_error(driver, start):
    one = start()
    assert one.do("count(100, at=4096) or cuda.cuCtxSynchronize()") == ILLEGAL_ADDRESS


def test_a_longer_form_of_the_allocation_makes_the_same_objects(driver, start):
    driver.ctl("fault", "alloc-form")
    one = start()
    names = Handles(one)
    misuses, words, [process] = kernel(driver)
    assert (misuses, words, process["channels"]) == (0, "", 20)
    assert one.do(names.switch(names.compute, disable=True)) == 0
