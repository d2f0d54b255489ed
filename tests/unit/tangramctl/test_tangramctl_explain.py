"""Why a pod is pending, from a snapshot, from an extender, and from what kubectl reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tangramctl.cluster import UNREADABLE, complaint
from tangramctl.explain import STANDING, free_text, met_webhook
from tangramctl.help_texts import EXPLAIN
from tests.builders import gpu, node, pod
from tests.contract.webhook.pairs import INPUTS, answer, load
from tests.unit.tangramctl.explained import admitted, cluster, explain, files, held, of_files
from vgpu.api.names import DEFAULT
from vgpu.scheduling.explain import Nearest
from vgpu.scheduling.placement import (
    NO_INVENTORY,
    NO_SINGLE_GPU,
    TOO_FEW,
    TOO_LARGE,
)
from vgpu.scheduling.snapshot import POD_STAGES, snapshot_to_json

__all__ = ["files"]

FULL_MIB = 81_920
PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/tangramctl.md").read_text()


def test_a_pending_pod_has_a_table_and_exit_code_3(files: Path) -> None:
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=50 * 1024)))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert code == 3
    assert output.startswith("pod default/p requests 50 GiB of one GPU and fits no node\n")
    assert f"  2 nodes: {NO_SINGLE_GPU}\n" in output
    (line,) = [line for line in output.splitlines() if line.startswith("n2")]
    assert "40 GiB, 10 %" in line
    assert "10 GiB " in line


def test_the_number_of_gpus_requested_and_missing_is_shown(files: Path) -> None:
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=9 * 1024).annotated(gpu_count="3")))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert code == 3
    assert output.startswith("pod default/p requests 3 GiB of each of 3 GPUs and fits no node\n")
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert "  1 GPU  " in lines["n1"]
    assert "  2 GPUs  " in lines["n2"]
    assert lines["n1"].endswith(TOO_FEW)
    (files / "pod.json").write_bytes(admitted(pod("p").asking(gpus=3)))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert output.startswith("pod default/p requests 3 whole GPUs and fits no node\n")


def test_conditions_that_no_gpu_meets_stand_beside_what_there_is(files: Path) -> None:
    asking = pod("p").asking(mib=1024).annotated(gpu_model="H200", gpu_uuid="GPU-1")
    (files / "pod.json").write_bytes(admitted(asking))
    _, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert "\n  only GPUs of model H200\n  only GPUs GPU-1\n" in output
    (line,) = [line for line in output.splitlines() if line.startswith("n1")]
    assert f"none of {gpu(0).model} " in line


def test_one_that_would_fit_has_exit_code_0_and_a_document(files: Path) -> None:
    code, output, _ = explain("default/p", *of_files(files, "fits.json"), "--json")
    document = json.loads(output)
    assert (code, document["placed"], document["fits"]) == (0, False, True)
    assert document["nodes"][0]["node"] == "n1"
    assert document["why_not"] == {NO_INVENTORY: 1}


def test_a_placed_pod_is_shown_with_its_node(files: Path) -> None:
    code, output, _ = explain("default/c", "--snapshot", str(files / "snapshot.json"))
    assert code == 0
    assert output.startswith("pod default/c: it is bound to node n2\n")
    assert f"{gpu(0, node='n2').uuid}: 40 GiB, 90 %\n" in output
    _, output, _ = explain("default/a", "--snapshot", str(files / "snapshot.json"))
    assert output.endswith(": 60 GiB\n")


def test_every_stage_of_a_snapshot_has_words() -> None:
    assert set(STANDING) == set(POD_STAGES)


def test_a_pod_requests_what_was_written_and_no_more(files: Path) -> None:
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=200 * 1024, core=30)))
    _, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert output.startswith("pod default/p requests 200 GiB and 30 % of one GPU and fits no node\n")
    assert f"  3 nodes: {TOO_LARGE} (200 GiB requested, the largest allowed there has 80 GiB)\n" in output
    asking = pod("p").asking(mib=200 * 1024).annotated(gpu_model="H200")
    (files / "pod.json").write_bytes(admitted(asking))
    _, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert f"  3 nodes: {TOO_LARGE}\n" in output


def test_what_a_pod_may_use_above_its_guarantee_is_shown_and_placement_counts_the_guarantee(files: Path) -> None:
    asking = pod("p").asking(mib=8192, core=30).asking(mib=1024, container="side").annotated(gpu_core_burst="100")
    asking = asking.annotated(**{"gpu_mem_burst": "400Gi", "gpu_mem_burst.side": "max"})
    (files / "pod.json").write_bytes(admitted(asking))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert code == 0
    first, second = output.splitlines()[1:3]
    assert first.startswith("  container main may burst to 400 GiB and 100 % of a GPU, if ")
    assert second.startswith("  container side may burst to all that is not guaranteed to others of a GPU, if ")
    _, output, _ = explain("default/p", *of_files(files, "pod.json"), "--json")
    assert json.loads(output)["bursts"]["main"] == {"mib": 400 * 1024, "core_percent": 100, "wait_s": 30}
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=8192).annotated(gpu_mem_burst="1Gi")))
    code, _, error = explain("default/p", *of_files(files, "pod.json"))
    assert code == 2
    assert "pod default/p: annotation tangram.sh/gpu-mem-burst is 1Gi, which is 1024 MiB" in error


def test_where_limits_have_a_bound_the_reason_has_figures(files: Path) -> None:
    document = json.loads((files / "snapshot.json").read_text())
    (files / "snapshot.json").write_text(json.dumps(document | {"v": 5, "overcommit": 1.0}))
    two = pod("p").asking(mib=8192).asking(mib=1024, container="side")
    (files / "pod.json").write_bytes(
        admitted(two.annotated(**{"gpu_mem_burst": "400Gi", "gpu_mem_burst.side": "400Gi"}))
    )
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert code == 3
    assert "; the limits on a GPU may add up to 1 times its memory (burst.overcommit)\n" in output
    assert "MiB with this pod: 81920 MiB at most (burst.overcommit 1)" in output.replace("\n", " ")


def test_one_that_fits_and_waits_is_shown_with_other_reasons(files: Path) -> None:
    code, output, _ = explain("default/p", *of_files(files, "fits.json"))
    assert code == 0
    assert output.startswith(
        "pod default/p requests 8 GiB of one GPU and fits 3 of 4 nodes: the scheduler has other reasons\n"
    )


def test_one_that_never_met_the_webhook_is_shown_with_its_scheduler(files: Path) -> None:
    asking = replace(pod("p").asking(mib=8192), scheduler="default-scheduler").plain()
    asking["spec"]["containers"][0]["resources"] = {"limits": {DEFAULT.gpu_mem: "8Gi"}}
    (files / "pod.json").write_text(json.dumps(asking))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    first, second = output.splitlines()[:2]
    assert (code, first) == (0, "pod default/p requests 8 GiB of one GPU and fits 3 of 4 nodes")
    assert second.startswith("  it never met Tangram's webhook, ")
    assert "its scheduler is default-scheduler: delete it and create it anew" in second
    _, output, _ = explain("default/p", *of_files(files, "pod.json"), "--json")
    assert json.loads(output)["met_webhook"] is False


def test_the_webhooks_pods_are_reported_from_those_that_never_met_it() -> None:
    reported = []
    for file in INPUTS:
        before, rules = load(file)
        after = answer(before, rules)[0]
        if "denied" not in after and after != before:
            reported.append((met_webhook(before, rules.names), met_webhook(after, rules.names), file.name))
    assert len(reported) > 20
    assert [name for early, late, name in reported if early or not late] == []


def test_one_that_has_ended_is_shown_as_ended(files: Path) -> None:
    (files / "pod.json").write_bytes(admitted(pod("p").asking(mib=8192).on("n1").with_phase("Succeeded")))
    code, output, _ = explain("default/p", *of_files(files, "pod.json"))
    assert (code, output) == (0, "pod default/p has ended (Succeeded): it has no GPU and waits for none\n")
    code, output, _ = explain("default/p", *of_files(files, "pod.json"), "--json")
    assert (code, json.loads(output)) == (0, {"pod": "default/p", "placed": False, "ended": "Succeeded"})


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["p"], "the pod is 'p': it must be NAMESPACE/NAME"),
        (["a/b/c"], "it must be NAMESPACE/NAME"),
        (["default/p", "FILES", "plain.json"], "requests no resource of tangram.sh"),
        (["default/p", "FILES", "bad.json"], "gpu-core without tangram.sh/gpu-mem"),
        (["default/p", "FILES", "list.json"], "it must be one Pod"),
        (["default/p", "FILES", "none.json"], "none.json: No such file"),
        (["default/p", "--snapshot", "/none"], "--snapshot /none: No such file"),
        (["default/p", "--extender", "file:///etc/passwd"], "it must be a URL such as"),
    ],
)
def test_what_cannot_be_answered_is_a_sentence_and_exit_code_2(files: Path, words: list[str], output: str) -> None:
    if "FILES" in words:
        words = [words[0], *of_files(files, words[2])]
    code, _, wrong = explain(*words)
    assert (code, output in wrong) == (2, True), wrong


def test_a_snapshot_of_a_newer_version_is_refused(files: Path) -> None:
    (files / "snapshot.json").write_text('{"v": 6}')
    code, _, wrong = explain("default/p", *of_files(files, "pod.json"))
    assert (code, "snapshot is of version 6" in wrong) == (2, True)


@pytest.fixture
def extender() -> Iterator[str]:
    """Answers GET /snapshot."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = snapshot_to_json(cluster()) if self.path == "/snapshot" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_extender_is_requested_first(extender: str, files: Path) -> None:
    code, _, wrong = explain("default/p", "--extender", extender, "--pod", str(files / "fits.json"))
    assert (code, wrong) == (0, "")


