"""What admission does to a pod, as pairs of files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.contract.webhook.pairs import FOLDER, INPUTS, answer, applied, load, output_of
from vgpu.api.errors import BadRequest
from webhook.mutate import mutate


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name.removesuffix(".input.yaml"))
def test_a_pod_is_admitted_as_its_output(path: Path) -> None:
    assert answer(*load(path)) == list(yaml.safe_load_all(output_of(path).read_text()))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: path.name.removesuffix(".input.yaml"))
def test_a_pod_that_came_in_is_not_changed_again(path: Path) -> None:
    pod, rules = load(path)
    try:
        once = applied(pod, list(mutate(pod, rules).ops))
    except BadRequest:
        return
    assert mutate(once, rules).ops == ()


def test_every_output_has_an_input_and_there_are_enough() -> None:
    assert set(FOLDER.glob("*.output.yaml")) == {output_of(path) for path in INPUTS}
    assert len(INPUTS) >= 30
