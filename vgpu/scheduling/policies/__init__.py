"""The policies, one file each: a function of `Outcome` to keys by node, lower is better. `vgpu.scheduling.policies.registry` lists them."""