def test_without_an_extender_the_api_is_read(extender: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(name: str, document: object) -> None:
        (tmp_path / name).write_text(json.dumps(document))

    answer("nodes", {"items": [node("n1").with_gpus(1).plain(), node("n2").with_text("{").plain()]})
    answer("pods", {"items": [held("a", "n1", 0, 60).plain(), pod("p").asking(mib=35 * 1024).plain()]})
    answer("pod", pod("p").asking(mib=35 * 1024).plain())
    fake = tmp_path / "kubectl"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec cat {tmp_path}/$2\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nowhere = "http://127.0.0.1:1"
    code, output, reported = explain("default/p", "--extender", nowhere, "--json")
    assert code == 3
    assert json.loads(output)["why_not"] == {UNREADABLE: 1, NO_SINGLE_GPU: 1}
    assert reported.startswith(f"no extender at {nowhere}: reading the API")
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "get pod p -n default -o json"


NO_CLUSTER = (
    'E1121 18:22:01.123456    4711 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list: refused"\n'
    * 3
    + "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n"
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            NO_CLUSTER,
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
        ),
        ('Error from server (NotFound): pods "p" not found\n', 'Error from server (NotFound): pods "p" not found'),
        ("E1121 18:22:01.1 7 a.go:1] nothing else\n", "E1121 18:22:01.1 7 a.go:1] nothing else"),
        ("", "exit code 1"),
    ],
)
def test_what_kubectl_complains_of_is_one_sentence(text: str, sentence: str) -> None:
    assert complaint(text, 1) == sentence


