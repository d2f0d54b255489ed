"""Programs that serve the project itself: local cluster, images, demo. Nothing in the product imports them."""
