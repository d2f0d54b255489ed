"""Where the API server is and how to prove who we are.

In a pod: the service account's folder, read by hand (two files; see the package's docstring for what importing the client costs).
Elsewhere: a kubeconfig file, read by the official client's loader, which knows exec plugins, OIDC and merging.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kube.errors import NoClusterError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Access:
    """One reading of the credentials. Tokens expire: `Load` is called again for a fresh one."""

    server: str
    """`https://host:port`, without a slash at the end."""
    tls: ssl.SSLContext | None
    token: str = ""
    """The whole Authorization header, or nothing when the client certificate says who we are."""
    tls_name: str | None = None
    """Name to expect in the server's certificate, when it is not the host's."""
    proxy: str | None = None


Load = Callable[[], Awaitable[Access]]


def loader(kubeconfig: str | None) -> Load:
    """How to read credentials: `kubeconfig` when given, else the pod's service account, else $KUBECONFIG or ~/.kube/config."""
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists()
    if kubeconfig is None and in_pod:
        return _in_pod
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(part).exists() for part in path.split(os.pathsep)):
        raise NoClusterError(
            f"no cluster to speak to: this is no pod with a service account, and kubeconfig {path} does not exist"
        )

    async def load() -> Access:
        return await _from_kubeconfig(path)

    return load


async def _in_pod() -> Access:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    token = (SERVICE_ACCOUNT / "token").read_text().strip()
    return Access(f"https://{host}:{port}", _tls(str(SERVICE_ACCOUNT / "ca.crt")), f"Bearer {token}")


async def _from_kubeconfig(path: str) -> Access:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import ConfigException, load_kube_config

    settings = Configuration()
    try:
        await load_kube_config(config_file=path, client_configuration=settings)  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise NoClusterError(f"kubeconfig {path} cannot be used: {error}") from error
    tls = None
    if settings.host.startswith("https:"):
        tls = _tls(settings.ssl_ca_cert)
        if settings.cert_file:
            tls.load_cert_chain(settings.cert_file, settings.key_file)
        if not settings.verify_ssl:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    token = await settings.get_api_key_with_prefix("BearerToken") or settings.get_basic_auth_token()
    token = "" if token == "Basic Og==" else token  # noqa: S105 - what the client says for no user and no password
    return Access(settings.host.rstrip("/"), tls, token or "", settings.tls_server_name or None, settings.proxy or None)


def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Trust this CA alone.

    Python 3.13 began to insist on certificate extensions that Kubernetes' installers do not all write and Go does not ask for.
    """
    tls = ssl.create_default_context(cafile=ca_file)
    tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return tls
