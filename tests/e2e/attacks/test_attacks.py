"""Every attack of the table, on a cluster. See attack.py for how to add one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from hack.cluster import images
from hack.cluster.layout import Layout
from hack.kubectl import CommandFailed
from tests.e2e import linked_image
from tests.e2e.attacks import judge, mounts, stage, verdict
from tests.e2e.attacks.attack import Attack, Level, Outcome
from tests.e2e.attacks.table import staged
from tests.e2e.cluster import Cluster
from tests.e2e.objects import share
from vgpu.api.codec import inventory_from_json

QUIET_S: Final = 62.0
"""For a minute after its start the arbiter kills no process. Specified: arbiter.bypass."""
CHECK_S: Final = 5.0
NEIGHBOURS: Final = "attacks-neighbours"


def namespace_of(level: Level) -> str:
    return f"attacks-{level}"


@dataclass(slots=True)
class Siege:
    """The cluster with neighbours, and the attackers that were let loose so far."""

    cluster: Cluster
    neighbours: tuple[str, ...]
    began_s: float
    examined_s: float = 0.0
    loose: set[Outcome] = field(default_factory=set)
    places: dict[tuple[str, Level], judge.Attacker] = field(default_factory=dict)

    def attacker(self, attack: Attack, level: Level) -> judge.Attacker:
        """Starts all attackers of its outcome with the first of them; those to be killed once the arbiter may kill."""
        wave = {Outcome.KILLED} if attack.outcome is Outcome.KILLED else set(Outcome) - {Outcome.KILLED}
        if not wave <= self.loose:
            if Outcome.KILLED in wave:
                time.sleep(max(0.0, judge.arbiter_runs_since(self.cluster) + QUIET_S - time.time()))
            self._let_loose(wave)
        return self.places[attack.name, level]

    def _let_loose(self, wave: set[Outcome]) -> None:
        self.loose |= wave
        made = stage.pods((attack, level) for attack, level in staged() if attack.script and attack.outcome in wave)
        for level in Level:
            of_level = [(name, thing, inside) for (name, at), (thing, inside) in made.items() if at is level]
            pods = {thing["metadata"]["name"]: thing for _, thing, _ in of_level}
            if pods:
                self.cluster.create(namespace_of(level), *pods.values())
            self.places |= {
                (name, level): judge.Attacker(self.cluster, namespace_of(level), thing["metadata"]["name"], inside)
                for name, thing, inside in of_level
            }

    def undisturbed(self) -> None:
        """Looks at most every five seconds: a look takes one, and sees all that was before."""
        if time.monotonic() - self.examined_s >= CHECK_S:
            self.look()

    def look(self) -> None:
        self.examined_s = time.monotonic()
        judge.undisturbed(self.cluster, NEIGHBOURS, self.neighbours, stage.NEIGHBOUR_MIB, self.began_s)


@pytest.fixture(scope="module")
def siege(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """Namespaces, programs, the image with links, and on each GPU a neighbour and a reserve for what attackers allocate."""
    programs = stage.programs()
    spaces = {namespace_of(level): str(level) for level in Level} | {NEIGHBOURS: "restricted"}
    cluster.kubectl("delete", "namespace", *spaces, "--ignore-not-found", "--timeout=60s")  # of a run before
    for name, level in spaces.items():
        cluster.make_namespace(name, **{"pod-security.kubernetes.io/enforce": level})
        cluster.create(name, programs)
    load_linked_image(tmp_path_factory.mktemp("linked"))
    uuids = whole_gpus(cluster)
    names = tuple(f"neighbour-{at}" for at in range(len(uuids)))
    cluster.run(NEIGHBOURS, *(stage.neighbour(name, uuid) for name, uuid in zip(names, uuids, strict=True)))
    cluster.run(NEIGHBOURS, *(stage.reserve(f"reserve-{at}", uuid) for at, uuid in enumerate(uuids)))
    for name in names:
        judge.Attacker(cluster, NEIGHBOURS, name, "main").acts()
    yield Siege(cluster, names, time.time())
    cluster.drop_namespaces(*spaces)


@pytest.fixture(scope="module")
def victim(siege: Siege) -> str:
    """A running pod with a share, for what is tried with the API server; in a namespace where Pod Security refuses nothing before Tangram."""
    siege.cluster.run(namespace_of(Level.PRIVILEGED), share("victim", 2))
    return "victim"


def load_linked_image(folder: Path) -> None:
    (workload,) = (path for path in images.current() if path.name.startswith("tangram-workload"))
    linked_image.write(workload, folder / "linked.tar", mounts.LINKED, {".tangram": "/shared"})
    images.load(Layout(), folder / "linked.tar")


def whole_gpus(cluster: Cluster) -> list[str]:
    """UUIDs of the GPUs that shares are of."""
    inventory = cluster.node()["metadata"]["annotations"]["tangram.sh/inventory"]
    return [gpu.uuid for gpu in inventory_from_json(inventory).gpus if not gpu.mig]


@pytest.mark.parametrize(
    ("attack", "level"), staged(), ids=lambda value: value.name if isinstance(value, Attack) else str(value)
)
def test_attack(siege: Siege, victim: str, attack: Attack, level: Level) -> None:
    """`attack.does` comes to `attack.outcome`."""
    if attack.act is not None:
        with pytest.raises(CommandFailed) as refusal:
            attack.act(siege.cluster, namespace_of(Level.PRIVILEGED), victim)
        verdict.refused(attack.prints, str(refusal.value))
    elif not attack.script:
        for namespace in (namespace_of(level), *(["kube-system"] * attack.unwatched)):
            verdict.refused(attack.prints, siege.cluster.refused(namespace, stage.own_pod(attack, level)))
    else:
        attacker = siege.attacker(attack, level)
        attacker.acts()
        attacker.printed(attack.prints)
        match attack.outcome:
            case Outcome.REFUSED:
                verdict.nothing_held(attacker.booked_mib())
            case Outcome.HARMLESS:
                attacker.harmless()
            case Outcome.REPORTED:
                attacker.reported(attack.reason)
            case Outcome.KILLED:
                attacker.killed()
        if attack.event:
            attacker.has_event(attack.event)
        siege.undisturbed()


def test_the_neighbours_noticed_nothing(siege: Siege) -> None:
    siege.look()
