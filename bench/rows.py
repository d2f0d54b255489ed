"""Results of several runs and versions in one CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path


def append(path: Path, row: Mapping[str, object]) -> None:
    """After the rows of other versions. The first row names the columns."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row.keys(), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
