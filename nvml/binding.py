"""NVIDIA's own bindings, under a name that the type checker lets pass: they carry no types."""

from __future__ import annotations

from typing import Any

import pynvml

nv: Any = pynvml
