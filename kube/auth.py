"""Address of the API server, and the credentials for it.

In a pod: the service account's folder, read by hand (two files; see the package's docstring for what importing the client costs).
Elsewhere: a kubeconfig file, read by the official client's loader, which supports exec plugins, OIDC and merging.

Both are read again and again, since tokens, certificates and the cluster's CA rotate. The same file contents give the same TLS context.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kube.errors import NoClusterError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
"""`b64token` of RFC 6750: what may stand after `Bearer`."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """One reading of the credentials. They rotate: `Load` is called again for fresh ones."""

    server: str
    """`https://host:port`, without a slash at the end."""
    tls: ssl.SSLContext | None
    token: str = ""
    """The whole Authorization header, or nothing when a client certificate authenticates."""
    tls_name: str | None = None
    """Name to expect in the server's certificate, when it is not the host's."""
    proxy: str | None = None


Load = Callable[[], Awaitable[Credentials]]
"""Raises NoClusterError or OSError where the credentials cannot be read."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a TLS context is made from: paths of PEM files."""

    ca: str | None
    """None: the CAs that the system trusts."""
    cert: str | None = None
    key: str | None = None
    verify: bool = True


class TlsContexts:
    """The TLS context of some files, made anew only when their contents have changed: a new context means new connections."""

    def __init__(self) -> None:
        self._made: tuple[object, ssl.SSLContext] | None = None

    def of(self, files: TlsFiles) -> ssl.SSLContext:
        """Raises OSError when a file cannot be read or is no PEM file."""
        # contents first: of a file that changes meanwhile the next reading finds the change
        contents = files, [Path(path).read_bytes() for path in (files.ca, files.cert, files.key) if path]
        if self._made is None or self._made[0] != contents:
            self._made = contents, _tls(files)
        return self._made[1]


def loader(kubeconfig: str | None) -> Load:
    """How to read credentials: `kubeconfig` when given, else the pod's service account, else $KUBECONFIG or ~/.kube/config."""
    contexts = TlsContexts()
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists()
    if kubeconfig is None and in_pod:

        async def load_in_pod() -> Credentials:
            return _in_pod(contexts)

        return load_in_pod
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(part).exists() for part in path.split(os.pathsep)):
        raise NoClusterError(
            f"no cluster to connect to: this is no pod with a service account, and kubeconfig {path} does not exist"
        )

    async def load() -> Credentials:
        return await _from_kubeconfig(path, contexts)

    return load


def _in_pod(contexts: TlsContexts) -> Credentials:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    token = (SERVICE_ACCOUNT / "token").read_bytes().strip()
    if not _TOKEN.fullmatch(token):
        raise NoClusterError(f"{SERVICE_ACCOUNT / 'token'} is no bearer token: {len(token)} bytes")
    tls = contexts.of(TlsFiles(str(SERVICE_ACCOUNT / "ca.crt")))
    return Credentials(f"https://{host}:{port}", tls, f"Bearer {token.decode()}")


async def _from_kubeconfig(path: str, contexts: TlsContexts) -> Credentials:
    try:
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config import ConfigException, load_kube_config
        from yaml import YAMLError
    except ImportError as error:
        raise NoClusterError(
            f"kubeconfig {path} cannot be read without Kubernetes' client ({error}): install tangram[kubeconfig]"
        ) from None

    settings = Configuration()
    try:
        await load_kube_config(config_file=path, client_configuration=settings)  # type: ignore[no-untyped-call]
    except (ConfigException, YAMLError, ValueError) as error:
        raise NoClusterError(f"kubeconfig {path} cannot be used: {error}") from error
    tls = None
    if settings.host.startswith("https:"):
        tls = contexts.of(
            TlsFiles(settings.ssl_ca_cert, settings.cert_file, settings.key_file, verify=settings.verify_ssl)
        )
    token = await settings.get_api_key_with_prefix("BearerToken") or settings.get_basic_auth_token()
    token = "" if token == "Basic Og==" else token  # noqa: S105 - what the client returns for no user and no password
    return Credentials(
        settings.host.rstrip("/"), tls, token or "", settings.tls_server_name or None, settings.proxy or None
    )


def _tls(files: TlsFiles) -> ssl.SSLContext:
    """Trust this CA alone.

    Python 3.13 began to insist on certificate extensions that Kubernetes' installers do not all write and Go does not require.
    """
    tls = ssl.create_default_context(cafile=files.ca)
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if files.cert:
        tls.load_cert_chain(files.cert, files.key)
    if not files.verify:
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    return tls
