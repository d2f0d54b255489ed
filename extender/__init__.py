"""The scheduler extender: chooses the node and the GPUs of each pod, and which pods are preempted, for a stock kube-scheduler.

    kube-scheduler --HTTP--> server --> verbs --> filter, bind, preemption.verb
    API server --watch--> app --> preemption.coordinator --> watch_intake --> state

Calls of kube-scheduler
    server              HTTP on 127.0.0.1
    verbs               one method a verb: bytes in, bytes out
    protocol            kube-scheduler's JSON
    filter              /filter, /prioritize, /spare: choose a node and reserve there
    bind                /bind: write the Binding, and the order of pods that the kubelet could mistake for one another
    preemption/         /preempt, and evictions for pods that kube-scheduler does not preempt for
    nominate/           nominations ahead of a pod's scheduling cycle
    gangs               reservations of pods that are scheduled together

What is free
    state               allocations and reservations: the one place where free capacity changes, and where a reservation ends
    watch_intake        what the API reports of nodes and pods, applied to the state
    accounting          one allocation a pod, and the fleet that they leave
    inventories         the GPUs that each node offers
    orphans             pods that the API has lost and whose processes still run
    node_resources      CPU and other resources of nodes beside GPUs
    spread_index        pods by labels, for spread constraints
    snapshot            one moment of the state; snapshot_writer sends it as GET /snapshot

From Kubernetes objects to the values of `vgpu.scheduling`
    compact             what the caches keep of pods and nodes
    request_cache       GPU requests      preferences         preferred constraints
    node_constraints    required constraints and taints       reasons     why a node cannot take a pod

Beside the calls
    retry_after_lapse, retry_after_restart    make kube-scheduler retry pending pods
    fit_report          the Event for a pod that only the sum of a node's GPUs could take
    app                 assembles and runs all this; settings and metrics are what an operator sets and watches

The decisions are pure functions elsewhere: `vgpu.scheduling.placement` (which GPUs), `vgpu.scheduling.victims` (which victims),
`vgpu.scheduling.reservations` (how long a reservation lives, and to which pods it yields its capacity).
"""
