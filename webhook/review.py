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
from webhook.mutate import Verdict, mutate
from webhook.rules import Rules

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


class Request(_Wire):
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
    request: Request


class Status(_Wire):
    """Why not."""

    code: int
    reason: str
    message: str


class Response(_Wire):
    """What we answer."""

    uid: str
    allowed: bool
    patch_type: str | None = None
    patch: str | None = None
    status: Status | None = None
    warnings: list[str] = []


class ReviewOut(_Wire, omit_defaults=False):
    """An AdmissionReview with a response."""

    api_version: str
    kind: str
    response: Response


@dataclass(frozen=True, slots=True)
class Answer:
    """The body to send, and what kind of answer it is."""

    body: bytes
    result: Result


_decoder = msgspec.json.Decoder(ReviewIn)
_encoder = msgspec.json.Encoder()


def review(body: bytes, rules: Rules) -> Answer:
    """Answer an AdmissionReview.

    Raises BadReview when the body is none. Never raises for what is in the pod.
    """
    request = _request(body)
    if request.operation != "CREATE" or request.sub_resource or request.resource != GroupResource(resource="pods"):
        return _allow(request, Verdict())
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


def _request(body: bytes) -> Request:
    try:
        found = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadReview(f"the body ({len(body)} bytes) is no AdmissionReview: {error}") from None
    if (found.api_version, found.kind) != (API_VERSION, "AdmissionReview"):
        raise BadReview(
            f"the body is {found.api_version[:80]} {found.kind[:80]}: it must be {API_VERSION} AdmissionReview"
        )
    return found.request


def _subject(request: Request) -> str:
    """A name for the pod in sentences; pods of a controller have none yet, only its prefix."""
    pod = request.object if isinstance(request.object, dict) else {}
    found = pod.get("metadata")
    metadata = found if isinstance(found, dict) else {}
    prefix = metadata.get("generateName")
    name = request.name or metadata.get("name") or (f"{prefix}*" if prefix else "without a name")
    return f"{request.namespace}/{name}" if request.namespace else str(name)


def _allow(request: Request, verdict: Verdict) -> Answer:
    response = Response(uid=request.uid, allowed=True, warnings=list(verdict.warnings))
    if verdict.ops:
        response.patch_type = "JSONPatch"
        response.patch = base64.b64encode(_encoder.encode(verdict.ops)).decode()
    return _answer(response, "mutated" if verdict.ops else "unchanged")


def _deny(request: Request, code: int, message: str) -> Answer:
    status = Status(code=code, reason=REASONS[code], message=message)
    return _answer(Response(uid=request.uid, allowed=False, status=status), "denied" if code == INVALID else "error")


def _answer(response: Response, result: Result) -> Answer:
    return Answer(
        _encoder.encode(ReviewOut(api_version=API_VERSION, kind="AdmissionReview", response=response)), result
    )
