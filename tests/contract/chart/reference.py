"""The tables of docs/reference/{chart,rbac}.md, of the chart's README and of docs/operations/node-rights.md, made from the chart's own text (comments in values.yaml and above
RBAC rules) and from what it renders.

`python -m tests.contract.chart.reference` writes them (hack/verify-chart --write). What stands outside the marked part of a
page is written by hand and stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import HELM
from tests.contract.chart.rendering import CHART, ROOT, Helm
from tests.contract.chart.rights import node_rights

BEGIN, END = "<!-- made by hack/verify-chart --write -->", "<!-- end -->"
_KEY: Final = re.compile(r"^( *)([A-Za-z]\w*):(?: (.*))?$")
SET_AS_A_WHOLE: Final = (
    "resources", "nodeSelector", "updateStrategy", "strategy", "podSecurityContext", "securityContext",
    "livenessProbe", "readinessProbe", "startupProbe",
)  # fmt: skip
"""Mappings that are one value each."""
_RULE: Final = re.compile(r"^  - (apiGroups|nonResourceURLs): ")


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One value: dotted key, default as YAML, comment."""

    key: str
    default: str
    text: str


def value_rows() -> list[ValueRow]:
    """Every value, in the order of the file."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = yaml.safe_load("\n".join(lines))
    rows: list[ValueRow] = []
    path: list[str] = []
    comment: list[str] = []
    for line in lines:
        if line.strip().startswith("# "):
            comment.append(line.strip().removeprefix("# "))
            continue
        found = _KEY.match(line)
        if found:
            path = [*path[: len(found[1]) // 2], found[2]]
            key = ".".join(path)
            if not any(key.startswith(f"{row.key}.") for row in rows):
                value = _at(values, path)
                if not isinstance(value, dict) or not value or path[-1] in SET_AS_A_WHOLE:
                    rows.append(ValueRow(key, _short(value), " ".join(comment)))
        comment = []
    return rows


def _at(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values[part]
    return values


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"{len(value)} entries"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).strip()
    return f"`{text.removesuffix('...').strip()}`"


def chart_table() -> str:
    """Markdown."""
    rows = [f"| `{row.key}` | {row.default} | {row.text} |" for row in value_rows()]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


@dataclass(frozen=True, slots=True)
class RightRow:
    """One RBAC rule and why it is there."""

    role: str
    scope: str
    rule: dict[str, list[str]]
    why: str


def right_rows(text: str) -> Iterator[RightRow]:
    """Rules of rendered manifests, with the comment above each."""
    for manifest in re.split(r"^---$", text, flags=re.MULTILINE):
        thing = yaml.safe_load(manifest)
        if not thing or thing["kind"] not in ("Role", "ClusterRole"):
            continue
        reasons, comment = [], []
        for line in manifest.partition("\nrules:\n")[2].splitlines():
            if line.startswith("  # "):
                comment.append(line.removeprefix("  # "))
                continue
            if _RULE.match(line):
                reasons.append(" ".join(comment))
            comment = []
        scope = "cluster" if thing["kind"] == "ClusterRole" else f"namespace {thing['metadata']['namespace']}"
        for rule, why in zip(thing["rules"], reasons, strict=True):
            yield RightRow(thing["metadata"]["name"], scope, rule, why)


def rights_table(text: str) -> str:
    """Markdown."""
    lines = ["| role | where | what | verbs | why |", "|---|---|---|---|---|"]
    for row in right_rows(text):
        groups, resources = row.rule.get("apiGroups", []), row.rule.get("resources", [])
        of_groups = [f"{resource}.{group}" if group else resource for group in groups for resource in resources]
        what = ", ".join([*of_groups, *(f"the path {path}" for path in row.rule.get("nonResourceURLs", []))])
        names = row.rule.get("resourceNames")
        named = f" named {', '.join(names)}" if names else ""
        lines.append(f"| {row.role} | {row.scope} | {what}{named} | {', '.join(row.rule['verbs'])} | {row.why} |")
    return "\n".join(lines)


def borrowed_table(text: str) -> str:
    """Bindings to roles that the cluster brings along."""
    lines = ["| binding | role | why |", "|---|---|---|"]
    for manifest in re.split(r"^---$", text, flags=re.MULTILINE):
        thing = yaml.safe_load(manifest)
        if thing and thing["kind"].endswith("RoleBinding") and not thing["roleRef"]["name"].startswith("tangram"):
            why = " ".join(re.findall(r"^# (?!Source)(.*)$", manifest, re.MULTILINE))
            lines.append(f"| {thing['metadata']['name']} | {thing['roleRef']['name']} | {why} |")
    return "\n".join(lines)


def _helm() -> Helm:
    return Helm(build(cache_folder(), [HELM], Steps())["helm"])


def _rendered() -> str:
    return _helm().text({"accessMode": "cdi", "burst": {"enabled": True}})


@dataclass(frozen=True, slots=True)
class Page:
    """A page with a part that is made."""

    path: Path
    make: Callable[[], str]

    @property
    def name(self) -> str:
        return self.path.stem

    def renewed(self) -> str:
        """The page as it should be."""
        before, begin, rest = self.path.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{self.path}: the lines {BEGIN!r} and {END!r} must both be there")
        return f"{before}{BEGIN}\n{self.make()}\n{END}{after}"

    def in_step(self) -> bool:
        return self.path.read_text() == self.renewed()


PAGES: Final = (
    Page(ROOT / "docs/reference/chart.md", chart_table),
    Page(CHART / "README.md", chart_table),
    Page(ROOT / "docs/reference/rbac.md", lambda: f"{rights_table(_rendered())}\n\n{borrowed_table(_rendered())}"),
    Page(ROOT / "docs/operations/node-rights.md", lambda: node_rights(_helm())),
)


def main() -> int:
    """Write every page."""
    for page in PAGES:
        page.path.write_text(page.renewed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
