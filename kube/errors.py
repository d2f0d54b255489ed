"""What goes wrong in calls to the Kubernetes API.

TangramError
├── ApiError          the API refused, or could not be reached (status 0)
└── NoClusterError    there is no cluster to connect to: neither a service account nor a kubeconfig file
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from vgpu.api.errors import TangramError


class NoClusterError(TangramError):
    """Neither a service account nor a kubeconfig file names the cluster."""


class ApiError(TangramError):
    """A call to the API that was refused, or never answered.

    `status` is the HTTP status, 0 when no answer came; `reason` is Kubernetes' own word (`NotFound`, `Conflict`, `Expired`);
    `message` its sentence. The text names verb and path.
    """

    def __init__(
        self, status: int, reason: str, message: str, *, verb: str = "", path: str = "", retry_after_s: float = 0.0
    ) -> None:
        self.status, self.reason, self.message = status, reason, message
        self.verb, self.path, self.retry_after_s = verb, path, retry_after_s
        super().__init__(f"{verb} {path}: {f'{status} ' if status else ''}{reason}: {message}".strip())

    @property
    def not_found(self) -> bool:
        """The object does not exist, or no longer."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def conflict(self) -> bool:
        """The object exists already, was changed meanwhile, or (a Binding) is bound already."""
        return self.status == HTTPStatus.CONFLICT

    @property
    def gone(self) -> bool:
        """The resource version or continue token is too old: list again."""
        return self.status == HTTPStatus.GONE

    @property
    def unauthorized(self) -> bool:
        """The token was not accepted: read it again."""
        return self.status == HTTPStatus.UNAUTHORIZED

    @property
    def transient(self) -> bool:
        """No answer, too many requests, or an error of the server: the same call may succeed later."""
        return self.status in (0, HTTPStatus.TOO_MANY_REQUESTS) or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


class ApiStatus(msgspec.Struct, frozen=True):
    """`kind: Status`, as the API answers when it refuses."""

    code: int = 0
    reason: str = ""
    message: str = ""


TEXT_LIMIT = 500
"""Characters of an answer that is no Status, such as a proxy's page, that an error repeats. Guessed."""


def api_error(status: int, body: bytes, *, verb: str, path: str, retry_after: str = "") -> ApiError:
    """The error that an answer with this HTTP status and body stands for."""
    try:
        answer = msgspec.json.decode(body, type=ApiStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        answer = ApiStatus(message=body[:TEXT_LIMIT].decode(errors="replace"))
    reason = answer.reason or (HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown")
    wait_s = float(retry_after) if retry_after.isdigit() else 0.0
    return ApiError(status, reason, answer.message, verb=verb, path=path, retry_after_s=wait_s)
