"""NVIDIA's CDI specification is used where it is true of this machine, and never where it lies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.vgpu.api.cdi_kit import CASES, DRIVER, FOLDER, GPU, INSTANCES, OTHER, Case
from vgpu.api.cdi_spec import LARGEST_BYTES, BadSpec, spec_from_text
from vgpu.api.cdi_vendor import PROTECTED, Wanted, merged, trouble

HOST, MIG = CASES["host"], CASES["mig"]
Plain = dict[str, Any]


@pytest.mark.parametrize("name", CASES)
def test_what_nvidias_tool_writes_is_used_and_gives_what_stands_beside_it(name: str) -> None:
    case = CASES[name]
    assert trouble(case.spec(), case.wanted, case.machine()) == ""
    made = merged(case.spec(), case.own(OTHER), case.wanted)
    assert made == json.loads((FOLDER / f"{name}.merged.json").read_text()), json.dumps(made, indent=1)


def lying(change: Callable[[Plain], object], case: Case = HOST) -> str:
    """Why a specification is refused that was changed so."""
    plain: Plain = yaml.safe_load(case.text())
    change(plain)
    return trouble(spec_from_text(json.dumps(plain).encode()), case.wanted, case.machine())


def common(plain: Plain) -> Plain:
    found: Plain = plain["containerEdits"]
    return found


def mount(host: str, at: str, **more: Any) -> Callable[[Plain], object]:
    return lambda plain: common(plain)["mounts"].append(
        {"hostPath": host, "containerPath": at, "options": ["ro"], **more}
    )


def hook(*args: str, **more: Any) -> Callable[[Plain], object]:
    made = {
        "hookName": "createContainer",
        "path": "/usr/bin/nvidia-cdi-hook",
        "args": ["nvidia-cdi-hook", *args],
        **more,
    }
    return lambda plain: common(plain)["hooks"].append(made)


def node(at: str, **more: Any) -> Callable[[Plain], object]:
    return lambda plain: common(plain)["deviceNodes"].append({"path": at, **more})


def of_gpu(at: str, **more: Any) -> Callable[[Plain], object]:
    return lambda plain: plain["devices"][0]["containerEdits"]["deviceNodes"].append({"path": at, **more})


LIB = "/usr/lib/x86_64-linux-gnu"
LIES: dict[str, tuple[Callable[[Plain], object], str]] = {
    "another kind": (lambda plain: plain.update(kind="evil.com/gpu"), "it is of kind"),
    "a version of the future": (lambda plain: plain.update(cdiVersion="9.0.0"), "its version '9.0.0' is not known"),
    "no UUID": (lambda plain: plain["devices"][0].update(name="0"), f"it does not name {GPU}"),
    "a UUID twice": (lambda plain: plain["devices"].append(plain["devices"][0]), f"it names {GPU} twice"),
    "another GPU's node": (of_gpu("/dev/nvidia1"), f"{GPU} has /dev/nvidia1, which is not its own"),
    "another GPU's node for all": (node("/dev/nvidia1"), "every device has /dev/nvidia1"),
    "its own node for all": (node("/dev/nvidia0"), "every device has /dev/nvidia0"),
    "another GPU's node under its name": (
        lambda plain: plain["devices"][0]["containerEdits"]["deviceNodes"][0].update(hostPath="/dev/nvidia1"), "has /dev/nvidia1 as /dev/nvidia0",
    ),
    "the disk": (node("/dev/sda"), "/dev/sda"),
    "the disk as a control node": (
        lambda plain: common(plain)["deviceNodes"][0].update(hostPath="/dev/sda"), "has /dev/sda as /dev/nvidia-modeset",
    ),
    "a MIG capability of all": (node("/dev/nvidia-caps/nvidia-cap1"), "nvidia-cap1"),
    "DRM of another GPU": (of_gpu("/dev/dri/card0"), "/dev/dri/card0, which is not its own"),
    "no node of its own": (lambda plain: plain["devices"][0]["containerEdits"].update(deviceNodes=[]), f"{GPU} lacks /dev/nvidia0"),
    "the shadow file": (mount("/etc/shadow", "/usr/share/nvidia/shadow"), "no file of the driver"),
    "a folder of the host": (mount("/etc", "/usr/share/nvidia"), "no file of the driver"),
    "the kubelet's folder": (mount("/var/lib/kubelet/libcuda.so.1", f"{LIB}/libcuda.so.1"), "below no folder of the driver"),
    "out by dots": (mount("/usr/../var/lib/nvidia.json", "/usr/share/nvidia.json"), "below no folder of the driver"),
    "into dots": (mount("/usr/share/nvidia.json", "/usr/share/../../nvidia.json"), "it mounts something at"),
    "relative": (mount("/usr/share/nvidia.json", "usr/share/nvidia.json"), "it mounts something at"),
    "over the preload file": (mount("/usr/share/nvidia.conf", "/etc/ld.so.preload"), "it mounts something at '/etc/ld.so.preload'"),
    "over the grant": (mount(f"{LIB}/libnvidia-ml.so.1", "/.tangram/libnvidia-ml.so.1"), "it mounts something at"),
    "over /etc": (mount("/etc", "/etc"), "it mounts something at '/etc'"),
    "over all": (mount("/usr", "/"), "it mounts something at '/'"),
    "in /proc": (mount("/usr/share/nvidia.conf", "/proc/driver/nvidia"), "it mounts something at"),
    "a file under another name": (mount("/usr/bin/bash", "/usr/bin/nvidia-smi"), "no file of the driver"),
    "another library of the driver's folder": (mount("/usr/lib/libc.so.6", "/usr/lib/libc.so.6"), "no file of the driver"),
    "a file system": (mount("/usr/share/nvidia.json", "/usr/share/nvidia.json", type="tmpfs"), "with type 'tmpfs'"),
    "writable for programs": (mount("/usr/share/nvidia.json", "/usr/share/nvidia.json", options=["rw", "exec"]), "options 'rw, exec'"),
    "another driver": (
        mount(f"{LIB}/libcuda.so.570.1.2", f"{LIB}/libcuda.so.570.1.2"), f"it is of driver 570.1.2, and {DRIVER} runs",
    ),
    "no driver": (
        lambda plain: common(plain).update(mounts=[one for one in common(plain)["mounts"] if "libcuda" not in one["hostPath"]]),
        f"it names no libcuda.so.{DRIVER}",
    ),
    "a hook of another program": (
        lambda plain: common(plain)["hooks"].append({"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", "id"]}), "is not known",
    ),
    "a shell named as the hook": (hook("create-symlinks", path="/bin/sh"), "its hook is '/bin/sh'"),
    "a hook elsewhere": (hook("create-symlinks", path="/tmp/nvidia-cdi-hook"), "its hook is"),
    "a hook on the host": (hook("create-symlinks", hookName="createRuntime"), "at 'createRuntime' is not known"),
    "an unknown hook": (hook("run-anything"), "its hook 'run-anything'"),
    "an unknown flag": (hook("create-symlinks", "--container-spec", "/etc"), "has --container-spec"),
    "a link over the preload file": (hook("create-symlinks", "--link", "libcuda.so.1::/etc/ld.so.preload"), "has --link"),
    "a link over the grant": (hook("create-symlinks", "--link=libcuda.so.1::/.tangram/libnvidia.so"), "has --link"),
    "a link to a shell": (hook("create-symlinks", "--link", f"/bin/sh::{LIB}/libcuda.so"), "has --link"),
    "a link without an end": (hook("create-symlinks", "--link"), "has --link"),
    "another ldconfig": (hook("update-ldcache", "--ldconfig-path", "/tmp/x"), "has --ldconfig-path"),
    "ldconfig by dots": (hook("update-ldcache", "--ldconfig-path", "/usr/../tmp/ldconfig"), "has --ldconfig-path"),
    "a folder in /proc": (hook("update-ldcache", "--folder", "/proc/1/root"), "has --folder"),
    "a version that is none": (hook("enable-cuda-compat", "--host-driver-version=$(id)"), "has --host-driver-version"),
    "a hook without end": (hook("create-symlinks", timeout=86_400), "has 86400 s"),
    "a hook's environment": (hook("create-symlinks", env=["LD_PRELOAD=/tmp/x.so"]), "sets 'LD_PRELOAD=/tmp/x.so'"),
    "the preload variable": (lambda plain: common(plain)["env"].append("LD_PRELOAD=/tmp/x.so"), "it sets 'LD_PRELOAD'"),
    "the path": (lambda plain: common(plain)["env"].append("PATH=/tmp"), "it sets 'PATH'"),
    "our own variable": (lambda plain: common(plain)["env"].append("TANGRAM_GRANT=/tmp"), "it sets 'TANGRAM_GRANT'"),
    "the root group": (lambda plain: common(plain).update(additionalGids=[0]), "it adds the group 0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_specification_that_lies_is_refused_with_what_it_says_wrong(lie: str) -> None:
    change, why = LIES[lie]
    assert why in lying(change)


def test_a_lie_about_a_device_that_nobody_gets_does_not_matter() -> None:
    assert (
        lying(lambda plain: plain["devices"][1]["containerEdits"]["deviceNodes"].append({"path": "/dev/nvidia1"})) == ""
    )


def test_an_instance_may_have_its_own_capabilities_only() -> None:
    def swapped(plain: Plain) -> None:
        one, two = plain["devices"]
        one["name"], two["name"] = two["name"], one["name"]

    assert f"{INSTANCES[0]} has /dev/nvidia-caps/nvidia-cap21, which is not its own" in lying(swapped, MIG)


def paths_of(case: Case) -> list[str]:
    edits = case.spec().container_edits
    return sorted(
        {mount.host_path for mount in edits.mounts if "mps" not in mount.host_path}
        | {hook.path for hook in edits.hooks}
    )


@pytest.mark.parametrize("path", paths_of(HOST))
@pytest.mark.parametrize("seen", [False, None])
def test_each_file_must_be_there_now(path: str, seen: bool | None) -> None:
    why = trouble(HOST.spec(), HOST.wanted, HOST.machine(lambda one: seen if one == path else True))
    assert why == f"{path} {'is not there' if seen is False else 'cannot be seen from here'}"


@pytest.mark.parametrize("driver", ["570.133.20", "580.65.0", ""])
def test_of_another_driver_it_is_not_used(driver: str) -> None:
    assert trouble(HOST.spec(), HOST.wanted, HOST.machine(driver=driver))


def test_a_gpu_that_came_later_is_missed() -> None:
    wanted = (*HOST.wanted, Wanted(OTHER, ("/dev/nvidia1",)))
    assert trouble(HOST.spec(), wanted, HOST.machine()) == f"it does not name {OTHER}"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"kind: [", b"\xff\xfe", b"{}", b'{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[],"intelRdt":{}}',
        b"a: &a [1]\nb: *a\n", b"[" * 100_000, b'{"devices":' + b"[" * 100_000, b"{" + b" " * LARGEST_BYTES + b"}",
        b'{"cdiVersion":"0.5.0","kind":"k","devices":[' + b",".join([b'{"name":"x","containerEdits":{}}'] * 1025) + b"]}",
    ],
)  # fmt: skip
def test_what_is_no_specification_is_refused_with_a_short_reason(content: bytes) -> None:
    with pytest.raises(BadSpec) as refused:
        spec_from_text(content)
    assert 0 < len(str(refused.value)) < 300


def edits_of(made: Plain) -> Iterator[Plain]:
    yield made["containerEdits"]
    yield from (device["containerEdits"] for device in made["devices"])


TEXTS = st.one_of(
    st.sampled_from(
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/sda", "/etc/ld.so.preload", "/", "", "/usr/lib/libcuda.so.580.65.06", "LD_PRELOAD=/x",
         "createContainer", "create-symlinks", "--link", "nvidia-cdi-hook", "/bin/sh", "/usr/bin/../../tmp/nvidia-cdi-hook", "/.tangram/x", "0", "ro"]
    ),
    st.text(max_size=12),
)  # fmt: skip


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, Plain]:
    """A case, and its specification with some texts replaced by others of any kind, in any place."""
    name = draw(st.sampled_from(sorted(CASES)))
    plain: Plain = yaml.safe_load(CASES[name].text())
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in list(items):
            if isinstance(inner, str):
                places.append((value, key))
            collect(inner)

    collect(plain)
    for at in draw(st.lists(st.integers(0, len(places) - 1), max_size=4)):
        where, key = places[at]
        where[key] = draw(TEXTS)
    return name, plain


@given(changed())
def test_whatever_it_says_a_container_gets_its_own_devices_and_keeps_its_grant(given_: tuple[str, Plain]) -> None:
    """The invariants, checked the slow way on what was made, for each specification that is accepted."""
    name, plain = given_
    case = CASES[name]
    try:
        spec = spec_from_text(json.dumps(plain).encode())
    except BadSpec:
        return
    if trouble(spec, case.wanted, case.machine()):
        return
    own = case.own(OTHER)
    made = merged(spec, copy.deepcopy(own), case.wanted)
    assert [device["name"] for device in made["devices"]] == [device["name"] for device in own["devices"]]
    assert made["kind"] == own["kind"]
    for had, has in zip(own["devices"], made["devices"], strict=True):
        before, after = had["containerEdits"]["deviceNodes"], has["containerEdits"]["deviceNodes"]
        assert after[: len(before)] == before
        assert {one["path"] for one in after[len(before) :]} <= {"/dev/dri/card1", "/dev/dri/renderD129"}
    for one in made["containerEdits"]["deviceNodes"]:
        assert one["path"] in {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
        assert one["hostPath"] in (one["path"], f"{case.root.rstrip('/')}{one['path']}")
    for edits in edits_of(made):
        for one in edits.get("mounts", ()):
            at = one["containerPath"]
            assert at.startswith("/")
            assert not any(at == kept or at.startswith(f"{kept}/") or kept.startswith(f"{at}/") for kept in PROTECTED)
            assert {"nosuid", "nodev"} <= set(one["options"])
            assert "ro" in one["options"] or at.endswith("/socket")
        for one in edits.get("hooks", ()):
            assert one["path"].rpartition("/")[2] in ("nvidia-cdi-hook", "nvidia-ctk")
            assert not any(kept in word for word in one["args"] for kept in ("ld.so.preload", ".tangram"))
        assert not any(env.startswith(("LD_", "PATH", "TANGRAM", "NVIDIA_VISIBLE")) for env in edits.get("env", ()))
