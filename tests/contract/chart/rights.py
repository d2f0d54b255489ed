"""What the DaemonSets may do on a node, as the rendered chart says it: the table of docs/operations/node-rights.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tests.contract.chart.rendering import Helm, Objects, env

MODES: Final[Mapping[str, dict[str, Any]]] = {
    "mode `cdi`": {"accessMode": "cdi"},
    "mode `cdi` with `runtimeClassName`": {"accessMode": "cdi", "runtimeClassName": "nvidia"},
    "mode `nvidia`": {"accessMode": "nvidia"},
}


HOST_POOL: Final = {"burst": {"enabled": True, "hostPool": "64Gi", "hugepages": True}}


class Column:
    """One container of a DaemonSet."""

    def __init__(self, objects: Objects, name: str, of: str = "tangram-node") -> None:
        self.spec = objects.one("DaemonSet", of)["spec"]["template"]["spec"]
        self.container = objects.container(name)
        self.context = {**self.spec["securityContext"], **self.container["securityContext"]}
        self.privileged = bool(self.context.get("privileged"))

    def mounts(self) -> Iterator[tuple[str, str]]:
        """(what, how) of everything that is mounted; a node's folder by its path there."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            what = f"folder `{volume['hostPath']['path']}`" if "hostPath" in volume else "the API token"
            yield what, "reads" if mount.get("readOnly") else "writes"

    def gpus(self) -> str:
        """Which device nodes of GPUs it has."""
        visible = env(self.container).get("NVIDIA_VISIBLE_DEVICES", "void")
        return "all of the node's" if self.privileged else "GPUs" if visible == "all" else "none"


def _capabilities(column: Column) -> str:
    if column.privileged:
        return "all"
    named = column.context["capabilities"]
    assert named["drop"] == ["ALL"], "else the runtime's default set would have to be named"
    return ", ".join(f"`{name}`" for name in named.get("add", [])) or "none"


FACTS: Final[Mapping[str, Callable[[Column], str]]] = {
    "user": lambda column: str(column.context["runAsUser"]),
    "`privileged`": lambda column: "yes" if column.privileged else "no",
    "capabilities": _capabilities,
    "may gain privileges (`allowPrivilegeEscalation`)": lambda column: (
        "yes" if column.privileged or column.context["allowPrivilegeEscalation"] else "no"
    ),
    "seccomp profile": lambda column: "none" if column.privileged else f"`{column.context['seccompProfile']['type']}`",
    "root file system": lambda column: "read-only" if column.context["readOnlyRootFilesystem"] else "writable",
    "node's process namespace (`hostPID`)": lambda column: "yes" if column.spec.get("hostPID") else "no",
    "node's network (`hostNetwork`)": lambda column: "yes" if column.spec.get("hostNetwork") else "no",
    "device nodes": Column.gpus,
}


def node_rights(helm: Helm) -> str:
    """Markdown. AssertionError when the arbiter's rights depend on the mode: then it needs more columns."""
    rendered = {mode: helm.objects(values) for mode, values in MODES.items()}
    columns = {f"plugin, {mode}": Column(objects, "plugin") for mode, objects in rendered.items()}
    arbiters = [Column(objects, "arbiter") for objects in rendered.values()]
    assert len({tuple(_cells(one)) for one in arbiters}) == 1, "the arbiter's rights are the same in every mode"
    columns["arbiter"] = arbiters[0]
    pools = {
        mode: Column(helm.objects(values | HOST_POOL), "pool", "tangram-pool")
        for mode, values in MODES.items()
        if "with" not in mode
    }
    columns |= {f"host pool, {mode}": pool for mode, pool in pools.items()}
    columns["host pool's init container"] = Column(helm.objects(HOST_POOL), "mount", "tangram-pool")
    cells = {name: dict(_cells(column)) for name, column in columns.items()}
    rows = dict.fromkeys(row for column in cells.values() for row in column)
    return "\n".join(
        [
            f"| | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
            *(f"| {row} | {' | '.join(column.get(row, '–') for column in cells.values())} |" for row in rows),
        ]
    )


def _cells(column: Column) -> Iterator[tuple[str, str]]:
    for row, reported in FACTS.items():
        yield row, reported(column)
    yield from column.mounts()


def assert_confined(container: dict[str, Any], *capabilities: str) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"].get("add", []) == list(capabilities)
    assert context["capabilities"]["drop"] == ["ALL"]
    assert not context.get("privileged")
