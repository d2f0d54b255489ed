"""A cordon beside others who write the node: it is tried again, a few times."""

from __future__ import annotations

import pytest

from tangramctl import cordon
from tangramctl.cordon import TRIES, Conflict, NodeGpus
from tangramctl.errors import BadOption
from tests.builders import gpu
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT

MODIFIED = 'kubectl patch node n1: Operation cannot be fulfilled on nodes "n1": the object has been modified'


class ApiServer:
    """Refuses patches with these errors, one after the other."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.patches = list(errors), 0

    def read(self, *_: object) -> NodeGpus:
        return NodeGpus("n1", str(self.patches), Inventory((gpu(0),)), {})

    def patch(self, *_: str) -> bytes:
        self.patches += 1
        if self.errors:
            raise BadOption(self.errors.pop(0))
        return b""


@pytest.mark.parametrize(
    ("errors", "refusal", "code", "patches"),
    [
        ([MODIFIED] * (TRIES - 1), None, 0, TRIES),
        ([MODIFIED] * TRIES, Conflict, 75, TRIES),
        ([MODIFIED, "forbidden", MODIFIED], BadOption, 2, 2),
    ],
)
def test_only_a_node_that_others_wrote_is_tried_again_and_in_the_end_it_is_a_conflict(
    monkeypatch: pytest.MonkeyPatch,
    errors: list[str],
    refusal: type[Conflict | BadOption] | None,
    code: int,
    patches: int,
) -> None:
    server = ApiServer(*errors)
    monkeypatch.setattr(cordon, "read", server.read)
    monkeypatch.setattr(cordon, "output_of", server.patch)
    if refusal is None:
        assert cordon.cordon("n1", "0", "fan", DEFAULT) == gpu(0).uuid
    else:
        with pytest.raises(refusal) as caught:
            cordon.cordon("n1", "0", "fan", DEFAULT)
        assert type(caught.value) is refusal
        assert caught.value.code == code
    assert server.patches == patches
