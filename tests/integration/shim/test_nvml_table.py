"""Every function of nvml.h has a line in shim/src/views/nvml.def, and the library answers by that line."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.integration.shim.conftest import ROOT, Stage, wait_for
from tests.integration.shim.nvml_kit import HEADERS, LOST, build_double, fields, functions, table

PAGE = ROOT / "docs/reference/nvml.md"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INSUFFICIENT_SIZE = 3, 4, 6, 7
SHARED, OTHER, LOST_GPU, STRANGE = 1, 2, 3, 4


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_double(tmp_path_factory.mktemp("nvml"))


def request(stage: Stage, double: Path, program: str, **env: str) -> Any:
    """What a program that has the double as `n` prints as JSON."""
    libraries = f"{double}:{stage.build / 'fake'}"
    begin = "import ctypes, json\nn = ctypes.CDLL('libnvidia-ml.so.1')\nref = ctypes.byref\n"
    return json.loads(stage.python(begin + program, LD_LIBRARY_PATH=libraries, **env))


def call_all(stage: Stage, double: Path, names: list[str], device: int, **env: str) -> dict[str, tuple[int, int]]:
    """What each function answers, and how often it was the driver's."""
    answers: dict[str, list[int]] = request(
        stage,
        double,
        f"names, device = {names!r}, ctypes.c_void_p({device})\n"
        "buffer = ctypes.create_string_buffer(4096)\n"
        "print(json.dumps({name: [getattr(n, name)(device, buffer, buffer, buffer, buffer, buffer), n.double_calls()] for name in names}))",
        **env,
    )
    return {name: (rc, calls) for name, (rc, calls) in answers.items()}


def with_rule(rule: str, scope: str) -> list[str]:
    return sorted(name for name, line in table().items() if line == (rule, scope))


def test_there_is_a_header_to_compare_with() -> None:
    assert HEADERS
    assert len(functions()) > 400


def test_every_function_of_the_header_has_a_line() -> None:
    assert sorted(functions().keys() - table().keys()) == []


def test_every_line_is_of_a_function_of_the_newest_header() -> None:
    assert sorted(table().keys() - functions().keys()) == []


def test_a_function_of_a_newer_header_is_noticed() -> None:
    more = "nvmlReturn_t nvmlDeviceGetNeighbours(nvmlDevice_t device);\n"
    assert functions(more).keys() - table().keys() == {"nvmlDeviceGetNeighbours"}


@pytest.mark.parametrize("rule", ["REFUSED", "DENIED"])
def test_scopes_and_registers_are_as_the_header_has_them(rule: str) -> None:
    for name, line in table().items():
        if line.rule != rule:
            continue
        parameters = functions()[name]
        assert (line.scope == "DEVICE") == parameters[0].startswith("nvmlDevice_t "), name
        assert len(parameters) <= 6, name
        for parameter in parameters:
            assert "*" in parameter or re.match(r"(unsigned|int|nvml(?!Value_t)\w+)\b", parameter), (name, parameter)
            assert not re.search(r"\b(float|double)\b", parameter), (name, parameter)


def test_what_sets_or_resets_is_denied_or_changes_nothing_of_the_gpu() -> None:
    changes = re.compile(r"(Set|Reset|Clear|Create|Destroy|Freeze|Modify|Remove|Force|Lock|Update|Activate)(?=[A-Z])")
    own = {"nvmlDeviceSetCpuAffinity", "nvmlDeviceClearCpuAffinity"}  # of the calling thread
    for name, line in table().items():
        what = re.sub(r"EventSet|ResetStatus", "", name)
        if changes.search(what) and not re.match(r"nvml[A-Za-z]*Get", what) and name not in own:
            assert line.rule == "DENIED", name


@pytest.mark.parametrize(("rule", "answer"), [("REFUSED", NOT_SUPPORTED), ("DENIED", NO_PERMISSION)])
def test_functions_of_a_gpu_are_refused_for_the_shared_one_alone(
    stage: Stage, double: Path, rule: str, answer: int
) -> None:
    names = with_rule(rule, "DEVICE")
    assert len(names) > 30
    assert call_all(stage, double, names, SHARED) == dict.fromkeys(names, (answer, 0))
    assert call_all(stage, double, names, OTHER) == dict.fromkeys(names, (0, 1))
    assert call_all(stage, double, names, LOST_GPU) == dict.fromkeys(names, (LOST, 0))
    assert call_all(stage, double, names, STRANGE) == dict.fromkeys(names, (NOT_SUPPORTED, 0))


@pytest.mark.parametrize(("rule", "answer"), [("REFUSED", NOT_SUPPORTED), ("DENIED", NO_PERMISSION)])
def test_functions_that_name_no_gpu_are_refused_to_every_container_with_a_share(
    stage: Stage, double: Path, rule: str, answer: int
) -> None:
    names = with_rule(rule, "ANYWHERE")
    assert len(names) > 10
    assert call_all(stage, double, names, OTHER) == dict.fromkeys(names, (answer, 0))


