"""Node selector terms: which nodes have the labels, or the name, that a term names. All nodes are tried at once.

Operators mean what they mean in Kubernetes 1.36 (pkg/scheduler/framework/plugins/nodeaffinity).
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt

from vgpu.scheduling.nodes.constraints import LabelRequirement, Term
from vgpu.scheduling.nodes.labels import Labels

Bools = npt.NDArray[np.bool_]
Columns = npt.NDArray[np.intp]

WHOLE: Final = re.compile("[+-]?[0-9]+")


def matches(term: Term, labels: Labels, columns: Columns) -> Bools:
    """(columns,) on which of the nodes."""
    found: Bools = np.full(len(columns), bool(term.conditions))
    for condition in term.conditions:
        found &= _by_name(condition, labels, columns) if condition.by_name else _by_label(condition, labels, columns)
    return found


def _by_name(condition: LabelRequirement, labels: Labels, columns: Columns) -> Bools:
    column = labels.column
    named: Bools = np.isin(columns, [column[name] for name in condition.values if name in column])
    match condition.operator:
        case "In":
            return named
        case "NotIn":
            return ~named
        case _:
            return np.zeros(len(columns), np.bool_)


def _by_label(condition: LabelRequirement, labels: Labels, columns: Columns) -> Bools:
    key = labels.key(condition.key)
    true = np.zeros(len(key.numbers) + 1, np.bool_)  # by the number of the value; the last one is for nodes without
    match condition.operator:
        case "In" | "NotIn":
            true[[key.numbers[value] for value in condition.values if value in key.numbers]] = True
            true ^= condition.operator == "NotIn"
        case "Exists" | "DoesNotExist":
            true[:-1] = True
            true ^= condition.operator == "DoesNotExist"
        case "Gt" | "Lt":
            sign, values = (1, -1)[condition.operator == "Lt"], condition.values
            bound = _whole(values[0]) if len(values) == 1 else None
            for value, number in key.numbers.items():
                found = _whole(value)
                true[number] = bound is not None and found is not None and sign * found > sign * bound
    on: Bools = true[key.codes[columns]]
    return on


def _whole(text: str) -> int | None:
    """As Go's ParseInt reads it: a label may be `1_0`, which is no number."""
    return int(text) if WHOLE.fullmatch(text) else None
