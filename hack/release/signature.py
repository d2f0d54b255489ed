"""Sign files with cosign, a throw-away key and no transparency log, and verify: what of signing can be tried before anything is public.

A release signs without a key instead, as the workflow's identity, and writes to the public transparency log.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hack.cluster.build import build
from hack.cluster.console import Steps
from hack.cluster.layout import cache_folder
from hack.cluster.programs import COSIGN

NO_LOG: Final = {"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"}
"""A signing configuration that names no services: no authority for certificates, no log, no time stamps."""
TIMEOUT_S: Final = 60
"""For one call of cosign, which reaches no network here. Guessed: a call takes under a second."""


def trial(files: Sequence[Path]) -> list[str]:
    """Sentences about what is wrong: a signature that does not verify, or one that does for another content."""
    cosign = build(cache_folder(), [COSIGN], Steps())["cosign"]
    with tempfile.TemporaryDirectory(prefix="tangram-sign-") as folder:
        scratch = Path(folder)
        _call(cosign, scratch, "generate-key-pair")
        (scratch / "no-log.json").write_text(json.dumps(NO_LOG))
        return [wrong for file in files if (wrong := _one(cosign, scratch, file))]


def _one(cosign: Path, scratch: Path, file: Path) -> str:
    bundle = str(scratch / "bundle.json")
    options = ["--yes", "--key", "cosign.key", "--signing-config", "no-log.json", "--bundle", bundle]
    _call(cosign, scratch, "sign-blob", *options, str(file.resolve()))
    if not _verifies(cosign, scratch, bundle, file.resolve()):
        return f"{file}: its signature does not verify"
    altered = scratch / "altered"
    altered.write_bytes(file.read_bytes() + b"\n")
    if _verifies(cosign, scratch, bundle, altered):
        return f"{file}: its signature verifies for another content, too"
    print(f"{file}: signed and verified, and refused with one byte more")
    return ""


def _verifies(cosign: Path, scratch: Path, bundle: str, file: Path) -> bool:
    options = ["--key", "cosign.pub", "--insecure-ignore-tlog=true", "--bundle", bundle]
    return _run(cosign, scratch, "verify-blob", *options, str(file)).returncode == 0


def _call(cosign: Path, scratch: Path, *words: str) -> None:
    done = _run(cosign, scratch, *words)
    if done.returncode:
        raise RuntimeError(f"cosign {words[0]}: ended with {done.returncode}: {done.stderr.strip()[-2000:]}")


def _run(cosign: Path, scratch: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # its own home: neither keys nor a cache of the caller's
    environment = {**os.environ, "COSIGN_PASSWORD": "", "HOME": str(scratch)}
    return subprocess.run(
        [str(cosign), *words],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
