"""A run inside a container that has a share already is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tangramctl import run
from tangramctl.errors import BadOption


@pytest.mark.parametrize("there", [0, 1], ids=["this release", "the release before"])
def test_a_run_in_a_container_of_either_release_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: int
) -> None:
    monkeypatch.delenv("TANGRAM_GRANT", raising=False)
    places = (tmp_path / "now", tmp_path / "before")
    monkeypatch.setattr(run, "GRANT_DIRS", tuple(map(str, places)))
    run._refuse_inside()
    places[there].mkdir()
    with pytest.raises(BadOption, match=f"{places[there]} is there"):
        run._refuse_inside()
