"""`python -m hack.reference [--write]`: do the pages agree with the code? Prints the difference and ends with 1 when not."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Final

from hack.reference import attacks, faults, metrics, settings
from hack.reference.page import with_tables
from hack.reference.programs import PROGRAMS

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = {
    ROOT / "docs/reference/metrics.md": metrics.tables,
    ROOT / "docs/reference/settings.md": settings.tables,
    ROOT / "docs/development/faults.md": faults.tables,
    ROOT / "docs/operations/security.md": attacks.tables,
}


def complaints() -> list[str]:
    """What no page can mend."""
    return [
        *(
            f"{name}: has an alert in hack/reference/alerts.py and no program exports it"
            for name in metrics.unknown_alerts()
        ),
        *(f"{name}: has no description" for name in settings.undescribed()),
        *(
            breach
            for program in PROGRAMS
            for row in metrics.rows(program.registry())
            for breach in metrics.breaches(program.package, row)
        ),
    ]


def difference(page: Path) -> list[str]:
    """What --write would change in a page."""
    is_, ought = page.read_text(), with_tables(page.read_text(), PAGES[page]())
    name = str(page.relative_to(ROOT))
    return list(
        difflib.unified_diff(is_.splitlines(), ought.splitlines(), name, f"{name} by the code", lineterm="", n=0)
    )


def main() -> int:
    """Check, or write."""
    parser = argparse.ArgumentParser(prog="hack/verify-reference", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages anew")
    if parser.parse_args().write:
        for page, tables in PAGES.items():
            page.write_text(with_tables(page.read_text(), tables()))
    wrong = [*complaints(), *(line for page in PAGES for line in difference(page))]
    print(
        "\n".join([*wrong, "run hack/verify-reference --write and commit the result"]) if wrong else "",
        end="\n" if wrong else "",
        file=sys.stderr,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
