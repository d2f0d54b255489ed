"""The library beside others in one process: another allocator, a sanitizer, an auditor; and in a program with another libc."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, ROOT, Stage
from tests.integration.shim.debian import debian_file
from tests.integration.shim.robust import run, run_command

SOURCES = ROOT / "shim/tests"


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("program", "words", "codes"),
    [
        ("processes", ["take", "1000"], [0]),
        ("processes", ["take", "1001"], [OUT_OF_MEMORY]),
        ("processes", ["many"], [25, 7]),
        ("threads", ["start"], [0]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) and isinstance(value[0], str) else None,
)
def test_another_malloc_may_be_preloaded_on_either_side(
    stage: Stage, order: str, program: str, words: list[str], codes: list[int]
) -> None:
    jemalloc = str(debian_file("libjemalloc2", "usr/lib/*/libjemalloc.so.2"))
    both = [jemalloc, stage.library] if order == "before" else [stage.library, jemalloc]
    assert run(stage, program, *words, LD_PRELOAD=":".join(both)).codes == codes


@pytest.mark.parametrize("runtime", ["static", "shared"])
def test_a_program_with_the_address_sanitizer_is_held_too(stage: Stage, runtime: str, tmp_path: Path) -> None:
    program = tmp_path / "processes"
    sanitized = ["-fsanitize=address", *(["-static-libasan"] if runtime == "static" else [])]
    subprocess.run(
        ["gcc", "-g", *sanitized, "-D_GNU_SOURCE", "-DROUTE=2", "-o", program, SOURCES / "processes.c", "-ldl"],
        check=True,
    )
    for mib, code in (("1000", 0), ("1001", OUT_OF_MEMORY)):
        ran = run_command(stage, [str(program), "take", mib], ASAN_OPTIONS="verify_asan_link_order=0:detect_leaks=0")
        assert (ran.codes, ran.errors) == ([code], "")


def test_a_program_under_an_auditor_is_held_too(stage: Stage) -> None:
    ran = run(stage, "processes", "take", "1001", LD_AUDIT=str(stage.build / "tests/libaudit.so"))
    assert ran.codes == [OUT_OF_MEMORY]
    assert "audit: " in ran.errors
    assert run(stage, "processes", "take", "1000", LD_AUDIT=str(stage.build / "tests/libaudit.so")).codes == [0]


def test_a_program_on_musl_runs_as_without_the_library(stage: Stage, tmp_path: Path) -> None:
    program, source = tmp_path / "program", tmp_path / "program.c"
    source.write_text(
        """
        #include <dlfcn.h>
        #include <stdio.h>
        #include <sys/wait.h>
        #include <unistd.h>
        int main(void)
        {
            void *self = dlopen(NULL, RTLD_NOW);
            int (*print)(const char *) = self ? (int (*)(const char *))dlsym(self, "puts") : NULL;
            pid_t child = fork();
            if (child == 0)
                _exit(7);
            int status = 0;
            waitpid(child, &status, 0);
            if (print == NULL || dlsym(RTLD_DEFAULT, "puts") != (void *)print || dlsym(self, "no_such_function") != NULL)
                return 1;
            print(WEXITSTATUS(status) == 7 ? "0" : "1");
            return 0;
        }
        """
    )
    compiler = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "x86_64-linux-musl",
        "-dynamic",
        "-O1",
        "-fno-sanitize=all",
    ]
    subprocess.run([*compiler, "-o", program, source], check=True)
    loader = str(debian_file("musl", "lib/ld-musl-*.so.1").parent / "x86_64-linux-musl/libc.so")
    for preload in ("", stage.library):
        ran = run_command(stage, [loader, str(program)], LD_PRELOAD=preload)
        assert (ran.status, ran.codes, ran.errors) == (0, [0], ""), preload
