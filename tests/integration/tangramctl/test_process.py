"""The command is what the caller started: same process, same streams, same end."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tangramctl.conftest import SMALL, Ctl, wait_for


@pytest.mark.parametrize("code", [0, 7, 75, 255])
def test_the_exit_code_is_the_commands(ctl: Ctl, code: int) -> None:
    assert ctl.run("1Gi", "sh", "-c", f"exit {code}").returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
def test_a_death_by_signal_is_seen_as_one(ctl: Ctl, number: int) -> None:
    assert ctl.run("1Gi", "sh", "-c", f"kill -{number} $$").returncode == -number


def test_a_shell_sees_128_and_the_signal(ctl: Ctl) -> None:
    line = " ".join(ctl.line("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi", "--", "sh", "-c", "'kill -TERM $$'"))
    done = subprocess.run(
        ["sh", "-c", f"{line}; echo $?"], env=ctl.environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "143\n"


def test_the_command_is_the_process_that_was_started(ctl: Ctl) -> None:
    process = ctl.start("1Gi", "sh", "-c", "echo $$; read x; echo $x")
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    assert process.communicate("what was typed\n")[0] == "what was typed\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH])
def test_a_signal_reaches_the_command(ctl: Ctl, number: signal.Signals) -> None:
    program = f"import signal; signal.pthread_sigmask(0, [{int(number)}]); print(1, flush=True); print(signal.sigwait([{int(number)}]))"
    process = ctl.start("1Gi", sys.executable, "-c", program)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert process.communicate()[0].strip().endswith(str(int(number))) or process.returncode == 0


def test_a_run_can_be_stopped_and_go_on(ctl: Ctl) -> None:
    process = ctl.start("1Gi", "cat")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("a\n")
    process.stdin.flush()
    assert process.stdout.readline() == "a\n"
    process.send_signal(signal.SIGTSTP)
    assert os.waitpid(process.pid, os.WUNTRACED)[1] == 0x7F | signal.SIGTSTP << 8
    process.send_signal(signal.SIGCONT)
    assert process.communicate("b\n")[0] == "b\n"


def test_on_a_terminal_the_command_is_in_the_foreground(ctl: Ctl) -> None:
    program = "import os; print(os.isatty(0), os.tcgetpgrp(0) == os.getpgrp(), os.getpid() == os.getpgrp(), flush=True)"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(
            sys.executable,
            ctl.line("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi", "--", sys.executable, "-c", program),
            ctl.environment,
        )
    output = b""
    while b"\n" not in output:
        output += os.read(terminal, 1024)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
    assert output.split() == [b"True", b"True", b"True"]


def test_the_command_inherits_no_signal_that_python_ignores_and_no_descriptor(ctl: Ctl) -> None:
    done = ctl.run("1Gi", "sh", "-c", "grep SigIgn /proc/self/status; ls /proc/self/fd")
    ignored, *descriptors = done.stdout.split()[1:]
    own = Path("/proc/self/status").read_text().partition("SigIgn:\t")[2].split()[0]  # of the tests' own process
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert int(ignored, 16) >> (number - 1) & 1 == 0
    assert int(ignored, 16) | 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1) == int(own, 16)
    assert descriptors == ["0", "1", "2", "3"]  # 3 is the folder that ls reads


def test_the_command_has_no_child_that_it_did_not_make(ctl: Ctl) -> None:
    done = ctl.run("1Gi", "sh", "-c", "cat /proc/$$/task/$$/children")
    assert len(done.stdout.split()) == 1  # cat


def test_the_environment_is_the_callers_with_library_grant_and_gpu(ctl: Ctl) -> None:
    ctl.env |= {"LD_LIBRARY_PATH": "/own", "LD_PRELOAD": "", "OTHER": "kept"}
    done = ctl.run("1Gi", "env")
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    machine = ctl.machine()
    assert found.pop("TANGRAM_GRANT").startswith(f"{machine}/grants/")
    assert found == ctl.environment | {
        "CUDA_VISIBLE_DEVICES": SMALL,
        "LD_LIBRARY_PATH": f"{ctl.build}/fake:/own",
        "LD_PRELOAD": f"{ctl.build}/libtangram.so:{ctl.build}/fake/libfake-kernel.so",
        "PATH": f"{ctl.build}/fake:{os.environ['PATH']}",
        "TANGRAM_FAKE_DRIVER": f"{machine}/driver.sock",
    }


def test_the_callers_preloads_stay_behind_the_library(ctl: Ctl) -> None:
    chain = ctl.build / "tests/libchain.so"
    ctl.env["LD_PRELOAD"] = str(chain)
    done = ctl.run("1Gi", "sh", "-c", "echo $LD_PRELOAD")
    assert done.stdout.strip() == f"{ctl.build}/libtangram.so:{ctl.build}/fake/libfake-kernel.so:{chain}"


def test_a_command_that_is_not_there_and_one_that_cannot_run_answer_as_a_shell_does(ctl: Ctl, tmp_path: Path) -> None:
    missing = ctl.run("1Gi", "no-such-command")
    assert (missing.returncode, missing.stderr) == (127, "tangramctl: no-such-command: no such command on PATH\n")
    assert ctl.run("1Gi", "").stderr == "tangramctl: '': no such command on PATH\n"
    folder = ctl.run("1Gi", tmp_path)
    assert folder.returncode == 126
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    assert ctl.run("1Gi", broken).returncode == 126
    assert ctl.ps() == []


def test_a_waiting_run_that_is_interrupted_ends_and_has_no_memory(ctl: Ctl) -> None:
    holder = ctl.start("16Gi", "cat")
    wait_for(ctl.ps)
    waiter = ctl.start("16Gi", "true", options=["--wait"])
    assert waiter.stderr is not None
    assert "waiting" in waiter.stderr.readline()
    waiter.send_signal(signal.SIGINT)
    assert waiter.wait() == -signal.SIGINT
    assert [entry["pid"] for entry in ctl.ps()] == [holder.pid]


def test_options_of_the_command_are_its_own_with_and_without_dashes(ctl: Ctl) -> None:
    line = ("run", "--fake", ctl.gpus, "--gpu-mem", "1Gi")
    assert ctl.call(*line, "echo", "--gpu-mem", "x", "-v").stdout == "--gpu-mem x -v\n"
    assert ctl.call(*line, "--", "echo", "--", "x").stdout == "-- x\n"
