"""The daemon reads a description and control commands, rejects invalid ones with a sentence, and survives any client."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.built import REPOSITORY, fake_build
from tests.examples import examples
from tests.fake import start_fake_driver


def refusal(description: str, tmp_path) -> str:
    config = tmp_path / "fake.conf"
    config.write_text(description)
    command = [fake_build() / "nvidia-fake-driverd", "--config", config, "--socket", tmp_path / "s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(
    ("description", "sentence"),
    [
        ("gpu h300", ':1: GPU: the model is "h300", must be one of t4, a10, a100-40, a100-80, h100, h200, l40s'),
        ("\ngpu h200 memory_mib=0", ':2: memory_mib is "0", must be a number from 1 to 16777216'),
        ("gpu h200 colour=red", 'the option is "colour", must be one of uuid'),
        ("gpu h200 uuid=GPU-1", 'uuid is "GPU-1", must look like GPU-0123'),
        ("gpu h200 bus=17:00.0", 'bus is "17:00.0", must look like 0000:17:00.0'),
        ("gpu h200\nlink 0 1 4", 'GPU is "1", must be a number from 0 to 0'),
        ("gpu h200 count=2\nlink 0 1 19", 'lanes is "19", must be a number from 1 to 18'),
        ("gpu a100-40 count=2\nlink 0 1 12\nlink 0 1 1", "GPU 0 (a100-40) has 12 NVLinks, 1 more are requested"),
        ("gpu t4\nmig 0", "GPU 0: Tesla T4 has no MIG"),
        ("gpu h200\nmig 0 1g.5gb", 'the MIG profile is "1g.5gb", must be one of 1g.18gb'),
        ("gpu h200\nmig 0 7g.141gb 1g.18gb", "a 1g.18gb does not fit beside the instances that exist"),
        ("gpu h200 count=17", 'count is "17", must be a number from 1 to 16'),
        ("gpu h200 memory_mib=10\nprocess 0 1 11 x", "process 1: 11 MiB is more than is free"),
        ("graphics h200", 'the first word is "graphics", must be one of gpu, link'),
        ("# nothing\n", "describes no GPU"),
    ],
)
def test_a_description_with_a_mistake_is_refused_with_a_sentence(description, sentence, tmp_path):
    assert sentence in refusal(description, tmp_path)


def test_default_uuids_are_the_same_each_time_and_differ_by_seed(fake_driver):
    uuids = [
        [gpu.uuid for gpu in fake_driver(text).status()]
        for text in ("gpu h200 count=4", "gpu h200 count=4", "seed node-b\ngpu h200 count=4")
    ]
    assert uuids[0] == uuids[1]
    assert len(set(uuids[0] + uuids[2])) == 8


def test_foreign_processes_come_and_go(fake_driver):
    driver = fake_driver("gpu h200 memory_mib=1000\nprocess 0 4711 300 trainer")
    assert driver.status()[0].processes == {4711: 300}
    driver.ctl("process", 0, 4712, 200, "other")
    assert driver.used_mib() == 500
    driver.ctl("gone", 4711)
    assert driver.status()[0].processes == {4712: 200}


def test_a_command_that_is_none_is_refused(fake_driver):
    driver = fake_driver()
    for words in (
        ["xid"],
        ["xid", 9, 79],
        ["xid", 0, "many"],
        ["explode"],
        ["mig", 0, "create", "9g.9gb"],
        ["gone", 5],
    ):
        with pytest.raises(AssertionError, match=r"must be|no process"):
            driver.ctl(*words)
    assert len(driver.status()) == 1


def test_mig_mode_does_not_change_under_a_process(fake_driver):
    driver = fake_driver("gpu h200\nprocess 0 1 10 x")
    with pytest.raises(AssertionError, match="in use"):
        driver.ctl("mig", 0, "on")


def test_a_status_that_is_not_read_stalls_no_other_command(fake_driver):
    driver = fake_driver("gpu h200\n" + "".join(f"process 0 {pid} 1 {'x' * 40}\n" for pid in range(1, 201)))
    command = [driver.libraries / "nvidia-fake-driverd", "ctl", "--socket", driver.socket, "status"]
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(command, stdout=writer) as stuck:
        os.close(writer)
        try:
            os.read(reader, 1)  # it prints, and waits for its output to be read
            subprocess.run(command, stdout=subprocess.DEVNULL, timeout=10, check=True)
            assert stuck.poll() is None
        finally:
            stuck.kill()
    os.close(reader)


def test_a_socket_left_by_a_killed_daemon_is_taken_over(fake_driver, tmp_path):
    (tmp_path / "s").touch()
    config = tmp_path / "fake.conf"
    config.write_text("gpu t4")
    command = [fake_build() / "nvidia-fake-driverd", "--config", config, "--socket", tmp_path / "s"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert "ready, 1 GPUs" in daemon.stdout.readline()
        daemon.terminate()
    assert daemon.returncode == 0
    assert not (tmp_path / "s").exists()


WIRE = (REPOSITORY / "shim/fake/wire.h").read_text()
VERSION = int(re.findall(r"#define FAKE_PAGE_VERSION (\d+)u", WIRE)[0])
MESSAGE_BYTES = 8


def message(version: int, slot: int, rest: bytes = b"") -> bytes:
    """struct fake_message: version and slot. Only the daemon sends one."""
    return struct.pack("<II", version, slot) + rest


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    packets=st.lists(
        st.one_of(
            st.binary(max_size=300),
            st.builds(message, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=300)),
            st.builds(message, st.just(VERSION), st.integers(0, 1100)),
        ),
        max_size=6,
    )
)
def test_garbage_from_a_client_harms_no_other_client(shared_driver, packets):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(5)
        client.connect(str(shared_driver.socket))
        for packet in packets:
            try:
                client.send(packet)
            except (BrokenPipeError, ConnectionResetError):
                break
    status = shared_driver.status()
    assert [gpu.used_mib for gpu in status] == [300]


@pytest.fixture(scope="module")
def shared_driver(tmp_path_factory):
    driver = start_fake_driver("gpu h200 memory_mib=1000\nprocess 0 4711 300 x", tmp_path_factory.mktemp("fuzz"))
    yield driver
    driver.stop()


def connected(driver) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(5)
    client.connect(str(driver.socket))
    return client


def test_a_client_is_greeted_with_its_slot(shared_driver):
    with connected(shared_driver) as client:
        greeting = client.recv(2 * MESSAGE_BYTES)
    version, slot = struct.unpack("<II", greeting)
    assert version == VERSION
    assert slot < 1024


@pytest.mark.parametrize("length", [2, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1])
def test_a_client_that_sends_a_message_is_disconnected(shared_driver, length):
    with connected(shared_driver) as client:
        client.recv(MESSAGE_BYTES)
        client.send(message(VERSION, 0, b"\0")[:length])
        assert client.recv(MESSAGE_BYTES) == b""


def descriptors(driver) -> int:
    return len(list(Path(f"/proc/{driver.process.pid}/fd").iterdir()))


def test_a_client_that_sends_descriptors_leaves_none_behind(shared_driver):
    before = descriptors(shared_driver)
    for _ in range(20):
        with connected(shared_driver) as client:
            client.recv(MESSAGE_BYTES)
            socket.send_fds(client, [b"garbage"], [0])
            assert client.recv(MESSAGE_BYTES) == b""
    shared_driver.status()
    assert descriptors(shared_driver) <= before + 1
