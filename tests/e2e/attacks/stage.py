"""The attackers' pods, beside neighbours that must notice nothing.

Attacks of one outcome and level are containers of one pod, each with a share of its own: so fifty attacks are a dozen pods.
"""

from __future__ import annotations

import subprocess
import tempfile
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

from tests.e2e.attacks.attack import LIMIT_MIB, Attack, Level, Outcome
from tests.e2e.objects import RESTRICTED, container, pod

PROGRAMS: Final = Path(__file__).parent / "programs"
SHIM: Final = Path(__file__).parents[3] / "shim/fake"
FOLDER: Final = "/attacks"
HEAD: Final = f"import sys; sys.path.insert(0, {FOLDER!r})\nfrom kit import *\n"
CROWD: Final = 8
"""Containers of a pod: the kubelet starts them one after the other."""
CONTEXTS: Final[dict[Level, dict[str, Any]]] = {
    Level.RESTRICTED: RESTRICTED,
    Level.BASELINE: {"runAsUser": 0},
    Level.PRIVILEGED: {"runAsUser": 0},
}
NEIGHBOUR_MIB: Final = 6144
RESERVE_MIB: Final = 30 * 1024
NEIGHBOUR: Final = HEAD + dedent("""
    driver, at, slowest, calls, since = Driver(), ctypes.c_uint64(), 0.0, 0, time.monotonic()
    kept = driver.take(6144); log(f"allocated {kept} MiB")
    while True:
        began = time.monotonic()
        driver.must("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(STEP_MIB * MIB))
        driver.must("cuMemFree_v2", at)
        slowest, calls = max(slowest, time.monotonic() - began), calls + 1
        if began - since >= 1:
            log(f"calls {calls} slowest_ms {slowest * 1000:.1f}")
            slowest, calls, since = 0.0, 0, began
        time.sleep(0.05)
    """)
"""Has 8 GiB, keeps 6, and allocates and frees a bit all the time. A call that fails ends in `refused`."""


def programs() -> dict[str, Any]:
    """The ConfigMap that every attacker mounts: what scripts import, and the static program."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "raw"
        source = str(PROGRAMS / "raw.c")
        words = [
            "gcc",
            "-Wall",
            "-Werror",
            "-static",
            "-s",
            "-O2",
            "-pthread",
            "-I",
            str(SHIM),
            "-o",
            str(made),
            source,
        ]
        subprocess.run(words, check=True)
        built = made.read_bytes()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "attacks"},
        "data": {"kit.py": (PROGRAMS / "kit.py").read_text()},
        "binaryData": {"raw": b64encode(built).decode()},
    }


def dressed(thing: dict[str, Any], level: Level) -> dict[str, Any]:
    """With the programs in each container, as the level has it."""
    spec = thing["spec"]
    spec["volumes"] = [
        *spec.get("volumes", []),
        {"name": "programs", "configMap": {"name": "attacks", "defaultMode": 0o755}},
    ]
    for one in spec["containers"]:
        one["volumeMounts"] = [*one.get("volumeMounts", []), {"name": "programs", "mountPath": FOLDER}]
        one.setdefault("securityContext", CONTEXTS[level])
    return thing


def attacker(attack: Attack, name: str) -> dict[str, Any]:
    """A container with a share that runs the script."""
    made = container(name, mem=LIMIT_MIB // 1024, run=["python3", "-c", HEAD + attack.script])
    if attack.cpu:
        made["resources"] = {"limits": made["resources"]["limits"] | {"cpu": attack.cpu}, "requests": {"cpu": "10m"}}
    return made


def own_pod(attack: Attack, level: Level) -> dict[str, Any]:
    """A row's own pod. With a script, `main` runs it; where the row has no `main`, one with a share is put in."""
    assert attack.pod is not None
    spec = attack.pod["spec"]
    thing = attack.pod | {"metadata": attack.pod["metadata"] | {"name": attack.name}, "spec": dict(spec)}
    containers = [dict(one) for one in spec["containers"]]
    if attack.script:
        runs = {"command": ["python3", "-c", HEAD + attack.script]}
        mains = [one for one in containers if one["name"] == "main"]
        containers = [one | runs if one["name"] == "main" else one for one in containers]
        containers += [] if mains else [attacker(attack, "main")]
    thing["spec"]["containers"] = containers
    return dressed(thing, level) if attack.script else thing


def pods(rows: Iterable[tuple[Attack, Level]]) -> dict[tuple[str, Level], tuple[dict[str, Any], str]]:
    """(attack, level) -> the pod that has it, and the container."""
    made: dict[tuple[str, Level], tuple[dict[str, Any], str]] = {}
    crowds: dict[tuple[Outcome, Level], list[Attack]] = {}
    for attack, level in rows:
        if attack.pod is not None:
            made[attack.name, level] = own_pod(attack, level), "main"
        else:
            crowds.setdefault((attack.outcome, level), []).append(attack)
    for (outcome, level), attacks in crowds.items():
        for at in range(0, len(attacks), CROWD):
            some = attacks[at : at + CROWD]
            thing = dressed(pod(f"{outcome}-{at // CROWD}", *(attacker(one, one.name) for one in some)), level)
            made |= {(one.name, level): (thing, one.name) for one in some}
    return made


def reserve(name: str, uuid: str) -> dict[str, Any]:
    """An unused share: what attackers allocate beyond their limits comes out of it, and not out of the neighbour's."""
    idle = container(mem=RESERVE_MIB // 1024, run=["sleep", "3600"], securityContext=RESTRICTED)
    return pod(name, idle, annotations={"tangram.sh/gpu-uuid": uuid})


def neighbour(name: str, uuid: str) -> dict[str, Any]:
    """A pod on one GPU."""
    thing = pod(name, container(mem=8, run=["python3", "-c", NEIGHBOUR]), annotations={"tangram.sh/gpu-uuid": uuid})
    return dressed(thing, Level.RESTRICTED)
