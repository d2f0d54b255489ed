"""Which device IDs stay listed while their GPU is withdrawn: those that containers have.

A kubelet that starts again may end a running pod whose devices are gone or Unhealthy. So an ID counts as in use if any record says so: the ledger, which knows an allocation as
soon as it is made, or the kubelet's own list of before, which also has pods that the API server did not list yet or whose assignment cannot be read.
"""

from __future__ import annotations

from deviceplugin.device_ledger import DeviceLedger
from deviceplugin.pod_resources import PodResources
from deviceplugin.pods.node_pods import NodePods


class DevicesInUse:
    """Of one node: called with a resource."""

    def __init__(self, ledger: DeviceLedger, records: PodResources, pods: NodePods) -> None:
        self._ledger, self._records, self._pods = ledger, records, pods

    def __call__(self, resource: str) -> frozenset[str]:
        """Device IDs. Of the kubelet's list, which may be half a minute old, those of pods that may still be there."""
        alive = {(pod.metadata.namespace, pod.metadata.name) for pod in self._pods.pods().values() if not pod.finished}
        listed = [
            one.ids
            for one in self._records.last
            if one.resource == resource and (not self._pods.synced or (one.namespace, one.pod) in alive)
        ]
        return self._ledger.in_use(resource).union(*listed)
