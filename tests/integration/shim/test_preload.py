"""Whatever LD_PRELOAD names before the library, the limit is enforced; and however else the driver's functions are found by the loader.

In a container, /etc/ld.so.preload brings the library after all that LD_PRELOAD names. LD_PRELOAD with the library last gives the same order.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.shim.conftest import OUT_OF_MEMORY, ROUTES, Stage
from tests.integration.shim.debian import debian_file
from tests.integration.shim.robust import run, run_command

LIBC = "libc.so.6"
BEFORE = (
    LIBC, "libdl.so.2", "libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6:libcuda.so.1", "libcuda.so.1:libc.so.6",
    "libm.so.6 libc.so.6", "/nowhere/libtangram.so:libc.so.6",
)  # fmt: skip
LOADER = "/lib64/ld-linux-x86-64.so.2"
TWICE = """
import ctypes, os, sys
program, *preloads = sys.argv[1:]
def words(*texts): return (ctypes.c_char_p * (len(texts) + 1))(*(text.encode() for text in texts), None)
kept = [f"{name}={value}" for name, value in os.environ.items() if name != "LD_PRELOAD"]
ctypes.CDLL(None).execve(program.encode(), words(program, "take", "1001"), words(*(f"LD_PRELOAD={it}" for it in preloads), *kept))
"""
NO_PROC = 'mount -t tmpfs none /proc && export LD_PRELOAD="$0" && exec "$@"'


def after(stage: Stage, *names: str) -> str:
    """An LD_PRELOAD with the library behind these."""
    return ":".join((*names, stage.library))


def own(stage: Stage) -> str:
    """The library without a sanitizer's runtime."""
    return stage.library.split(":")[-1]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("names", BEFORE)
def test_the_limit_is_enforced_with_libc_or_the_driver_named_before_the_library(
    stage: Stage, names: str, route: str
) -> None:
    probe = stage.probe(route, LD_PRELOAD=after(stage, names))
    assert probe.alloc(600) == 0
    assert probe.alloc(600) == OUT_OF_MEMORY


@pytest.mark.parametrize("names", BEFORE)
def test_the_limit_is_enforced_in_python_too(stage: Stage, names: str) -> None:
    worker = stage.worker(LD_PRELOAD=after(stage, names))
    assert [worker.request("alloc(600)")[0], worker.request("alloc(600)")[0]] == [0, OUT_OF_MEMORY]
    assert stage.true_mib(worker) == 600


def test_the_driver_s_default_lookup_meets_the_library_with_the_driver_preloaded(stage: Stage) -> None:
    program = """
import ctypes
find = ctypes.CDLL(None).dlsym
find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
print(find(None, b"cuMemAlloc_v2") == ctypes.cast(ctypes.CDLL(LIBRARY).cuMemAlloc_v2, ctypes.c_void_p).value)
"""
    program = program.replace("LIBRARY", repr(own(stage)))
    out = stage.python(program, LD_PRELOAD=after(stage, "libcuda.so.1"))
    assert out == "True\n"


STATE = r"""
import os, sys
print(repr((sys.argv, os.environ["LD_PRELOAD"], os.environ["ODD"], open("/proc/self/comm").read(), os.getppid(), os.read(0, 9))))
"""


