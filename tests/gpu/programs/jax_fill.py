"""JAX, with the allocator that XLA_PYTHON_CLIENT_ALLOCATOR and _PREALLOCATE name: XLA's own error, and life after it."""

from __future__ import annotations

import os

import report
from report import LIMIT_MIB, MIB

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    report.absent(str(error))


def fill(most_mib: int, block_mib: int) -> tuple[list[jax.Array], str]:
    held: list[jax.Array] = []
    try:
        while len(held) * block_mib < most_mib:
            held.append(jnp.ones((block_mib, MIB), dtype=jnp.uint8).block_until_ready())
    except Exception as error:  # noqa: BLE001  what it is is the question
        return held, "RESOURCE_EXHAUSTED" if "RESOURCE_EXHAUSTED" in str(error) else f"{report.kind(error)}: {error}"[
            :200
        ]
    return held, "none"


def main() -> None:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        if os.environ.get("LD_PRELOAD"):
            report.check("sees the GPU", "yes", str(error)[:200])
            return
        report.absent(f"jax sees no GPU: {error}"[:200])
    report.fact("version", f"jax {jax.__version__}, {device.device_kind}")
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        report.within("XLA's pool, MiB", LIMIT_MIB * 0.5, LIMIT_MIB, stats["bytes_limit"] / MIB)
    held, error = fill(LIMIT_MIB + 1024, 256)
    report.check("error past the limit", "RESOURCE_EXHAUSTED", error)
    report.fact("held at the error, MiB", len(held) * 256)
    report.elastic([(one.unsafe_buffer_pointer(), one.nbytes) for one in held])
    report.at_brim(LIMIT_MIB // 2)
    del held
    x = jnp.ones((1024, 1024), dtype=jnp.float32)
    report.check("a product after the error is right", 1024.0**3, float((x @ x).sum()))
    _, error = fill(LIMIT_MIB // 4, 256)
    report.check("a quarter of the limit after the error", "none", error)


if __name__ == "__main__":
    main()
