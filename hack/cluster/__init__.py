"""A real Kubernetes on one machine, from source, with no container engine.

`python -m hack.cluster up` builds the programs (Go modules under `go/`, cached), starts a control plane on the host and
one or more nodes, and waits until pods can run. `down` leaves the machine as it was found.

A node is a kubelet and a containerd in a mount namespace of their own: /var/lib/kubelet, /etc/cdi and every other folder
that a node writes (`layout.NODE_FOLDERS`) is that node's alone. So any number of nodes fit on one machine, each kubelet has
the device plugin folder that is hard-wired into it, and nothing of a node outlives it. Network, process and user
namespaces are the host's.

The package refuses to know anything about Tangram itself: it takes image archives, and the chart does the rest.
"""
