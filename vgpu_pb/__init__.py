"""Generated from proto/ by hack/update-proto: the kubelet's device plugin and pod resources APIs. Edit nothing here."""
