"""The GPUs of the end-to-end node, as the fake driver is configured and as the tests expect them."""

from __future__ import annotations

from typing import Final

GPUS: Final = """\
gpu a100-80 count=3
mig 2 1g.10gb 1g.10gb 3g.40gb
"""
"""Two GPUs to share out and one cut into MIG instances: a mixed node."""

UNITS: Final = 80
"""gpu-mem units of one a100-80."""
