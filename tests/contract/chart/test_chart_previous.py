"""An upgrade hands over the values of the release before this one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.contract.chart.rendering import Helm, Refused
from tests.previous_release import previous_sources


def test_the_values_of_the_previous_release_are_values_of_this_one(helm: Helm, tmp_path: Path) -> None:
    """`helm upgrade --reset-then-reuse-values` hands over what the user had set, which may be any of them."""
    values = previous_sources() / "deploy/helm/tangram/values.yaml"
    assert helm.text(values)
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(yaml.safe_load(values.read_text()) | {"noSuchValue": True}))
    with pytest.raises(Refused, match="noSuchValue"):
        helm.text(tmp_path / "values.yaml")
