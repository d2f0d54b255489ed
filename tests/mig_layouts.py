"""Layouts of MIG in the format of mig-parted, for tests: of the GPU with index 1, which is of a model with 3g.40gb."""

LAYOUTS = """\
version: v1
mig-configs:
  halves:
    - devices: [1]
      mig-enabled: true
      mig-devices: {"3g.40gb": 2}
  mixed:
    - devices: [1]
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "3g.40gb": 1}
"""
