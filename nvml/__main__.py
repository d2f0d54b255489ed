"""The program `python -m nvml`: one NVML child."""

from __future__ import annotations

from nvml.child import main

if __name__ == "__main__":
    main()
