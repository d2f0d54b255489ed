"""Is NVIDIA's own CDI specification true of this machine now, and what of it do containers with a GPU of Tangram's get? Pure.

NVIDIA's tools (`nvidia-ctk cdi generate`, the container toolkit, GPU Operator) describe the driver better than we do. Their specification may also be old, of
another driver, or not theirs at all: whoever writes it has a program run as root at each start of a container. So nothing of it is copied as it stands. It is used only
if all that it says is of a kind that NVIDIA's tools write, if it names each GPU by its UUID, and if driver version and files are those of now. Then its mounts, hooks and
variables are passed on; device nodes are ours, and it only selects among them. What it says wrong refuses it whole: a specification that lies once is not believed.

Compared with github.com/NVIDIA/nvidia-container-toolkit at d34b3046 (pkg/nvcdi, internal/discover, cmd/nvidia-cdi-hook): read, and nvidia-ctk 1.20.1 run over the fake driver.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vgpu.api.cdi_spec import VERSIONS, DeviceNode, Edits, Hook, Mount, Spec
from vgpu.api.contract import GRANT_DIRS, PRELOAD_FILE

KINDS: Final = ("nvidia.com/gpu", "k8s.device-plugin.nvidia.com/gpu", "management.nvidia.com/gpu")
ROOTS: Final = (
    "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt/nvidia", "/home/kubernetes/bin/nvidia", "/x86_64-bottlerocket-linux-gnu",
    "/aarch64-bottlerocket-linux-gnu", "/run/nvidia", "/run/nvidia-persistenced", "/run/nvidia-fabricmanager", "/run/udev",
    "/var/run/nvidia-persistenced", "/var/run/nvidia-fabricmanager", "/tmp/nvidia-mps",  # noqa: S108 (a name on the host)
)  # fmt: skip
"""Folders of the host that files of the driver and of the toolkit are below, beside the driver's root."""
PROTECTED: Final = (*GRANT_DIRS, PRELOAD_FILE, "/proc", "/sys", "/dev")
"""Paths of a container that no mount or link of a vendor may be at, above or below."""
NEEDED: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
COMMON: Final = frozenset({*NEEDED, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"})
"""Device nodes that every container with a GPU may have."""
SOCKETS: Final = frozenset(
    f"{run}/{name}/socket" for run in ("/run", "/var/run") for name in ("nvidia-persistenced", "nvidia-fabricmanager")
)
FOLDERS: Final = frozenset({"/run/udev"})
LEFT_OUT_MOUNTS: Final = frozenset({"/tmp/nvidia-mps"})  # noqa: S108 (a name in a container)
"""Clients of an MPS server cannot be suspended one by one."""
LEFT_OUT_HOOKS: Final = frozenset({"chmod", "apply-cuda-memory-limits"})
"""The first is off by default at NVIDIA's. The second sets memory limits of the driver's own, by cgroup: Tangram sets the limits."""
LEFT_OUT_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
"""Containers have it from the pod's assignment."""
PROGRAMS: Final = ("nvidia-cdi-hook", "nvidia-ctk")
FILE_OPTIONS: Final = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET_OPTIONS: Final = ("nosuid", "nodev", "rbind", "rprivate", "noexec")
_OPTIONS: Final = frozenset({*FILE_OPTIONS, "noexec", "bind", "private", "rslave", "slave"})

_NAME: Final = re.compile(
    r"(?:lib(?:cuda|nv|EGL|GL|OpenGL|OpenCL|vdpau|gl)[\w.+-]*\.so[\w.]*|lib[\w-]*nvidia[\w.+-]*|[\w.+-]*nvidia[\w.+-]*|nvoptix\.bin|gsp[\w]*\.bin|cufile\.json)\Z"
)
"""Files that NVIDIA's tools describe: libraries, programs, configuration, firmware."""
_LINKED: Final = re.compile(r"(?:card|renderD)[0-9]+\Z")
_OF_DRIVER: Final = re.compile(r"lib(?:cuda|nvidia-ml)\.so\.([0-9]+(?:\.[0-9]+)+)\Z")
_VERSION: Final = re.compile(r"[0-9]+(?:\.[0-9]+){0,3}\Z")
_ENV: Final = re.compile(r"NVIDIA_CTK_[A-Z_]+=[\w.:/-]{0,1024}\Z")
_LDCONFIG: Final = re.compile(r"@?/(?:[\w.-]+/)*ldconfig(?:\.real)?\Z")
_BY_PATH: Final = "/dev/dri/by-path/"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A device that is to be described."""

    name: str
    """UUID of a GPU or MIG instance."""
    nodes: tuple[str, ...]
    """Its own device nodes, which it must have and no other may: `/dev/nvidia0` and those of capabilities."""
    optional: frozenset[str] = frozenset()
    """Nodes of the same GPU that it may have: `/dev/dri/renderD128`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is true now."""

    driver: str
    """Version."""
    root: str
    """The driver's root on the host."""
    exists: Callable[[str], bool | None]
    """Of a path of the host: is there anything? None: it cannot be seen from here."""


def trouble(spec: Spec, wanted: Sequence[Wanted], machine: Machine) -> str:
    """Why the specification is not used, as a clause; empty: it may be."""
    return next(_troubles(spec, wanted, machine), "")


def merged(spec: Spec, own: Mapping[str, Any], wanted: Sequence[Wanted]) -> dict[str, Any]:
    """Our specification (`own`, as decoded JSON) with what the vendor's adds. `wanted`: the devices that `trouble` accepted; others of `own` keep their nodes.

    Each device has our nodes of it and, of the optional ones, those that the vendor names. All devices have the vendor's mounts, hooks and variables in place of our mounts.
    """
    devices = []
    by_name = {one.name: one for one in wanted}
    for device in own["devices"]:
        found, asked = spec.device(device["name"]), by_name.get(device["name"])
        if found is None or asked is None:
            devices.append(device)
            continue
        named = {node.path: node for node in found.container_edits.device_nodes}
        nodes = list(device["containerEdits"]["deviceNodes"])
        had = {node["path"] for node in nodes}
        nodes += [_node(named[path]) for path in sorted((asked.optional & named.keys()) - had)]
        devices.append(
            {"name": device["name"], "containerEdits": {"deviceNodes": nodes, **_rest(found.container_edits)}}
        )
    common = list(own["containerEdits"]["deviceNodes"])
    had = {node["path"] for node in common}
    common += [_node(node) for node in spec.container_edits.device_nodes if node.path not in had]
    edits = {"deviceNodes": common, **_rest(spec.container_edits)}
    version = max(spec.cdi_version, own["cdiVersion"], key=VERSIONS.index)
    return {"cdiVersion": version, "kind": own["kind"], "devices": devices, "containerEdits": edits}


def _troubles(spec: Spec, wanted: Sequence[Wanted], machine: Machine) -> Iterator[str]:
    if spec.cdi_version not in VERSIONS:
        yield f"its version {spec.cdi_version!r} is not known"
    if spec.kind not in KINDS:
        yield f"it is of kind {spec.kind!r}"
    if not machine.driver:
        yield "the driver's version is not known"
    names = [one.name for one in spec.devices]
    of_device: list[tuple[Wanted, Edits]] = []
    for one in wanted:
        found = spec.device(one.name)
        if found is None or names.count(one.name) > 1:
            yield f"it does not name {one.name}" if found is None else f"it names {one.name} twice"
            return
        of_device.append((one, found.container_edits))
    yield from _of_nodes(spec.container_edits, (), COMMON, machine)
    for one, edits in of_device:
        yield from _of_nodes(edits, one.nodes, COMMON | one.optional | set(one.nodes), machine, of=one.name)
        has = {node.path for part in (edits, spec.container_edits) for node in part.device_nodes}
        if missing := [path for path in (*NEEDED, *one.nodes) if path not in has]:
            yield f"{one.name} lacks {', '.join(missing)}"
    used = [spec.container_edits, *(edits for _, edits in of_device)]
    yield from _of_versions(used, machine)
    for edits in used:
        for mount in edits.mounts:
            yield from _of_mount(mount, machine)
        for hook in edits.hooks:
            yield from _of_hook(hook, machine)
        yield from (f"it sets {env.partition('=')[0]!r}" for env in edits.env if _kept_env(env) and not _ENV.match(env))
        yield from (f"it adds the group {gid}" for gid in edits.additional_gids if not 0 < gid < 1 << 31)


def _of_nodes(
    edits: Edits, needed: Sequence[str], allowed: frozenset[str] | set[str], machine: Machine, of: str = "every device"
) -> Iterator[str]:
    for node in edits.device_nodes:
        if node.path not in allowed:
            yield f"{of} has {node.path}, which is not its own"
        at = node.host_path or node.path
        if at not in (node.path, f"{machine.root.rstrip('/')}{node.path}"):
            yield f"{of} has {at} as {node.path}"
        elif node.path not in needed and machine.exists(at) is False:
            yield f"{at} is not there"


def _of_versions(used: Sequence[Edits], machine: Machine) -> Iterator[str]:
    versions = {
        found[1]
        for edits in used
        for mount in edits.mounts
        if (found := _OF_DRIVER.match(posixpath.basename(mount.host_path)))
    }
    if wrong := sorted(versions - {machine.driver}):
        yield f"it is of driver {wrong[0]}, and {machine.driver} runs"
    if not any(mount.host_path.endswith(f"/libcuda.so.{machine.driver}") for edits in used for mount in edits.mounts):
        yield f"it names no libcuda.so.{machine.driver}"


def _of_mount(mount: Mount, machine: Machine) -> Iterator[str]:
    host, at = mount.host_path, mount.container_path
    if mount.type not in ("", "bind") or not _OPTIONS.issuperset(mount.options):
        yield f"it mounts {at} with type {mount.type!r} and options {', '.join(mount.options)!r}"
    if not _plain(at) or _touches(at):
        yield f"it mounts something at {at!r}"
    if not _known(host, machine):
        yield f"it mounts {host!r}, which is below no folder of the driver"
    special = at in SOCKETS | FOLDERS | LEFT_OUT_MOUNTS
    if not special and not (_NAME.match(posixpath.basename(at)) and posixpath.basename(host) == posixpath.basename(at)):
        yield f"it mounts {host!r} at {at!r}, which is no file of the driver"
    if at not in LEFT_OUT_MOUNTS:
        yield from _there(host, machine)


def _of_hook(hook: Hook, machine: Machine) -> Iterator[str]:
    name, words = _hook_words(hook)
    if name in LEFT_OUT_HOOKS:
        return
    if name not in _HOOKS or hook.hook_name != "createContainer":
        yield f"its hook {name or hook.path!r} at {hook.hook_name!r} is not known"
        return
    if posixpath.basename(hook.path) not in PROGRAMS or not _known(hook.path, machine):
        yield f"its hook is {hook.path!r}"
    else:
        yield from _there(hook.path, machine)
    if hook.timeout is not None and not 0 < hook.timeout <= 60:
        yield f"its hook {name} has {hook.timeout} s"
    yield from (f"its hook {name} sets {env!r}" for env in hook.env if not _ENV.match(env))
    flags = _HOOKS[name]
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not equals:
            value = words.pop(0) if words else ""
        if flag not in flags or not flags[flag](value):
            yield f"its hook {name} has {flag} {value!r}"


def _hook_words(hook: Hook) -> tuple[str, list[str]]:
    """The hook's name, and the words behind it."""
    words = list(hook.args)
    if not words or posixpath.basename(words.pop(0)) not in PROGRAMS:
        return "", []
    if words and words[0] == "hook":
        words.pop(0)
    return (words.pop(0), words) if words else ("", [])


def _link(value: str) -> bool:
    target, found, at = value.partition("::")
    name = posixpath.basename(at)
    if not found or not _plain(at):
        return False
    if at.startswith(_BY_PATH):
        return _LINKED.match(posixpath.basename(target)) is not None
    return not _touches(at) and bool(_NAME.match(name)) and bool(_NAME.match(posixpath.basename(target)))


def _folder(value: str) -> bool:
    return _plain(value) and not _touches(value)


def _number(value: str) -> bool:
    return _VERSION.match(value) is not None


def _ldconfig(value: str) -> bool:
    return _LDCONFIG.match(value) is not None and ".." not in value


_HOOKS: Final[Mapping[str, Mapping[str, Callable[[str], bool]]]] = {
    "create-symlinks": {"--link": _link},
    "update-ldcache": {"--folder": _folder, "--ldconfig-path": _ldconfig},
    "enable-cuda-compat": {
        "--host-driver-version": _number, "--host-cuda-version": _number, "--cuda-compat-container-root": _folder,
    },
    "disable-device-node-modification": {},
    "update-application-profile": {},
}  # fmt: skip
"""Hook -> its flags, and what their values may be. cmd/nvidia-cdi-hook has them."""


def _plain(path: str) -> bool:
    """Absolute, and nothing in it leads elsewhere."""
    return path.startswith("/") and posixpath.normpath(path) == path and "\0" not in path and not path.startswith("//")


def _touches(path: str) -> bool:
    return path == "/" or any(_within(path, one) or _within(one, path) for one in PROTECTED)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _known(path: str, machine: Machine) -> bool:
    """Below a folder that may have files of the driver. The driver's root `/` is none: that would be every file."""
    own = machine.root.rstrip("/")
    return _plain(path) and any(_within(path, root) for root in (*ROOTS, *([own] if own else [])))


def _there(path: str, machine: Machine) -> Iterator[str]:
    there = machine.exists(path)
    if not there:
        yield f"{path} is not there" if there is False else f"{path} cannot be seen from here"


def _kept_env(env: str) -> bool:
    return env.partition("=")[0] != LEFT_OUT_ENV


def _node(node: DeviceNode) -> dict[str, Any]:
    """Without numbers and modes: the runtime reads them off the host's node."""
    return {"path": node.path, "hostPath": node.host_path or node.path, "permissions": "rw"}


def _rest(edits: Edits) -> dict[str, Any]:
    """All but device nodes."""
    mounts = [_mount(mount) for mount in edits.mounts if mount.container_path not in LEFT_OUT_MOUNTS]
    hooks = [_hook(hook) for hook in edits.hooks if _hook_words(hook)[0] not in LEFT_OUT_HOOKS]
    env = [one for one in edits.env if _kept_env(one)]
    found: dict[str, Any] = {
        "env": env,
        "mounts": mounts,
        "hooks": hooks,
        "additionalGids": list(edits.additional_gids),
    }
    return {name: value for name, value in found.items() if value}


def _mount(mount: Mount) -> dict[str, Any]:
    options = SOCKET_OPTIONS if mount.container_path in SOCKETS else FILE_OPTIONS
    return {"hostPath": mount.host_path, "containerPath": mount.container_path, "options": list(options)}


def _hook(hook: Hook) -> dict[str, Any]:
    made: dict[str, Any] = {"hookName": hook.hook_name, "path": hook.path, "args": list(hook.args)}
    if hook.env:
        made["env"] = list(hook.env)
    if hook.timeout is not None:
        made["timeout"] = hook.timeout
    return made
