"""What a release is made of, beyond the image and the chart: an SBOM, a krew manifest, man pages, one version, and the proof that a second build gives the same bytes.

Each command works on a built tree and publishes nothing; the workflow .github/workflows/release.yaml calls them.
"""
