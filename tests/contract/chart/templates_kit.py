"""Objects with pod templates that Kueue counts, and the policies on them in force on a real API server."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.apiserver import ApiServer, Denied
from tests.contract.chart.policy_kit import numbers
from tests.contract.chart.rendering import Helm
from vgpu.api.names import DEFAULT

ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
QUEUE: Final = "kueue.x-k8s.io/queue-name"
GPU_MEM: Final = DEFAULT.gpu_mem
WAIT_S: Final = 30.0
"""Until the API server serves a new resource, or a policy is in force. Guessed: it takes less than 1 s on an idle machine."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A kind, and where its pod templates are: keys and indices down from the object."""

    kind: str
    api: str
    plural: str
    templates: tuple[tuple[str | int, ...], ...]

    @property
    def path(self) -> str:
        return f"/apis/{self.api}/namespaces/default/{self.plural}"


def replicas(kind: str, field: str, version: str, *names: str) -> Counted:
    templates = tuple(("spec", field, name, "template") for name in names)
    return Counted(kind, f"kubeflow.org/{version}", f"{kind.lower()}s", templates)


def ray(kind: str, *above: str, more: tuple[tuple[str | int, ...], ...] = ()) -> Counted:
    groups = (*above, "headGroupSpec", "template"), *((*above, "workerGroupSpecs", at, "template") for at in (0, 1))
    return Counted(kind, "ray.io/v1", f"{kind.lower()}s", tuple(("spec", *one) for one in (*groups, *more)))


JOB: Final = Counted("Job", "batch/v1", "jobs", (("spec", "template"),))
STATEFUL_SET: Final = Counted("StatefulSet", "apps/v1", "statefulsets", (("spec", "template"),))
RAY_CLUSTER: Final = ray("RayCluster")
CUSTOM: Final = (
    Counted(
        "JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets",
        tuple(("spec", "replicatedJobs", at, "template", "spec", "template") for at in (0, 1)),
    ),
    RAY_CLUSTER,
    ray("RayJob", "rayClusterSpec", more=(("submitterPodTemplate",),)),
    ray("RayService", "rayClusterConfig"),
    replicas("PyTorchJob", "pytorchReplicaSpecs", "v1", "Master", "Worker"),
    replicas("TFJob", "tfReplicaSpecs", "v1", "Chief", "PS", "Worker"),
    replicas("XGBoostJob", "xgbReplicaSpecs", "v1", "Master", "Worker"),
    replicas("JAXJob", "jaxReplicaSpecs", "v1", "Worker"),
    replicas("PaddleJob", "paddleReplicaSpecs", "v1", "Master", "Worker"),
    replicas("MPIJob", "mpiReplicaSpecs", "v2beta1", "Launcher", "Worker"),
    Counted(
        "LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1", "leaderworkersets",
        tuple(("spec", "leaderWorkerTemplate", name) for name in ("leaderTemplate", "workerTemplate")),
    ),
)  # fmt: skip
KINDS: Final = (JOB, STATEFUL_SET, *CUSTOM)
ONLY_QUEUED: Final = ("StatefulSet", "LeaderWorkerSet")
"""With queues.kueue.enabled too."""


def container(name: str, limit: str | int | None = None, request: str | int | None = None) -> dict[str, Any]:
    parts = {"limits": limit, "requests": request}
    given = {part: {GPU_MEM: text} for part, text in parts.items() if text is not None}
    return {"name": name, "image": "none", "resources": given}


def pod_template(*containers: Mapping[str, Any], init: tuple[Mapping[str, Any], ...] = ()) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never", "containers": list(containers)}
    return {"metadata": {"labels": {"app": "x"}}, "spec": spec | ({"initContainers": list(init)} if init else {})}


def put(thing: dict[str, Any], at: tuple[str | int, ...], value: Any) -> None:
    """Write a value where the keys and indices lead to; what is missing on the way is made."""
    here: Any = thing
    for key, following in itertools.pairwise(at):
        if isinstance(here, list):
            here.extend({} for _ in range(int(key) + 1 - len(here)))
            here = here[int(key)]
        else:
            here = here.setdefault(key, [] if isinstance(following, int) else {})
    here[at[-1]] = value


def get(thing: Any, at: tuple[str | int, ...]) -> Any:
    for key in at:
        thing = thing[key]
    return thing


