"""Certificates over the years, and replicas that keep them together."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store

from kube.errors import ApiError
from vgpu.api.errors import BadDocument
from webhook.certificate_keeper import CertificateLocations, FileKeeper, SecretKeeper, keep
from webhook.certs import CA_CERT, CA_KEY, CERT, KEY, OLD_CA_KEY, renewed
from webhook.metrics import Metrics
from webhook.tls import ServingContext

START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ("tangram-webhook.tangram.svc",)
PLACES = CertificateLocations("tangram", "certs", "tangram", NAMES)


def verifies(files: dict[str, bytes], now: datetime, ca: bytes | None = None) -> None:
    """As the API server does: the leaf against the bundle, by name, at a time."""
    store = Store(x509.load_pem_x509_certificates(ca or files[CA_CERT]))
    verifier = PolicyBuilder().store(store).time(now).build_server_verifier(x509.DNSName(NAMES[0]))
    verifier.verify(x509.load_pem_x509_certificate(files[CERT]), [])


def test_nothing_changes_until_two_thirds_of_the_leafs_life() -> None:
    files = renewed({}, NAMES, START)
    verifies(files, START)
    assert renewed(files, NAMES, START + 59 * DAY) == files
    later = renewed(files, NAMES, START + 60 * DAY)
    assert later[CERT] != files[CERT]
    assert later[CA_CERT] == files[CA_CERT]
    verifies(files, START + 89 * DAY)


def test_over_twenty_years_every_certificate_is_trusted_before_it_is_served_and_by_clients_with_the_last_bundle() -> (
    None
):
    files, now, authorities = renewed({}, NAMES, START), START, set()
    for _ in range(20 * 365):
        now += DAY
        before, files = files, renewed(files, NAMES, now)
        if files != before:
            verifies(files, now)
            verifies(files, now, ca=before[CA_CERT])
            verifies(before, now, ca=files[CA_CERT])
            authorities |= {cert.serial_number for cert in x509.load_pem_x509_certificates(files[CA_CERT])}
        assert files[CA_CERT].count(b"BEGIN") <= 2
    assert len(authorities) >= 3


def test_a_new_authority_signs_only_after_it_was_announced_for_a_day() -> None:
    files = renewed({}, NAMES, START)
    due = START + timedelta(days=2434)
    files = renewed(files, NAMES, due - DAY)
    announced = renewed(files, NAMES, due)
    assert announced[CA_CERT].count(b"BEGIN") == 2
    assert OLD_CA_KEY in announced
    verifies(announced, due, ca=files[CA_CERT])
    after = renewed(announced, NAMES, due + DAY)
    assert OLD_CA_KEY not in after
    assert after[CERT] != announced[CERT]


@pytest.mark.parametrize("name", [CA_CERT, CA_KEY, CERT, KEY])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_what_cannot_be_read_is_made_anew(name: str, content: bytes) -> None:
    files = renewed(renewed({}, NAMES, START) | {name: content}, NAMES, START)
    verifies(files, START)
    assert renewed(files, NAMES, START) == files


def test_other_dns_names_bring_another_certificate() -> None:
    old = renewed({}, ("old.svc",), START)
    new = renewed(old, NAMES, START)
    assert (new[CERT] == old[CERT], new[CA_CERT] == old[CA_CERT]) == (False, True)
    verifies(new, START)


class FakeSecretApi:
    """A Secret and a configuration, with resource versions; before every call, the other replica runs."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self._versions = itertools.count(1)
        hooks = [{"name": f"{n}.tangram.sh", "clientConfig": {"service": {}}} for n in ("pods", "more")]
        self.store(PLACES.configuration_path, {"webhooks": hooks})

    def store(self, path: str, thing: dict[str, Any]) -> None:
        thing["metadata"] = thing.get("metadata", {}) | {"resourceVersion": str(next(self._versions))}
        self.objects[path] = thing

    async def get(self, path: str) -> bytes:
        await asyncio.sleep(0)
        self.calls["GET"] += 1
        if path not in self.objects:
            raise ApiError(404, "NotFound", "no such object", verb="GET", path=path)
        return msgspec.json.encode(self.objects[path])

    async def send(self, method: str, path: str, body: Any = None, *, content_type: str = "") -> bytes:
        await asyncio.sleep(0)
        self.calls[method] += 1
        if method == "PATCH":
            assert content_type == "application/json-patch+json"
            for op in body:
                _, _, index, *rest = op["path"].split("/")
                hook = self.objects[path]["webhooks"][int(index)]
                if op["op"] == "test":
                    assert hook["name"] == op["value"]
                else:
                    assert rest == ["clientConfig", "caBundle"]
                    hook["clientConfig"]["caBundle"] = op["value"]
            return b"{}"
        path = f"{path}/{body['metadata']['name']}" if method == "POST" else path
        there = self.objects.get(path, {}).get("metadata", {}).get("resourceVersion")
        if there != body["metadata"].get("resourceVersion"):
            raise ApiError(409, "Conflict", "changed meanwhile", verb=method, path=path)
        self.store(path, msgspec.json.decode(msgspec.json.encode(body)))
        return b"{}"


