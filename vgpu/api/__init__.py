"""What the components agree on: names, requests, grants, inventories, and the documents that carry them."""
