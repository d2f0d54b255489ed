"""Processes that fork, die, change their user or end the library's thread."""

from __future__ import annotations

from typing import Any, Final

from tests.e2e.attacks.attack import BASELINE_ONLY, BOTH, Attack, Outcome
from tests.e2e.objects import container, pod

HARMLESS, REFUSED, REPORTED = Outcome.HARMLESS, Outcome.REFUSED, Outcome.REPORTED
OTHERS: Final = """
def others():
    mine = os.readlink("/proc/self/ns/mnt")
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.readlink(f"/proc/{name}/ns/mnt") != mine and os.path.exists(f"/proc/{name}/root/.tangram/grant"):
                yield int(name)
        except OSError: pass
while not (found := list(others())): time.sleep(0.1)
"""
"""Processes of the other container of the pod."""


def together() -> dict[str, Any]:
    """A pod whose containers see each other's processes; the other container has 2 GiB."""
    return pod("together", container("other", mem=2), shareProcessNamespace=True)


ATTACKS: Final = (
    Attack(
        name="fork-without-exec",
        does="A process that uses CUDA forks, and its child takes memory by the parent's context and by one of its own.",
        outcome=HARMLESS,
        script='held = Driver().take(256); log(f"tried: parent allocated {held}"); child(take)',
        prints="tried: parent allocated 256",
    ),
    Attack(
        name="many-processes",
        does="Sixteen processes take memory at the same moment.",
        outcome=HARMLESS,
        script="""
for _ in range(16):
    if os.fork() == 0: take()
stay()
""",
    ),
    Attack(
        name="setuid",
        does="Root of the container starts a set-user-ID copy of Python as another user, for which the loader drops LD_PRELOAD.",
        outcome=HARMLESS,
        levels=BASELINE_ONLY,
        prints="tried: real 65534, effective 0",
        script="""
import shutil
shutil.copy(os.path.realpath(sys.executable), "/tmp/python"); os.chmod("/tmp/python", 0o4755)
os.setgid(65534); os.setuid(65534)
os.execve("/tmp/python", ["/tmp/python", "-c", HEAD + 'log(f"tried: real {os.getuid()}, effective {os.geteuid()}"); take()'], {"LD_PRELOAD": "x", "PYTHONHOME": sys.base_prefix})
""",
    ),
    Attack(
        name="no-processes-left",
        does="A limit on processes keeps the library's helper thread from starting.",
        outcome=REPORTED,
        levels=BOTH,
        reason="no-thread",
        prints="tried: no thread",
        script="""
import resource, _thread
if os.getuid() == 0: os.setgid(60000); os.setuid(60000)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
try: _thread.start_new_thread(time.sleep, (1,))
except RuntimeError: log("tried: no thread starts")
take()
""",
    ),
    Attack(
        name="helper-ended",
        does="A program ends the library's helper thread by pthread_exit in a signal handler.",
        outcome=HARMLESS,
        script='driver = Driver(); driver.take(64); end_helper(); time.sleep(1); log(f"allocated {driver.take()} MiB"); stay()',
        prints="tried: a signal to the library's thread",
    ),
    Attack(
        name="stopped",
        does="A program takes its limit and stops itself (SIGSTOP) while a sibling takes memory, too.",
        outcome=HARMLESS,
        script="""
if os.fork() == 0:
    Driver().take(384); os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(2); take()
""",
    ),
    Attack(
        name="closed-descriptors",
        does="A program closes the library's connections to the arbiter and goes on taking memory.",
        outcome=HARMLESS,
        prints="tried: close",
        script="""
driver = Driver(); driver.take(64)
cut_off()
log(f"allocated {driver.take()} MiB"); stay()
""",
    ),
    Attack(
        name="crashes",
        does="A program takes its limit and is killed, twenty times.",
        outcome=HARMLESS,
        script="""
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        Driver().take(); os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
take()
""",
    ),
    Attack(
        name="ptrace",
        does="A container traces a process of another container of its pod, in a pod that shares its process namespace.",
        outcome=HARMLESS,
        levels=BOTH,
        pod=together(),
        prints="tried: ptrace",
        script=OTHERS + 'tried("ptrace", libc().ptrace(16, found[0], None, None)); take()',
    ),
    Attack(
        name="siblings-socket",
        does="A container connects to the arbiter's socket of another container of its pod, through /proc.",
        outcome=REFUSED,
        levels=BOTH,
        pod=together(),
        prints="refused: ",
        script=OTHERS
        + """
log(greeted(f"/proc/{found[0]}/root/.tangram/socket/arbiter.sock"))
stay()
""",
    ),
    Attack(
        name="siblings-root",
        does="Root of a container changes its root to that of another container of its pod, and connects to the arbiter's socket there.",
        outcome=REFUSED,
        levels=BASELINE_ONLY,
        pod=together(),
        prints="refused: this socket is another container's",
        script=OTHERS
        + """
os.chroot(f"/proc/{found[0]}/root"); os.chdir("/")
for _ in range(60):  # until the pod's status has the container's ID, its containers count as one
    said = greeted(ARBITER_SOCKET)
    if "another container's" in said: break
    time.sleep(0.5)
log(said); stay()
""",
    ),
)