@pytest.mark.parametrize("names", [LIBC, "libcuda.so.1"])
def test_a_program_that_is_started_again_is_the_same_process_with_the_same_words_and_surroundings(
    stage: Stage, names: str
) -> None:
    seen: list[tuple[object, ...]] = []
    for preload in (stage.library, after(stage, names)):
        words = [sys.executable, "-c", STATE, "", "a b", "--x"]
        with subprocess.Popen(
            words, env=stage.env(LD_PRELOAD=preload, ODD="=;\n:"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:  # fmt: skip
            out, _ = process.communicate("input\n", timeout=60)
            assert process.returncode == 0
        argv, found, *rest = eval(out)
        assert found == (preload if preload == stage.library else f"{stage.library}:{preload}")
        seen.append((argv, *rest))
    assert seen[0] == seen[1]


def test_a_child_needs_no_second_start(stage: Stage) -> None:
    """It has its parent's environment: the library is first."""
    child = "import os; print(os.environ['LD_PRELOAD'])"
    out = stage.python(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", LD_PRELOAD=after(stage, LIBC)
    )
    assert out == f"{stage.library}:{after(stage, LIBC)}\n"


def test_a_program_that_is_started_by_the_loader_s_name_is_held_too(stage: Stage) -> None:
    program = str(stage.build / "tests/processes")
    for words in ([LOADER, program], [LOADER, "--preload", LIBC, program]):
        for mib, code in (("1000", 0), ("1001", OUT_OF_MEMORY)):
            assert run_command(stage, [*words, "take", mib], LD_PRELOAD=after(stage, LIBC)).codes == [code], words


def test_a_script_is_started_again_too(stage: Stage, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!{sys.executable} -I\nimport sys\nprint(len(sys.argv), sys.flags.isolated)\n")
    script.chmod(0o755)
    assert run_command(stage, [str(script), "one", "two"], LD_PRELOAD=after(stage, LIBC)).codes == [3, 1]


@pytest.mark.parametrize("first", ["good", "bad"])
def test_a_variable_that_is_there_twice_is_read_as_the_loader_reads_it(stage: Stage, first: str) -> None:
    """The loader goes by the last one, and getenv by the first."""
    both = [stage.library, after(stage, LIBC)] if first == "good" else [after(stage, LIBC), stage.library]
    program = str(stage.build / "tests/processes")
    assert run_command(stage, [sys.executable, "-c", TWICE, program, *both], LD_PRELOAD="").codes == [OUT_OF_MEMORY]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_program_that_cannot_be_started_again_ends_with_the_reason(stage: Stage) -> None:
    program = (str(stage.build / "tests/processes"), "take", "1")
    ran = run_command(stage, ["unshare", "--mount", "sh", "-ec", NO_PROC, after(stage, LIBC), *program], LD_PRELOAD="")
    assert (ran.status, ran.codes) == (127, [])
    assert "LD_PRELOAD loads" in ran.errors
    assert "libc.so.6 before" in ran.errors
    assert "does not start" in ran.errors


def test_a_program_without_a_grant_is_left_alone(stage: Stage) -> None:
    out = stage.python("import os; print(os.environ['LD_PRELOAD'])", LD_PRELOAD=after(stage, LIBC), TANGRAM_GRANT="")
    assert out == after(stage, LIBC) + "\n"


def test_a_program_that_loads_the_library_itself_is_not_started_again(stage: Stage) -> None:
    program = f"import ctypes, os; ctypes.CDLL({own(stage)!r}); print(os.getpid(), 'LD_PRELOAD' in os.environ)"
    out = stage.python(f"import os; print(os.getpid()); {program}", LD_PRELOAD="")
    first, second = out.splitlines()
    assert second == f"{first} True"


@pytest.mark.parametrize("library", ["libjemalloc2:usr/lib/*/libjemalloc.so.2", "chain"])
def test_another_library_before_this_one_costs_no_second_start(stage: Stage, library: str) -> None:
    package, _, pattern = library.partition(":")
    other = str(debian_file(package, pattern)) if pattern else str(stage.build / "tests/libchain.so")
    out = stage.python("import os; print(os.environ['LD_PRELOAD'])", LD_PRELOAD=after(stage, other))
    assert out == after(stage, other) + "\n"


def test_an_auditor_and_libc_before_the_library_lift_no_limit(stage: Stage) -> None:
    audit = str(stage.build / "tests/libaudit.so")
    ran = run(stage, "processes", "take", "1001", LD_AUDIT=audit, LD_PRELOAD=after(stage, LIBC))
    assert ran.codes == [OUT_OF_MEMORY]


@pytest.mark.parametrize("file", ["copy", "link", "copy of the management library"])
def test_the_driver_under_another_file_s_name_is_met_too(stage: Stage, file: str, tmp_path: Path) -> None:
    name = "libnvidia-ml.so.1" if "management" in file else "libcuda.so.1"
    other, symbol = tmp_path / "other.so", "nvmlDeviceGetMemoryInfo" if "management" in file else "cuMemAlloc_v2"
    if file == "link":
        other.symlink_to((stage.build / "fake" / name).resolve())
    else:
        shutil.copy(stage.build / "fake" / name, other)
    out = stage.python(f"""
import ctypes
def at(library): return ctypes.cast(getattr(ctypes.CDLL(library), {symbol!r}), ctypes.c_void_p).value
print(at({str(other)!r}) == at({own(stage)!r}))
""")
    assert out == "True\n"


@pytest.mark.parametrize("way", ["RTLD_DEEPBIND", "dlmopen"])
def test_the_driver_s_functions_are_the_library_s_however_its_handle_was_come_by(stage: Stage, way: str) -> None:
    out = stage.python(f"""
import ctypes
libc = ctypes.CDLL(None)
for name in ("dlopen", "dlmopen", "dlsym"): getattr(libc, name).restype = ctypes.c_void_p
cuda, name = b"libcuda.so.1", b"cuMemAlloc_v2"
match {way!r}:
    case "RTLD_DEEPBIND": at = libc.dlsym(ctypes.c_void_p(libc.dlopen(cuda, 2 | 8)), name)
    case "dlmopen": at = libc.dlsym(ctypes.c_void_p(libc.dlmopen(ctypes.c_long(-1), cuda, 2)), name)
print(at == ctypes.cast(ctypes.CDLL({own(stage)!r}).cuMemAlloc_v2, ctypes.c_void_p).value)
""")
    assert out == "True\n"


def test_dlvsym_meets_the_library_in_a_driver_that_it_finds_anything_in(stage: Stage, tmp_path: Path) -> None:
    """glibc lets any version find what is in a library without versions. The fake driver has those of the libc that it needs."""
    source, driver = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text("int cuMemAlloc_v2(void) { return 0; }\n")
    subprocess.run(
        ["gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o", str(driver), str(source)], check=True
    )
    out = stage.python(f"""
import ctypes
libc = ctypes.CDLL(None)
libc.dlopen.restype = libc.dlvsym.restype = ctypes.c_void_p
at = libc.dlvsym(ctypes.c_void_p(libc.dlopen({str(driver)!r}.encode(), 2)), b"cuMemAlloc_v2", b"ANY_1")
print(at == ctypes.cast(ctypes.CDLL({own(stage)!r}).cuMemAlloc_v2, ctypes.c_void_p).value)
""")
    assert out == "True\n"


def test_dlvsym_finds_what_is_not_the_driver_s_as_ever(stage: Stage) -> None:
    out = stage.python("""
import ctypes
libc = ctypes.CDLL(None)
libc.dlvsym.restype = libc.dlsym.restype = ctypes.c_void_p
print(libc.dlvsym(None, b"getpid", b"GLIBC_2.2.5") == libc.dlsym(None, b"getpid") is not None, libc.dlvsym(None, b"getpid", b"NONE_1"))
""")
    assert out == "True None\n"
