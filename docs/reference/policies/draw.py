"""Draw a picture of each placement policy: `python -m docs.reference.policies.draw` writes them beside this file.

Where the pod goes in a picture is what `vgpu.scheduling.placement` answers for the nodes drawn, so no picture can tell otherwise than the code
does; a test compares the files with what is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from vgpu.api.grant import AssignedGpu
from vgpu.api.inventory import NORMAL, Gpu, Inventory
from vgpu.api.request import GpuRequest, PodRequest
from vgpu.scheduling.fleet import Fleet
from vgpu.scheduling.placement import Placement, place, rate

HERE: Final = Path(__file__).parent
TENTHS: Final = 10
"""Units in which the pictures count a GPU."""

BAR_WIDTH, BAR_HEIGHT, GAP, EDGE, TOP = 44, 90, 14, 16, 34
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#333}.small{font-size:11px;fill:#666}.node{fill:#f6f8fa;stroke:#d0d7de}"
    ".free{fill:#fff;stroke:#8c959f}.used{fill:#afb8c1}.pod{fill:#fb8f44;stroke:#953800}.link{stroke:#1a7f37;stroke-width:4}"
)


@dataclass(frozen=True)
class Scene:
    """Nodes, and a pod that comes."""

    about: str
    nodes: Mapping[str, Sequence[int]]
    """Name -> tenths used of each GPU."""
    tenths: int = 2
    gpus: int = 1
    typical: int = 0
    """Tenths that the cluster's pods request, where the policy learns it."""
    linked: tuple[int, int] | None = None
    """GPUs of each node with NVLink between them."""
    heat: Mapping[str, str] = field(default_factory=dict)
    """UUID of a GPU -> its heat class, where it is not normal."""


TWO_NODES: Final = {"a": (6, 7), "b": (0, 5)}
SCENES: Final[Mapping[str, Sequence[Scene]]] = {
    "binpack": [Scene("two tenths go to the tightest GPU", TWO_NODES)],
    "spread": [Scene("two tenths go to the emptiest GPU", TWO_NODES)],
    "fragmentation": [
        Scene("two tenths, where most pods want five: b keeps a useful half", {"a": (5, 10), "b": (3, 10)}, typical=5)
    ],
    "topology": [
        Scene("two GPUs: those with NVLink", {"a": (0, 0, 0, 0)}, gpus=2, linked=(0, 1)),
        Scene("one GPU: none of the pair", {"a": (0, 0, 0, 0)}, linked=(0, 1)),
    ],
    "cool": [
        Scene(
            "two tenths go to the cool GPU of those about equally full",
            {"a": (6, 6), "b": (0, 0)},
            heat={"a0": "hot", "a1": "cool", "b0": "cool", "b1": "cool"},
        )
    ],
    "scheduler": [
        Scene("two tenths: every node that fits, with its rating", {"a": (7, 10), "b": (0, 10), "c": (10, 9)})
    ],
}
"""One or two for each policy."""


def fleet_of(scene: Scene) -> Fleet:
    """The nodes as the product sees them."""
    fleet = Fleet()
    for name, used in scene.nodes.items():
        peers = scene.linked or ()
        gpus = tuple(
            Gpu(
                f"{name}{row}", row, "gpu", TENTHS, numa=row // 2,
                nvlinks={f"{name}{other}": 4 for other in peers if row in peers and other != row},
                heat=scene.heat.get(f"{name}{row}", NORMAL),
            )
            for row in range(len(used))
        )  # fmt: skip
        held = [AssignedGpu(f"{name}{row}", row, tenths, 0) for row, tenths in enumerate(used) if tenths]
        fleet.set_node(name, Inventory(gpus, 1), held)
    for _ in range(64 if scene.typical else 0):
        fleet.record(request_of(replace(scene, tenths=scene.typical), "fragmentation"))
    return fleet


def request_of(scene: Scene, policy: str) -> PodRequest:
    """The pod as the product sees it."""
    return PodRequest(
        (GpuRequest("main", "share", scene.gpus, mib=scene.tenths, units=scene.tenths * scene.gpus),), policy=policy
    )


def chosen(scene: Scene, policy: str) -> set[str]:
    """GPUs that the pod gets: where kube-scheduler chooses, on each node that it may choose."""
    fleet, request = fleet_of(scene), request_of(scene, policy)
    requested = [[name] for name in rate(fleet, request, scene.nodes)] if policy == "scheduler" else [list(scene.nodes)]
    found = [place(fleet, request, names) for names in requested]
    return {uuid for one in found if isinstance(one, Placement) for uuid in one.assignment.uuids("main")}


def picture(policy: str) -> str:
    """An SVG document."""
    parts, left = list[str](), EDGE
    for scene in SCENES[policy]:
        drawn, left = _scene(scene, policy, left)
        parts += drawn
    height = TOP + BAR_HEIGHT + 68
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left} {height}" width="{left}" height="{height}" role="img">',
            f"<title>{policy}</title><style>{STYLE}</style>",
            f'<rect width="{left}" height="{height}" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _scene(scene: Scene, policy: str, left: int) -> tuple[list[str], int]:
    """What is drawn, and where the next thing may stand."""
    mine, rated = chosen(scene, policy), rate(fleet_of(scene), request_of(scene, policy), scene.nodes)
    parts = [f'<text x="{left}" y="20">{escape(scene.about)}</text>']
    at = left
    for name, used in scene.nodes.items():
        width = len(used) * (BAR_WIDTH + GAP) + GAP
        parts.append(f'<rect class="node" x="{at}" y="{TOP}" width="{width}" height="{BAR_HEIGHT + 48}" rx="6"/>')
        said = f"node {name}" + (f": {rated[name]} of 10" if policy == "scheduler" and name in rated else "")
        parts.append(f'<text x="{at + GAP}" y="{TOP + BAR_HEIGHT + 40}">{said}</text>')
        for row, tenths in enumerate(used):
            new = scene.tenths if f"{name}{row}" in mine else 0
            label = scene.heat.get(f"{name}{row}", f"gpu {row}")
            parts += _gpu(label, tenths, new, at + GAP + row * (BAR_WIDTH + GAP))
        if scene.linked:
            first, second = (at + GAP + row * (BAR_WIDTH + GAP) + BAR_WIDTH // 2 for row in scene.linked)
            middle = TOP + GAP + BAR_HEIGHT // 3
            parts.append(f'<path class="link" d="M{first + BAR_WIDTH // 2} {middle}H{second - BAR_WIDTH // 2}"/>')
        at += width + GAP
    return parts, max(at, left + 7 * len(scene.about)) + EDGE


def _gpu(label: str, used: int, new: int, x: int) -> list[str]:
    """A GPU as a glass: what is used, and the pod on top of it."""
    bottom, tenth = TOP + GAP + BAR_HEIGHT, BAR_HEIGHT / TENTHS
    parts = [f'<rect class="free" x="{x}" y="{bottom - BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"/>']
    for kind, below, height in (("used", 0, used), ("pod", used, new)):
        if height:
            y = bottom - (below + height) * tenth
            parts.append(f'<rect class="{kind}" x="{x}" y="{y:g}" width="{BAR_WIDTH}" height="{height * tenth:g}"/>')
    parts.append(f'<text class="small" x="{x}" y="{bottom + 12}">{label}</text>')
    return parts


def main() -> None:
    """Write them all."""
    for policy in SCENES:
        (HERE / f"{policy}.svg").write_text(picture(policy))


if __name__ == "__main__":
    main()
