"""The node's inventory annotation, against an API server that fails and is written to by others."""

from __future__ import annotations

import pytest

from deviceplugin.offer import Offer
from deviceplugin.publish import Publisher
from kube.errors import ApiError
from tests.fake_api import answer_with
from tests.integration.deviceplugin.harness import NODE, Api
from tests.unit.deviceplugin.builders import inventory
from vgpu.codec import inventory_from_json
from vgpu.names import DEFAULT


async def test_the_annotation_is_written_when_it_is_wrong_and_only_then() -> None:
    async with Api() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(2))
        publisher = Publisher(client, NODE, offer)
        assert await publisher.publish()
        assert api.inventory is not None
        assert inventory_from_json(api.inventory) == offer.inventory()
        assert not await publisher.publish()

        node = api.objects["/api/v1/nodes"][NODE]
        node["metadata"]["annotations"] = {DEFAULT.inventory: "somebody's own", "other": "kept"}
        assert await publisher.publish()
        assert inventory_from_json(api.inventory) == offer.inventory()
        assert api.objects["/api/v1/nodes"][NODE]["metadata"]["annotations"]["other"] == "kept"
        assert publisher.written == 2


async def test_a_refusal_of_the_api_server_is_told_with_verb_and_path() -> None:
    async with Api() as api, api.client() as client:
        offer = Offer(DEFAULT, 1024)
        offer.set_inventory(inventory(1))
        api.faults.append(answer_with("PATCH", f"/nodes/{NODE}", 403, "Forbidden", "not your node"))
        with pytest.raises(ApiError, match=rf"PATCH /api/v1/nodes/{NODE}: 403 Forbidden: not your node"):
            await Publisher(client, NODE, offer).publish()
