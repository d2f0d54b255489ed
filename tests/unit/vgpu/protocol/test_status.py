"""The status document: what a reader of version 1 may rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vgpu.api.errors import BadDocument, NewerVersion
from vgpu.protocol.status import (
    BypassStatus,
    ContainerStatus,
    GpuStatus,
    GpuTimeStatus,
    KillStatus,
    ProcessGpu,
    ProcessStatus,
    SensorStatus,
    StatusDocument,
    SwapStatus,
    UnenforcedStatus,
    UngrantedStatus,
    UnlistedStatus,
    decode_status,
    encode_status,
)

UUID = "GPU-00000000-0000-0000-0000-000000000001"
TEXT = """
{"containers": [{"key": "0a", "pod": "default/a", "uid": "u", "container": "main", "class": "standard", "level": 2,
  "guard": "kill", "over": true,
  "cards": [{"uuid": "%s", "limit_bytes": 100, "core_percent": 30, "leased_bytes": 50, "used_bytes": 40, "context_bytes": 9,
    "shared_bytes": 0, "guarantee_bytes": 60, "away_bytes": 20, "elastic_bytes": 30, "core_limit_percent": 0}],
  "processes": [{"pid": 7, "pid_in_container": 1, "command": "python train.py",
    "cards": [{"uuid": "%s", "used_bytes": 40, "context_bytes": 9, "measured_bytes": 39, "managed_bytes": 10}]}],
  "turn": {"on": true, "working": true, "processes": 1, "asked_percent": 30, "on_s": 1.5, "off_s": 0.25, "capped_s": 3.0,
    "suspends": 40, "trouble": "", "mode": "suspend", "heals": 0, "clearing_s": 0.0,
    "suspended_s": 0.0, "arrivals": 0, "credit_s": 0.0, "untold": false, "stopped": false, "seen_s": null, "resumes": 0,
    "limit_percent": 0, "burst_s": 0.0},
  "memory_state": "enforced", "gpu_time_state": "unenforced",
  "unenforced": [{"reason": "no-channels", "limits": ["gpu-time"], "pids": [7]}],
  "bypasses": [{"gpu": "%s", "pids": [8], "held_bytes": 150, "limit_bytes": 100, "policy": "kill"}],
  "swap": {"paused": true, "paused_s": 2.5, "why": "moves to host memory", "direction": "out", "waiting": 1, "unable": "u", "over_limit": "late",
    "over_limit_action": "kill", "stranded": "no room", "stranded_action": "evict", "no_pool": "p", "pool_full": "f"}}],
 "version": 1,
 "kills": [{"id": "9-100", "uid": "u", "pod": "default/a", "container": "main", "gpu": "%s", "pid": 9, "command": "python train.py",
   "held_bytes": 150, "limit_bytes": 100, "bypass": true, "whole": true, "reason": ""}],
 "ungranted": [{"gpu": "%s", "pid": 5, "command": "python other.py", "held_bytes": 60, "pod": "v"}],
 "unlisted": [{"gpu": "%s", "held_bytes": 70, "used_bytes": 170, "uid": "u", "pod": "default/a", "container": "main", "pids": [6]}],
 "sensors": [{"uuid": "%s", "heat": "hot", "temperature_c": 70, "headroom_c": 17, "power_mw": 690000, "power_limit_mw": 700000, "sm_clock_mhz": 1599,
   "sm_clock_max_mhz": 1980, "slowdowns": ["sw_power_cap"], "link_errors": 7}]}
""" % (UUID, UUID, UUID, UUID, UUID, UUID, UUID)  # noqa: UP031
STATUS = StatusDocument(
    (
        ContainerStatus(
            key="0a", pod="default/a", uid="u", container="main", service_class="standard", level=2, over_limit_action="kill", over=True,
            gpus=(GpuStatus(UUID, 100, 30, 50, 40, 9, guarantee_bytes=60, away_bytes=20, elastic_bytes=30),),
            processes=(ProcessStatus(7, 1, "python train.py", (ProcessGpu(UUID, 40, 9, 39, 10),)),),
            gpu_time=GpuTimeStatus(True, True, 1, 30, 1.5, 0.25, 3.0, 40, ""),
            gpu_time_state="unenforced",
            unenforced=(UnenforcedStatus("no-channels", ("gpu-time",), (7,)),),
            bypasses=(BypassStatus(UUID, (8,), 150, 100, "kill"),),
            swap=SwapStatus(True, 2.5, "moves to host memory", "out", 1, "u", "late", "kill", "no room", "evict", "p", "f"),
        ),
    ),
    kills=(KillStatus("9-100", "u", "default/a", "main", UUID, 9, "python train.py", 150, 100, bypass=True, whole=True),),
    ungranted=(UngrantedStatus(UUID, 5, "python other.py", 60, "v"),),
    unlisted=(UnlistedStatus(UUID, 70, 170, "u", "default/a", "main", (6,)),),
    sensors=(SensorStatus(UUID, "hot", 70, 17, 690_000, 700_000, 1599, 1980, ("sw_power_cap",), 7),),
)  # fmt: skip


def names(value: object) -> object:
    """The document without its values."""
    if isinstance(value, list):
        return [names(value[0])]
    return {key: names(one) for key, one in value.items()} if isinstance(value, dict) else None


def test_the_reference_page_shows_every_field() -> None:
    page = (Path(__file__).parents[4] / "docs/reference/protocol.md").read_text()
    (shown,) = (text for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if '"containers"' in text)
    assert names(json.loads(shown)) == names(json.loads(encode_status(STATUS)))


def test_the_document_keeps_its_form() -> None:
    assert json.loads(encode_status(STATUS)) == json.loads(TEXT)
    assert decode_status(TEXT.encode()) == STATUS


def test_a_reader_passes_over_fields_it_does_not_know() -> None:
    later = json.loads(TEXT) | {"node": "n1"}
    later["containers"][0]["cards"][0]["temperature"] = 40
    assert decode_status(json.dumps(later).encode()) == STATUS


def test_a_later_version_is_refused_by_its_number() -> None:
    with pytest.raises(NewerVersion, match="version 2: this Tangram reads up to version 1"):
        decode_status(TEXT.replace('"version": 1', '"version": 2').encode())
    with pytest.raises(BadDocument, match="version 0: versions are 1 to 1"):
        decode_status(TEXT.replace('"version": 1', '"version": 0').encode())


def test_a_document_cut_off_anywhere_is_refused() -> None:
    whole = encode_status(STATUS)
    for length in range(len(whole)):
        with pytest.raises(BadDocument, match=f"status document of {length} bytes cannot be read"):
            decode_status(whole[:length])


@given(st.binary(max_size=200))
def test_whatever_comes_instead_is_a_bad_document(noise: bytes) -> None:
    with pytest.raises(BadDocument):
        decode_status(noise)
