"""Give containers the devices that their pod was assigned, and all that comes with them: one program on each GPU node.

Where to find what
    app                  the parts and how they meet; Events
    registration         serving and registering each resource with the kubelet
    service              the kubelet's device plugin API: ListAndWatch, GetPreferredAllocation, Allocate, PreStartContainer
    allocation           which pod a call is for, and which device IDs it gets (pure); device_ledger keeps what was given
    admission            PreStartContainer: whose devices these are, and the grant
    grants.grant_directories   a grant directory is written and removed here; grants.allocation_record is its record
    gpus                 the node's GPUs from NVML: health, CDI specification, inventory annotation, capacity
    pods                 the node's pods, those that the API lost (orphans), those over their limit
    upkeep               what is repaired from time to time: drift, grants of pods that are gone
"""