class DateClock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def keeper_of(api: FakeSecretApi, clock: DateClock) -> tuple[SecretKeeper, ServingContext, Metrics]:
    metrics = Metrics()
    serving = ServingContext(metrics)
    return SecretKeeper(api, PLACES, serving, clock), serving, metrics


async def test_two_replicas_that_start_together_serve_one_certificate() -> None:
    api, clock = FakeSecretApi(), DateClock()
    (one, first, _), (two, second, _) = keeper_of(api, clock), keeper_of(api, clock)
    await asyncio.gather(one.once(), two.once())
    secret = api.objects[PLACES.secret_path]["data"]
    assert first._in_use == second._in_use == (base64.b64decode(secret[CERT]), base64.b64decode(secret[KEY]))
    assert api.calls["POST"] == 2
    for hook in api.objects[PLACES.configuration_path]["webhooks"]:
        assert hook["clientConfig"]["caBundle"] == secret[CA_CERT]


async def test_a_round_with_nothing_due_writes_nothing() -> None:
    api, clock = FakeSecretApi(), DateClock()
    keeper, _, _ = keeper_of(api, clock)
    await keeper.once()
    before = api.calls.copy()
    await keeper.once()
    assert api.calls - before == {"GET": 2}


async def test_an_empty_secret_from_the_chart_is_filled_and_a_lost_bundle_is_written_again() -> None:
    api, clock = FakeSecretApi(), DateClock()
    api.store(PLACES.secret_path, {"metadata": {"name": "certs"}, "type": "Opaque"})
    keeper, serving, _ = keeper_of(api, clock)
    await keeper.once()
    assert serving.loaded.is_set()
    for hook in api.objects[PLACES.configuration_path]["webhooks"]:
        del hook["clientConfig"]["caBundle"]
    await keeper.once()
    assert all("caBundle" in hook["clientConfig"] for hook in api.objects[PLACES.configuration_path]["webhooks"])


@pytest.mark.parametrize("left", [None, {"metadata": {"name": "certs"}, "type": "Opaque"}], ids=["deleted", "emptied"])
async def test_a_secret_that_is_lost_is_made_again_with_what_is_served_so_that_no_replica_is_distrusted(
    left: dict[str, Any] | None,
) -> None:
    api, clock = FakeSecretApi(), DateClock()
    (one, first, _), (two, second, _) = keeper_of(api, clock), keeper_of(api, clock)
    await asyncio.gather(one.once(), two.once())
    before, served = api.objects.pop(PLACES.secret_path)["data"], first._in_use
    if left is not None:
        api.store(PLACES.secret_path, left)
    await asyncio.gather(two.once(), one.once())
    assert api.objects[PLACES.secret_path]["data"] == before
    assert api.objects[PLACES.secret_path]["metadata"]["name"] == "certs"
    assert first._in_use == second._in_use == served
    assert all(
        hook["clientConfig"]["caBundle"] == before[CA_CERT]
        for hook in api.objects[PLACES.configuration_path]["webhooks"]
    )


async def test_both_replicas_take_the_renewed_certificate_into_use() -> None:
    api, clock = FakeSecretApi(), DateClock()
    (one, first, metrics), (two, second, _) = keeper_of(api, clock), keeper_of(api, clock)
    await one.once()
    await two.once()
    old = first._in_use
    clock.now += 61 * DAY
    await asyncio.gather(two.once(), one.once())
    assert first._in_use == second._in_use != old
    assert metrics.registry.get_sample_value("tangram_webhook_certificate_loads_total") == 2


async def test_a_round_that_fails_is_counted_and_what_is_served_stays() -> None:
    api, clock = FakeSecretApi(), DateClock()
    keeper, serving, metrics = keeper_of(api, clock)
    await keeper.once()
    in_use = serving._in_use
    del api.objects[PLACES.configuration_path]
    clock.now += 61 * DAY
    rounds = itertools.count()

    async def twice(_: float) -> None:
        if next(rounds) == 1:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await keep(keeper, metrics, 1.0, sleep=twice)
    assert serving._in_use == in_use
    assert metrics.registry.get_sample_value("tangram_webhook_certificate_failures_total") == 2


async def test_files_that_change_are_taken_into_use_and_halves_are_not(tmp_path: Path) -> None:
    serving = ServingContext(Metrics())
    keeper = FileKeeper(tmp_path, serving)
    with pytest.raises(BadDocument, match=r"must contain tls\.crt and tls\.key"):
        await keeper.once()
    first, second = renewed({}, NAMES, datetime.now(UTC)), renewed({}, NAMES, datetime.now(UTC))
    for name in (CERT, KEY):
        (tmp_path / name).write_bytes(first[name])
    await keeper.once()
    (tmp_path / CERT).write_bytes(second[CERT])
    with pytest.raises(BadDocument, match="cannot be used"):
        await keeper.once()
    assert serving._in_use == (first[CERT], first[KEY])
    (tmp_path / KEY).write_bytes(second[KEY])
    await keeper.once()
    assert serving._in_use == (second[CERT], second[KEY])