def test_an_api_that_does_not_answer_has_the_exit_code_that_page_and_help_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "complaint").write_text(NO_CLUSTER)
    fake = tmp_path / "kubectl"
    fake.write_text(f"#!/bin/sh\ncat {tmp_path}/complaint >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    code, _, wrong = explain("default/p", "--extender", "http://127.0.0.1:1")
    assert (code, wrong.splitlines()[-1]) == (2, f"tangramctl: kubectl get nodes: {NO_CLUSTER.splitlines()[-1]}")
    assert re.search(r"2: [^;]*\bAPI\b[^;]*; 127: ", EXPLAIN)
    (line,) = re.findall(r"^Exit code 3: it fits no node\. 2: ([^;]*); 127: ", PAGE, re.MULTILINE)
    assert "the API does not" in line


def test_a_gpu_with_more_assigned_than_it_has_is_reported() -> None:
    assert free_text(Nearest("u", 0, "m", 1, -30720, 40, 1, 0)) == "0 MiB (30 GiB too much is granted), 40 %"
    assert free_text(Nearest("u", 0, "m", 1, 512, -5, 1, 0)) == "512 MiB, 0 % (5 % too much is granted)"


def test_without_kubectl_the_error_names_the_options_to_use(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(files))
    code, _, wrong = explain("default/p", "--snapshot", str(files / "snapshot.json"))
    assert (code, "kubectl is not in PATH" in wrong) == (127, True)
