"""The programs that run once: etcd, the API server, the controllers, the scheduler, the service proxy.

etcd does not sync to disk, so its data is only as old as its process: a cluster whose etcd died is made anew, never
continued (see `up`).
"""

from __future__ import annotations

from pathlib import Path

from hack.cluster import settings
from hack.cluster.layout import API_PORT, ETCD_PEER_PORT, ETCD_PORT, SERVICE_NETWORK, Layout
from hack.cluster.processes import Program

NAMES = ("etcd", "apiserver", "controller-manager", "scheduler", "proxy")
"""In the order of starting."""


def write_settings(layout: Layout) -> None:
    cni = layout.settings / "cni"
    cni.mkdir(parents=True, exist_ok=True)
    (cni / "10-tangram.conflist").write_text(settings.cni(layout))
    (layout.settings / "proxy.json").write_text(settings.proxy(layout))


def etcd(layout: Layout) -> Program:
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    command = [
        str(layout.bin / "etcd"),
        f"--data-dir={layout.state / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--log-level=warn",
    ]
    return Program("etcd", command)


def apiserver(layout: Layout) -> Program:
    """`enable-aggregator-routing` makes webhook calls go to endpoints' addresses: no DNS and no proxy on the way."""
    pki = layout.pki
    command = [
        str(layout.bin / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
        "--bind-address=0.0.0.0",
        f"--advertise-address={layout.node(1).address}",
        f"--secure-port={API_PORT}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--enable-aggregator-routing",
        "--allow-privileged",
        "--profiling=false",
    ]
    return Program("apiserver", command)


def controller_manager(layout: Layout) -> Program:
    pki = layout.pki
    command = [
        str(layout.bin / "kube-controller-manager"),
        f"--kubeconfig={layout.settings / 'controller-manager.kubeconfig'}",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--controllers=*,-nodeipam",
        "--profiling=false",
    ]
    return Program("controller-manager", command)


def scheduler(layout: Layout) -> Program:
    command = [
        str(layout.bin / "kube-scheduler"),
        f"--kubeconfig={layout.settings / 'scheduler.kubeconfig'}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--profiling=false",
    ]
    return Program("scheduler", command)


def proxy(layout: Layout) -> Program:
    command = [str(layout.bin / "kube-proxy"), f"--config={layout.settings / 'proxy.json'}"]
    return Program("proxy", command)


def remove_data(layout: Layout) -> list[Path]:
    """Folders of which no trace may be left before a new etcd starts."""
    return [layout.state / "etcd", layout.state / "pod-addresses"]
