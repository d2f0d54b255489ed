"""What operators and the kubelet see of a program over HTTP."""

from __future__ import annotations

import socket

import pytest
from prometheus_client import CollectorRegistry, Counter

from observe.pages import COMMIT_ENV, Pages, build_registry
from observe.ports import listen


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("tangram_example_things", "Things.", registry=made).inc()
    return made


def test_metrics_are_the_registry_in_prometheus_text() -> None:
    page = Pages(registry()).get("/metrics")
    assert (page.status, page.content_type.split(";")[0]) == (200, "text/plain")
    assert b"tangram_example_things_total 1.0\n" in page.body


def test_every_program_exports_its_version_and_the_commit_of_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pages(registry()).get("/metrics").body.count(b"\ntangram_build_info{") == 1
    monkeypatch.setenv(COMMIT_ENV, "5e4b3d8")
    (sample,) = [sample for family in build_registry().collect() for sample in family.samples]
    assert (sample.name, sample.value, sample.labels["commit"]) == ("tangram_build_info", 1, "5e4b3d8")
    assert sample.labels["version"]


def test_a_healthy_program_answers_ok() -> None:
    assert [Pages(registry()).get(path).body for path in ("/healthz", "/readyz")] == [b"ok\n", b"ok\n"]


def test_one_that_is_not_ready_is_alive_and_names_what_is_missing() -> None:
    pages = Pages(registry(), not_ready=lambda: "no certificate")
    assert (pages.get("/readyz").status, pages.get("/readyz").body) == (503, b"no certificate\n")
    assert pages.get("/healthz").status == 200


def test_one_that_is_stuck_is_neither_alive_nor_ready() -> None:
    pages = Pages(registry(), not_ready=lambda: None, not_alive=lambda: "stuck")
    assert [pages.get(path).status for path in ("/healthz", "/readyz")] == [503, 503]


def test_another_path_is_reported_which_there_are() -> None:
    page = Pages(registry()).get("/")
    assert page.status == 404
    assert b"/metrics, /healthz, /readyz" in page.body


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}: "):
            listen("127.0.0.1", port)
