"""The chart's list of MIG profiles: as the tables have it, and enough for every inventory that the repository has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.contract.chart.rendering import CHART, ROOT, Helm, env
from vgpu.api.codec import inventory_from_json
from vgpu.api.mig_tables import known_profiles

MEANT = (ROOT / "tests/contract/domain").glob("*.inventory.means.yaml")
INVENTORIES = sorted(
    path.with_name(path.name.replace(".means.yaml", ".json"))
    for path in MEANT
    if "refused" not in yaml.safe_load(path.read_text())
)
"""Those that can be read."""


def listed() -> list[str]:
    return yaml.safe_load((CHART / "values.yaml").read_text())["migProfiles"]


def test_the_list_and_the_page_are_as_the_tables_have_them():
    done = subprocess.run(
        [sys.executable, ROOT / "hack/update-mig-profiles", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert listed() == list(known_profiles())


def test_the_nodes_offer_what_kube_scheduler_leaves_to_tangram(helm: Helm):
    rendered = helm.objects({"migProfiles": ["1g.5gb", "2g.10gb"], "extraMigProfiles": ["9g.99gb", "1g.5gb"]})
    given = json.loads(env(rendered.container("plugin"))["TANGRAM_DEVICEPLUGIN_MIG_PROFILES"])
    assert given == ["1g.5gb", "2g.10gb", "9g.99gb"]
    configured = json.dumps(rendered.of("ConfigMap"))
    assert all(f"tangram.sh/mig-{profile}" in configured for profile in given)


def test_every_profile_of_the_list_passes_the_charts_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    for value in ("migProfiles", "extraMigProfiles"):
        pattern = re.compile(schema[value]["items"]["pattern"])
        assert all(pattern.match(name) for name in listed())
        assert not pattern.match("1g.5gb+me")


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.name)
def test_every_inventory_offers_listed_profiles_only(path: Path):
    assert set(inventory_from_json(path.read_text()).profiles) <= set(listed())


def test_every_profile_of_the_fake_driver_is_listed():
    models = (ROOT / "shim/fake/daemon/models.def").read_text()
    found = re.findall(r'^PROFILE\("[\w-]+", "([^"]+)"', models, re.MULTILINE)
    assert len(found) > 20
    assert set(found) <= set(listed())
