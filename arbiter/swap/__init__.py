"""Memory of containers above their guarantee, in the node's memory and back."""
