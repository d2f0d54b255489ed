"""Build the container images, with Docker where it answers and without any container engine where it does not.

`python -m hack.images build` makes one archive for each image in the cache, and links the newest ones in `images/current`,
where the cluster's `load` finds them. The contents of an image are in deploy/images/Dockerfile alone; this package
decides when to build it and what to build it with.
"""
