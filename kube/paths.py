"""Paths of the API that more than one part of Tangram uses. Names are escaped, so that no name can be a path."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

PODS: Final = "/api/v1/pods"
NODES: Final = "/api/v1/nodes"
BUDGETS: Final = "/apis/policy/v1/poddisruptionbudgets"

TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"

POD_GROUPS_API: Final = "/apis/scheduling.k8s.io/v1alpha2"
POD_GROUPS: Final = f"{POD_GROUPS_API}/podgroups"

RESOURCE_API: Final = "/apis/resource.k8s.io"

KUEUE_GROUP: Final = "kueue.x-k8s.io"
KUEUE: Final = f"/apis/{KUEUE_GROUP}"


def _name(name: str) -> str:
    return quote(name, safe="")


def pods(namespace: str) -> str:
    """All pods of a namespace."""
    return f"/api/v1/namespaces/{_name(namespace)}/pods"


def pod(namespace: str, name: str, sub: str = "") -> str:
    """A pod, or its subresource (`binding`, `eviction`, `status`)."""
    return f"{pods(namespace)}/{_name(name)}" + (f"/{sub}" if sub else "")


def node(name: str) -> str:
    """A node."""
    return f"{NODES}/{_name(name)}"


def secret(namespace: str, name: str = "") -> str:
    """A secret, or all of a namespace."""
    return f"/api/v1/namespaces/{_name(namespace)}/secrets" + (f"/{_name(name)}" if name else "")


def config_map(namespace: str, name: str = "") -> str:
    """A ConfigMap, or all of a namespace."""
    return f"/api/v1/namespaces/{_name(namespace)}/configmaps" + (f"/{_name(name)}" if name else "")


def events(namespace: str, name: str = "") -> str:
    """Events of a namespace, in the API group that has series."""
    return f"/apis/events.k8s.io/v1/namespaces/{_name(namespace)}/events" + (f"/{_name(name)}" if name else "")


def workloads(version: str) -> str:
    """All of Kueue's Workloads."""
    return f"{KUEUE}/{_name(version)}/workloads"


def resource_slices(version: str) -> str:
    """All ResourceSlices."""
    return f"{RESOURCE_API}/{_name(version)}/resourceslices"


def of_kind(api_version: str, resource: str, namespace: str, name: str) -> str:
    """An object of any kind that lives in a namespace, by the `apiVersion` of its kind (`v1`, `batch/v1`) and its resource (`jobs`)."""
    group, _, version = api_version.rpartition("/")
    of = f"/apis/{_name(group)}/{_name(version)}" if group else f"/api/{_name(version)}"
    return f"{of}/namespaces/{_name(namespace)}/{_name(resource)}/{_name(name)}"


def webhook_configuration(name: str) -> str:
    """A MutatingWebhookConfiguration."""
    return f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{_name(name)}"
