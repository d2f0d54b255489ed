"""How fast kube-scheduler places pods with Tangram's extender and without, and how fast the extender knows a large cluster."""
