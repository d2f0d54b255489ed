"""What was looked at, what was wanted, what was seen: one row a check, written the moment it is known.

A row is `yes`, `no`, a `fact` of which nothing was wanted, `differs` where a difference is known and `expected` has its reason, or `not run` with the
reason: what could not be checked is in the file, too. A case that breaks off is a row of its own, and the cases after it still run.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

HEADER = ("part", "case", "check", "wanted", "seen", "ok")


class Known(NamedTuple):
    """A difference that is known: it is one only where `seen` is found in what was seen."""

    seen: str
    """A regular expression."""
    reason: str


class NotRun(Exception):
    """This case cannot run here; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    case: str
    check: str
    wanted: str
    seen: str
    ok: str


@dataclass
class Results:
    """Rows, kept and written. Without a file they are only kept."""

    file: IO[str] | None = None
    rows: list[Row] = field(default_factory=list)
    part: str = ""
    case: str = ""
    expected: Mapping[tuple[str, str, str], Known] = field(default_factory=dict)
    """(part, case, check) -> why it may answer otherwise here."""

    @classmethod
    def at(cls, path: Path, expected: Mapping[tuple[str, str, str], Known] | None = None) -> Results:
        made = cls(path.open("w", newline="", buffering=1), expected=expected or {})
        csv.writer(made.file).writerow(HEADER)  # type: ignore[arg-type]
        return made

    def check(self, check: str, wanted: object, seen: object, ok: bool | None = None) -> None:
        """`ok` left out: seen must equal wanted."""
        self._add(check, wanted, seen, "yes" if (seen == wanted if ok is None else ok) else "no")

    def at_most(self, check: str, most: float, seen: float) -> None:
        self.check(check, f"<= {_short(most)}", _short(seen), seen <= most)

    def within(self, check: str, low: float, high: float, seen: float) -> None:
        self.check(check, f"{_short(low)} to {_short(high)}", _short(seen), low <= seen <= high)

    def fact(self, check: str, seen: object) -> None:
        """For the reader; nothing was wanted."""
        self._add(check, "", seen, "fact")

    def not_run(self, check: str, why: object) -> None:
        self._add(check, "", why, "not run")

    @contextmanager
    def one(self, part: str, case: str) -> Iterator[Results]:
        """One case. What it raises becomes a row."""
        self.part, self.case = part, case
        began = time.monotonic()
        guard = _Guard(self)
        with guard:
            yield self
        self.part, self.case = part, case
        self.fact("seconds", round(time.monotonic() - began, 1))

    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.ok == "no"]

    def extend(self, other: Results) -> None:
        """The rows of a book that was kept beside this one."""
        for row in other.rows:
            self._keep(row)

    def _add(self, check: str, wanted: object, seen: object, ok: str) -> None:
        known, text = self.expected.get((self.part, self.case, check)), str(seen)
        if ok == "no" and known is not None and re.search(known.seen, text):
            ok, text = "differs", f"{text}: {known.reason}"
        row = Row(self.part, self.case, check, str(wanted), text, ok)
        self._keep(row)
        if ok in ("no", "not run"):
            print(f"{row.ok:8} {row.part}: {row.case}: {row.check}: wanted {row.wanted}, seen {row.seen}", flush=True)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        if self.file is not None:
            csv.writer(self.file).writerow((row.part, row.case, row.check, row.wanted, row.seen, row.ok))


class _Guard:
    """Turns what a case raises into a row; lets the interpreter's own exits through."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, NotRun):
            self._results.not_run("the case", error)
            return True
        if isinstance(error, Exception):
            line = trace
            while line.tb_next is not None:
                line = line.tb_next
            where = f"{Path(line.tb_frame.f_code.co_filename).name}:{line.tb_lineno}"
            text = str(error).replace("\n", " / ")[-600:]
            self._results.check("runs to its end", "yes", f"{type(error).__name__} at {where}: {text}", False)
            return True
        return False


def _short(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)
