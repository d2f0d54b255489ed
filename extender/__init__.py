"""Which node and which GPU: filter and bind for a stock kube-scheduler.

settings    what an operator sets
wire        the scheduler's JSON
reasons     why a node cannot take a pod, as the scheduler shows it
claims      who holds what on which GPU; one claim a pod
holds, plans    how room that is set aside is taken and yielded; `vgpu.scheduling.reservations` says for whom and how long
orphans     claims of pods that the API has lost and whose processes run on, as their nodes name them
small       what the caches keep of pods and nodes
state       pods and nodes as the watch tells of them -> claims; the one writer
filtering   the filter verb      binding     the bind verb
retrying    has kube-scheduler try pods again when a reservation lapses
reporting   tells a pod that no single GPU has room for it, though a node's together have
verbs       bytes in, bytes out, every error in the answer
snapshots   GET /snapshot, in pieces
metrics, server, running        what operators look at, HTTP, start and stop
"""
