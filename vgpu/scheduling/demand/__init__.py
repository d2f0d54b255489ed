"""What the pods to come are likely to request, and which GPUs could serve them."""
