"""From the bytes of an AdmissionReview to the bytes of its answer.

Decides nothing about pods: it unwraps, calls `mutate`, wraps. Whatever happens behind a readable request becomes an answer:
an exception denies with a sentence, because the alternative is a pod that uses GPUs without the library.

Source of the format: k8s.io/api/admission/v1.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import structlog

from vgpu.api.errors import TangramError
from webhook.admission_rules import AdmissionRules
from webhook.mutate import Admitted, mutate

API_VERSION: Final = "admission.k8s.io/v1"
INVALID: Final = 422
INTERNAL: Final = 500
REASONS: Final = {INVALID: "Invalid", INTERNAL: "InternalError"}

Result = Literal["unchanged", "mutated", "denied", "error"]

log = structlog.get_logger()


class BadReview(TangramError):
    """A body that is no AdmissionReview: there is no request to answer."""


class _Wire(msgspec.Struct, rename="camel", kw_only=True, omit_defaults=True):
    """Base: Kubernetes' field names."""


class GroupResource(_Wire):
    """Which kind of object."""

    group: str = ""
    resource: str = ""


class AdmissionRequest(_Wire):
    """What the API server sends."""

    uid: str
    operation: str = ""
    resource: GroupResource = msgspec.field(default_factory=GroupResource)
    sub_resource: str = ""
    namespace: str = ""
    name: str = ""
    object: Any = None


class ReviewIn(_Wire):
    """An AdmissionReview with a request."""

    api_version: str
    kind: str
    request: AdmissionRequest


class DenialStatus(_Wire):
    """Why not."""

    code: int
    reason: str
    message: str


class AdmissionResponse(_Wire):
    """What we answer."""

    uid: str
    allowed: bool
    patch_type: str | None = None
    patch: str | None = None
    status: DenialStatus | None = None
    warnings: list[str] = []


class ReviewOut(_Wire, omit_defaults=False):
    """An AdmissionReview with a response."""

    api_version: str
    kind: str
    response: AdmissionResponse


@dataclass(frozen=True, slots=True)
class ReviewAnswer:
    """The body to send, and what kind of answer it is."""

    body: bytes
    result: Result


_decoder = msgspec.json.Decoder(ReviewIn)
_encoder = msgspec.json.Encoder()


def review(body: bytes, rules: AdmissionRules) -> ReviewAnswer:
    """Answer an AdmissionReview.

    Raises BadReview when the body is none. Never raises for what is in the pod.
    """
    request = _request(body)
    if request.operation != "CREATE" or request.sub_resource or request.resource != GroupResource(resource="pods"):
        return _allow(request, Admitted())
    subject = _subject(request)
    try:
        return _allow(request, mutate(request.object, rules, request.namespace))
    except TangramError as error:
        log.info("pod denied", pod=subject, sentence=str(error))
        return _deny(request, INVALID, f"pod {subject}: {error}")
    except Exception as error:  # the webhook's own fault must become a denial that can be read
        log.exception("admission failed", pod=subject)
        return _deny(
            request, INTERNAL, f"pod {subject}: Tangram's webhook failed on it ({type(error).__name__}), see its log"
        )


def _request(body: bytes) -> AdmissionRequest:
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadReview(f"the body ({len(body)} bytes) is no AdmissionReview: {error}") from None
    if (found.api_version, found.kind) != (API_VERSION, "AdmissionReview"):
        raise BadReview(
            f"the body is {found.api_version[:80]} {found.kind[:80]}: it must be {API_VERSION} AdmissionReview"
        )
    return found.request


def _subject(request: AdmissionRequest) -> str:
    """A name for the pod in sentences; pods of a controller have none yet, only its prefix."""
    pod = request.object if isinstance(request.object, dict) else {}
    found = pod.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    prefix = metadata.get("generateName")
    name = request.name or metadata.get("name") or (f"{prefix}*" if prefix else "without a name")
    return f"{request.namespace}/{name}" if request.namespace else str(name)


def _allow(request: AdmissionRequest, admitted: Admitted) -> ReviewAnswer:
    response = AdmissionResponse(uid=request.uid, allowed=True, warnings=list(admitted.warnings))
    if admitted.ops:
        response.patch_type = "JSONPatch"
        response.patch = base64.b64encode(_encoder.encode(admitted.ops)).decode()
    return _answer(response, "mutated" if admitted.ops else "unchanged")


def _deny(request: AdmissionRequest, code: int, message: str) -> ReviewAnswer:
    status = DenialStatus(code=code, reason=REASONS[code], message=message)
    return _answer(
        AdmissionResponse(uid=request.uid, allowed=False, status=status), "denied" if code == INVALID else "error"
    )


def _answer(response: AdmissionResponse, result: Result) -> ReviewAnswer:
    return ReviewAnswer(
        _encoder.encode(ReviewOut(api_version=API_VERSION, kind="AdmissionReview", response=response)), result
    )