def test_without_a_grant_the_driver_answers_everything(stage: Stage, double: Path) -> None:
    names = sorted(name for name, line in table().items() if line.rule in {"REFUSED", "DENIED"})
    assert call_all(stage, double, names, SHARED, TANGRAM_GRANT="") == dict.fromkeys(names, (0, 1))


def test_with_a_grant_that_cannot_be_read_every_gpu_is_a_shared_one(stage: Stage, double: Path) -> None:
    stage.write_grant("nonsense")
    for rule, answer in (("REFUSED", NOT_SUPPORTED), ("DENIED", NO_PERMISSION)):
        names = with_rule(rule, "DEVICE")
        assert call_all(stage, double, names, OTHER) == dict.fromkeys(names, (answer, 0))


def test_what_passes_is_the_drivers(stage: Stage, double: Path) -> None:
    names = sorted(name for name, line in table().items() if line.rule == "PASSES" and name != "nvmlDeviceGetUUID")
    assert call_all(stage, double, names, SHARED) == dict.fromkeys(names, (0, 1))


def test_a_function_of_a_later_version_is_the_drivers(stage: Stage, double: Path) -> None:
    assert call_all(stage, double, ["nvmlDeviceGetNeighbours"], SHARED) == {"nvmlDeviceGetNeighbours": (0, 1)}


USE = r"BANDWIDTH|THROUGHPUT|(XMIT|RCV)_(PACKETS|BYTES)$|PCIE_COUNT_[TR]X_BYTES|SYNC_BALANCING|PLR_XMIT|MMA_STALL"
FIELDS = """
class Field(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("scope", ctypes.c_uint), ("at", ctypes.c_longlong), ("took", ctypes.c_longlong),
                ("type", ctypes.c_int), ("rc", ctypes.c_int), ("value", ctypes.c_ulonglong)]
asked = range(0, 400)
all = (Field * len(asked))(*[Field(id=i) for i in asked])
assert n.nvmlDeviceGetFieldValues(ctypes.c_void_p({device}), len(asked), all) == 0
print(json.dumps({{f.id: [f.rc, f.value] for f in all}}))
"""


def test_fields_that_count_use_are_refused_and_health_power_and_clocks_pass(stage: Stage, double: Path) -> None:
    answers = {int(number): answer for number, answer in request(stage, double, FIELDS.format(device=SHARED)).items()}
    passed = {number for number, answer in answers.items() if answer == [0, 7]}
    assert {tuple(answers[number]) for number in answers.keys() - passed} == {(NOT_SUPPORTED, 0)}
    assert passed == {number for number, name in fields().items() if not re.search(USE, name)}
    assert set(map(tuple, request(stage, double, FIELDS.format(device=OTHER)).values())) == {(0, 7)}


def test_samples_of_power_and_clocks_pass_and_those_of_use_do_not(stage: Stage, double: Path) -> None:
    program = (
        "print(json.dumps([n.nvmlDeviceGetSamples(ctypes.c_void_p(1), i, 0, None, None, None) for i in range(12)]))"
    )
    passing = {0, 5, 6, 7}
    assert request(stage, double, program) == [0 if kind in passing else NOT_SUPPORTED for kind in range(12)]


def test_xids_are_neither_offered_nor_registered_for_and_other_events_are(stage: Stage, double: Path) -> None:
    program = """
types = ctypes.c_ulonglong()
def register(device, types): return n.nvmlDeviceRegisterEvents(ctypes.c_void_p(device), ctypes.c_ulonglong(types), None)
assert n.nvmlDeviceGetSupportedEventTypes(ctypes.c_void_p(1), ref(types)) == 0
config = lambda uuid: ctypes.create_string_buffer(uuid.encode(), 128)
structured = lambda uuid: n.nvmlEventSetRegisterGpuOperationalEvents_v1(None, config(uuid))
uuid = "GPU-0000000{0}-aaaa-bbbb-cccc-00000000000{0}".format
print(json.dumps([types.value, register(1, 0x8), register(1, 0xa), register(1, 0x12), register(2, 0x8),
                  structured(uuid(0)), structured(uuid(1)), structured("")]))
"""
    offered, *answers = request(stage, double, program)
    assert offered == 0xFF97
    assert answers == [NOT_SUPPORTED, NOT_SUPPORTED, 0, 0, NOT_SUPPORTED, 0, NOT_SUPPORTED]


def test_gpm_is_not_offered(stage: Stage, double: Path) -> None:
    program = """
support = (ctypes.c_uint * 2)(1, 9)
answer = lambda device: [n.nvmlGpmQueryDeviceSupport(ctypes.c_void_p(device), support), support[1]]
print(json.dumps([answer(1), answer(2)]))
"""
    assert request(stage, double, program) == [[0, 0], [0, 1]]


def test_a_process_that_is_not_in_the_containers_proc_has_no_name(stage: Stage, double: Path) -> None:
    program = """
import os
name = ctypes.create_string_buffer(64)
print(json.dumps([n.nvmlSystemGetProcessName(pid, name, 64) for pid in (os.getpid(), 4000001)]))
"""
    assert request(stage, double, program) == [0, NOT_FOUND]


