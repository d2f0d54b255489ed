"""Programs that do without the library, or reach the driver past it."""

from __future__ import annotations

from typing import Final

from tests.e2e.attacks.attack import BASELINE_ONLY, BOTH, Attack, Outcome

HARMLESS, KILLED, REPORTED = Outcome.HARMLESS, Outcome.KILLED, Outcome.REPORTED

NAMESPACES: Final = """
calls = libc()
entered = tried("unshare -U -m", calls.unshare(0x10000000 | 0x00020000))
if entered:
    tried("tmpfs over /etc", calls.mount(b"none", b"/etc", b"tmpfs", 0, None))
    os.environ.pop("LD_PRELOAD", None)
    again("take()", PATH=os.environ["PATH"])
take()
"""
"""As root of a user namespace of its own, the program hides the preload file."""

ATTACKS: Final = (
    Attack(
        name="no-variable",
        does="A program starts without LD_PRELOAD.",
        outcome=HARMLESS,
        script='os.environ.pop("LD_PRELOAD", None); again("take()", **os.environ)',
    ),
    Attack(
        name="empty-environment",
        does="A program starts with an empty environment (`env -i`).",
        outcome=HARMLESS,
        levels=BOTH,
        script='again("take()")',
    ),
    Attack(
        name="preload-before",
        does="A program puts libc before the library by LD_PRELOAD, so that the driver's functions would be found by libc's dlsym.",
        outcome=HARMLESS,
        levels=BOTH,
        script='again("take()", LD_PRELOAD="libc.so.6", PATH=os.environ["PATH"])',
    ),
    Attack(
        name="preload-driver",
        does="A program puts libc and the driver's libraries before the library by LD_PRELOAD.",
        outcome=HARMLESS,
        levels=BOTH,
        script='again("take()", LD_PRELOAD="libcuda.so.1:libnvidia-ml.so.1:libc.so.6", PATH=os.environ["PATH"])',
    ),
    Attack(
        name="preload-by-loader",
        does="A program is started by the dynamic loader's name, with the option to load libc before the library (`--preload`).",
        outcome=HARMLESS,
        script='again("take()", program=(LOADER, "--preload", "libc.so.6"), PATH=os.environ["PATH"])',
    ),
    Attack(
        name="driver-copy",
        does="A program loads a copy of libcuda whose file has another name.",
        outcome=HARMLESS,
        script=r"""
pathlib.Path("/tmp/other.so").write_bytes(driver_file().read_bytes())
again("log(f'allocated {Driver(ctypes.CDLL(\"/tmp/other.so\")._handle).take()} MiB'); stay()", PATH=os.environ["PATH"])
""",
    ),
    Attack(
        name="preload-path",
        does="A program starts with an LD_PRELOAD and an LD_LIBRARY_PATH that lead to no library of Tangram's.",
        outcome=HARMLESS,
        script='again("take()", LD_PRELOAD="/nowhere/libtangram.so", LD_LIBRARY_PATH="/tmp", PATH=os.environ["PATH"])',
    ),
    Attack(
        name="forged-grant",
        does="A program names a grant of 64 GiB that it wrote itself in TANGRAM_GRANT.",
        outcome=HARMLESS,
        script="""
pathlib.Path("/tmp/grant").write_text(re.sub(r"mib=\\d+", "mib=65536", pathlib.Path("/.tangram/grant").read_text()))
again("take()", TANGRAM_GRANT="/tmp/grant")
""",
    ),
    Attack(
        name="static",
        does="A statically linked program takes memory without libcuda.",
        outcome=KILLED,
        levels=BOTH,
        script="raw()",
    ),
    Attack(
        name="own-loader",
        does="A program starts by a copy of the dynamic loader that reads no /etc/ld.so.preload.",
        outcome=KILLED,
        levels=BOTH,
        script='without_library("take()")',
    ),
    Attack(
        name="many-small",
        does="Eight static programs of one container each stay below the limit and pass it together.",
        outcome=KILLED,
        script="children(8, 256)",
    ),
    Attack(
        name="orphan",
        does="A static program's parent ends after a fork, so that it is an orphan.",
        outcome=KILLED,
        script="""
if os.fork() == 0:
    if os.fork() == 0: os.setsid(); raw()
    os._exit(0)
reap()
""",
    ),
    Attack(
        name="mps-name",
        does="A static program is called nvidia-cuda-mps-server, as a process is whose memory is others'.",
        outcome=KILLED,
        script="""
import shutil
shutil.copy(RAW, "/tmp/nvidia-cuda-mps-server")
raw(program="/tmp/nvidia-cuda-mps-server")
""",
    ),
    Attack(
        name="unreadable",
        does="A static program's file may be executed and not read, so that only root sees what the kernel shows of its process.",
        outcome=KILLED,
        script="""
import shutil
shutil.copy(RAW, "/tmp/unreadable"); os.chmod("/tmp/unreadable", 0o111)
raw(program="/tmp/unreadable")
""",
    ),
    Attack(
        name="relay",
        does="Static programs that live for less than two readings of the arbiter use the memory one after the other.",
        outcome=KILLED,
        script="relay(0.7)",
    ),
    Attack(
        name="restarter",
        does="A program that uses no GPU memory starts a static one again whenever it was killed.",
        outcome=KILLED,
        script="restart(raw)",
    ),
    Attack(
        name="connects-first",
        does="A program connects to the arbiter by the library, and then becomes a static one (exec).",
        outcome=KILLED,
        script="Driver().take(64); raw()",
    ),
    Attack(
        name="forged-hello",
        does="A program without the library greets the arbiter as the library does, and takes memory.",
        outcome=REPORTED,
        reason="over-limit",
        script='without_library("sock = connect(); sock.send(hello()); answer(sock); take()")',
    ),
    Attack(
        name="other-root",
        does="A static program changes its root, so that it shows no mount of the grant.",
        outcome=KILLED,
        levels=BASELINE_ONLY,
        script='os.makedirs("/tmp/root", exist_ok=True); raw(AIM_MIB, "/tmp/root")',
    ),
    Attack(
        name="first-thread-ended",
        does="A static program ends its first thread, by which the kernel shows the memory of a process.",
        outcome=KILLED,
        script='raw(AIM_MIB, "", "ended")',
    ),
    Attack(
        name="user-namespace",
        does="A program makes a user namespace, in which it is root, and mounts a file system over /etc; RuntimeDefault's seccomp refuses that.",
        outcome=HARMLESS,
        prints="tried: unshare",
        script=NAMESPACES,
    ),
    Attack(
        name="user-namespace-unconfined",
        does="The same where the pod has no seccomp profile.",
        outcome=KILLED,
        levels=BASELINE_ONLY,
        prints="tmpfs over /etc: done",
        script=NAMESPACES,
    ),
    Attack(
        name="past-the-hooks",
        does="A program with the library finds the driver's functions by the symbol table of libcuda's file.",
        outcome=REPORTED,
        reason="over-limit",
        script='log(f"allocated {Driver(addresses=addresses(*NAMES)).take()} MiB"); stay()',
    ),
    Attack(
        name="mapped-only",
        does="A program without the library maps a file of its name, as a mapping is no proof of obedience.",
        outcome=REPORTED,
        reason="over-limit",
        script="""
without_library("import mmap; kept = mmap.mmap(os.open('/.tangram/libtangram.so', os.O_RDONLY), 0, prot=mmap.PROT_READ); take()")
""",
    ),
    Attack(
        name="dlmopen",
        does="A program loads libcuda into a link-map namespace of its own.",
        outcome=HARMLESS,
        script="""
calls = libc(); calls.dlmopen.restype = ctypes.c_void_p
handle = calls.dlmopen(ctypes.c_long(-1), b"libcuda.so.1", 2)
tried("dlmopen", 0 if handle else -1)
log(f"allocated {Driver(handle).take()} MiB"); stay()
""",
        prints="tried: dlmopen: done",
    ),
    Attack(
        name="deep-bind",
        does="A program loads libcuda with RTLD_DEEPBIND.",
        outcome=HARMLESS,
        script="""
calls = libc(); calls.dlopen.restype = ctypes.c_void_p
log(f"allocated {Driver(calls.dlopen(b'libcuda.so.1', 2 | 8)).take()} MiB"); stay()
""",
    ),
    Attack(
        name="deep-bind-caller",
        does="A program loads with RTLD_DEEPBIND the library that looks the driver's functions up, which then calls libc's own dlsym.",
        outcome=REPORTED,
        reason="over-limit",
        script="""
script = "import sys; sys.setdlopenflags(2 | 8); import _ctypes; " + HEAD + "take()"
os.execv(sys.executable, (sys.executable, "-c", script))
""",
    ),
)
