"""What a node offers of MIG: profiles that kube-scheduler leaves to Tangram, and no others."""

from __future__ import annotations

from deviceplugin.gpus.offer import Offer
from tests.builders import gpu, mig_gpu
from vgpu.api.inventory import Inventory
from vgpu.api.names import DEFAULT

LISTED, OTHER = "1g.10gb", "3g.40gb"


def test_a_profile_that_is_not_listed_is_not_offered_and_is_reported_once() -> None:
    offer, reported = Offer(DEFAULT, 1024, profiles=[LISTED]), list[str]()
    offer.unlisted = reported.append
    for count in (1, 2, 1):
        offer.set_inventory(Inventory((gpu(0), mig_gpu(1, *[LISTED, OTHER] * count))))
        assert len(offer.devices(DEFAULT.mig(LISTED))) == count
        assert offer.devices(DEFAULT.mig(OTHER)) == ()
        assert DEFAULT.mig(OTHER) not in offer.resources()
        assert offer.devices(DEFAULT.gpu_mem) != ()
    assert reported == [OTHER]


def test_without_a_list_everything_is_offered() -> None:
    offer = Offer(DEFAULT, 1024)
    offer.set_inventory(Inventory((mig_gpu(1, LISTED, OTHER),)))
    assert all(len(offer.devices(DEFAULT.mig(profile))) == 1 for profile in (LISTED, OTHER))