BY_PROCESS = """
from ctypes import c_uint, c_ulonglong, c_void_p
device, few, many = c_void_p(1), c_uint(0), c_uint(8)
buffer = ctypes.create_string_buffer(4096)
class All(ctypes.Structure):
    _fields_ = [("version", c_uint), ("count", c_uint), ("since", c_ulonglong), ("to", c_void_p)]
class Details(ctypes.Structure):
    _fields_ = [("version", c_uint), ("mode", c_uint), ("count", c_uint), ("to", c_void_p)]
pid_at = lambda at: int.from_bytes(buffer.raw[at:at + 4], "little")
none, all = All(1, 0, 0, None), All(1, 8, 0, ctypes.addressof(buffer))
no_details, details = Details(1, 0, 0, None), Details(1, 0, 8, ctypes.addressof(buffer))
print(json.dumps([
    [n.nvmlDeviceGetProcessUtilization(device, None, ref(few), c_ulonglong(0)), few.value],
    [n.nvmlDeviceGetProcessUtilization(device, buffer, ref(many), c_ulonglong(0)), many.value, pid_at(0)],
    [n.nvmlDeviceGetProcessesUtilizationInfo(device, ref(none)), none.count],
    [n.nvmlDeviceGetProcessesUtilizationInfo(device, ref(all)), all.count, pid_at(8)],
    [n.nvmlDeviceGetRunningProcessDetailList(device, ref(no_details)), no_details.count],
    [n.nvmlDeviceGetRunningProcessDetailList(device, ref(details)), details.count, pid_at(0)],
]))
"""


def test_lists_by_process_reveal_nothing_about_the_number_of_others(measured: Stage, double: Path) -> None:
    mine = measured.worker()
    own = {"OWN_PID": str(mine.pid)}
    wait_for(lambda: request(measured, double, BY_PROCESS, **own)[0] == [INSUFFICIENT_SIZE, 1], seconds=20)
    one, reported = [INSUFFICIENT_SIZE, 1], [0, 1, mine.pid]
    assert request(measured, double, BY_PROCESS, **own) == [one, reported] * 3
    theirs = request(measured, double, BY_PROCESS, OWN_PID="4100000")
    assert [answer[:2] for answer in theirs] == [[NOT_FOUND, 0]] * 4 + [[0, 0]] * 2


ENGINES = """
pair = ctypes.c_uint * 2
def of(name):
    buffer = pair(0, 0)
    second = ctypes.c_uint()
    rc = getattr(n, name)(ctypes.c_void_p(1), buffer, ref(second))
    return [rc, *buffer]
names = ["UtilizationRates", "EncoderUtilization", "DecoderUtilization"]
print(json.dumps([of("nvmlDeviceGet" + name) for name in names]))
"""


def test_use_of_the_engines_is_the_containers_own_or_none_is_reported(measured: Stage, double: Path) -> None:
    mine = measured.worker()
    own = {"OWN_PID": str(mine.pid)}
    expected = [[0, 10, 5], [0, 20, 0], [0, 15, 0]]
    wait_for(lambda: request(measured, double, ENGINES, **own) == expected, seconds=20)
    assert request(measured, double, ENGINES, OWN_PID="4100000") == [[0, 0, 0]] * 3
    assert request(measured, double, ENGINES, NO_SAMPLES="1", **own) == [[NOT_SUPPORTED, 0, 0]] * 3


def test_a_driver_without_a_function_is_answered_for_as_one_without_it(stage: Stage) -> None:
    program = """
import ctypes, json, os
ours, driver = ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[-1]), ctypes.CDLL("libnvidia-ml.so.1")
assert not any(hasattr(driver, name) for name in ("nvmlGpmSampleGet", "nvmlDeviceSetPersistenceMode"))
print(json.dumps([ours.nvmlGpmSampleGet(None, None), ours.nvmlDeviceSetPersistenceMode(None, 0)]))
"""
    assert json.loads(stage.python(program)) == [13, 13]


SECTIONS = {
    "Scaled to the container": "SCALED",
    "The container's own processes": "OWN",
    "Not supported": "REFUSED",
    "Denied": "DENIED",
}


def on_the_page(title: str) -> list[str]:
    body = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"`(nvml[\w*]+)`", "".join(line for line in body.splitlines() if line.startswith("| `")))


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_names_what_the_table_does_and_nothing_else(title: str) -> None:
    mine = {name for name, line in table().items() if line.rule == SECTIONS[title]}
    names = on_the_page(title)
    own = {"nvmlDeviceSetCpuAffinity"}  # the page names it
    assert sorted(name for name in mine if not any(fnmatchcase(name, family) for family in names)) == []
    for family in names:
        of = {name for name in table() if fnmatchcase(name, family)} - own
        assert of, family
        assert of <= mine, (family, sorted(of - mine))