def thing(of: Counted, *templates: Mapping[str, Any], queue: str = "team", name: str = "") -> dict[str, Any]:
    """An object with these templates, in the order of `of.templates`; the last one again where there are more places."""
    made: dict[str, Any] = {
        "apiVersion": of.api,
        "kind": of.kind,
        "metadata": {"name": name or f"counted-{next(numbers)}", "labels": {QUEUE: queue} if queue else {}},
    }
    for at, place in enumerate(of.templates):
        put(made, place, copy.deepcopy(templates[min(at, len(templates) - 1)]))
    if of.kind == "StatefulSet":
        made["spec"] |= {"selector": {"matchLabels": {"app": "x"}}, "serviceName": "x"}
        made["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    return made


def create(api: ApiServer, of: Counted, made: Mapping[str, Any], *, dry: bool = True) -> Any:
    """What the API server would store, or has stored."""
    return api("POST", of.path + ("?dryRun=All" if dry else ""), made)


def texts(stored: Any, of: Counted) -> list[str]:
    """gpu-mem of all containers: limits before requests, init containers before others."""
    found = []
    for place in of.templates:
        spec = get(stored, place)["spec"]
        for one in [*spec.get("initContainers", []), *spec["containers"]]:
            parts = (one.get("resources", {}).get(part, {}) for part in ("limits", "requests"))
            found += [str(part[GPU_MEM]) for part in parts if GPU_MEM in part]
    return found


def definition(of: Counted) -> dict[str, Any]:
    """A custom resource that takes any object, named as the kind is."""
    group, version = of.api.split("/")
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{of.plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": of.plural, "singular": of.kind.lower(), "kind": of.kind, "listKind": f"{of.kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }  # fmt: skip


def define(api: ApiServer) -> None:
    """Have the custom kinds served."""
    for of in CUSTOM:
        api("POST", DEFINITIONS, definition(of))
    deadline = time.monotonic() + WAIT_S
    for of in CUSTOM:
        while api.http.get(of.path).status_code == 404:
            assert time.monotonic() < deadline, f"{of.kind} is not served"
            time.sleep(0.05)  # no event shows it


@contextlib.contextmanager
def in_force(
    api: ApiServer, helm: Helm, values: Mapping[str, Any] | None = None, *, kube: str = "", only: str = ""
) -> Iterator[None]:
    """The chart's policies on templates, until the block ends; then none of them is in force any more. `only`: what normalises one kind, by its
    plural, and nothing else."""
    objects = helm.objects(values, kube=kube)
    made = [
        (f"{ADMISSION}/{one}", thing)
        for kind in ("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy")
        for one in (f"{kind[:-1].lower()}ies", f"{kind.lower()}bindings")
        for name, thing in objects.of(kind if one.endswith("ies") else f"{kind}Binding").items()
        if (name == f"tangram-templates-{only}" if only else name.startswith("tangram-templates"))
    ]
    try:
        # first what denies: once objects are normalised, nothing shows any more whether it is in force
        for kind, shown in (("Validating", "denied"), ("Mutating", "units")):
            of_kind = [(path, thing) for path, thing in made if thing["kind"].startswith(kind)]
            for path, thing in of_kind:
                api.apply(thing, path)
            if of_kind:
                _await(api, shown, only)
        yield
    finally:
        for path, thing in made:
            api("DELETE", f"{path}/{thing['metadata']['name']}")
        _await(api, "bytes", only)


def _await(api: ApiServer, wanted: str, only: str) -> None:
    """Policies reach admission by a watch: until bytes are stored as `units` or `bytes`, or are `denied`."""
    deadline = time.monotonic() + WAIT_S
    served = [JOB, STATEFUL_SET, *(of for of in CUSTOM if api.http.get(of.path).status_code == 200)]
    for of in (of for of in served if not only or of.plural == only):
        while (found := _stored(api, of)) != wanted:
            assert time.monotonic() < deadline, f"{of.kind}: {found}, not yet {wanted}"
            time.sleep(0.05)  # no event shows it


def _stored(api: ApiServer, of: Counted) -> str:
    try:
        (text,) = set(texts(create(api, of, thing(of, pod_template(container("main", "8Gi", "8Gi")))), of))
    except Denied:
        return "denied"
    return "units" if text.isdigit() else "bytes"
