"""Reading the rows of a run directory's JSON-lines files as they are: complete, torn at the end, or not there yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SCORES_FILE = "scores.jsonl"

LARGEST = 1e290
"""A number beyond this is no measurement, and a sum or difference of a few such would overflow where it is drawn."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Lines:
    """The rows of one file, and the numbers (from 1) of the lines that are no JSON object."""

    rows: list[dict[str, Any]]
    unreadable: list[int]


def read_rows(path: Path) -> Lines:
    """Every readable row of a JSON-lines file; a missing file has none. A half-written last line is unreadable."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines([], [])
    return parse_rows(data)


def parse_rows(data: bytes) -> Lines:
    rows: list[dict[str, Any]] = []
    unreadable = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        row = parse_row(line)
        if row is None:
            unreadable.append(number)
        else:
            rows.append(row)
    return Lines(rows, unreadable)


def parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_eval(row: Row) -> bool:
    return row.get("event") == "eval"


def step_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of training steps, those with a usable `step`, in file order."""
    return [row for row in rows if not is_eval(row) and value_of(row, "step") is not None]


def eval_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if is_eval(row) and value_of(row, "version") is not None]


def value_of(row: Row, key: str) -> float | None:
    """The finite number under `key`; None when it is absent or no such number, also above LARGEST in size."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= LARGEST else None


def series(rows: Sequence[Row], key: str, at: str = "step") -> list[tuple[float, float]]:
    """(place, value) of every row that has both."""
    pairs = [(value_of(row, at), value_of(row, key)) for row in rows]
    return [(place, value) for place, value in pairs if place is not None and value is not None]


def version_of(row: Row) -> int:
    """The version of weights that a row is about: an evaluation's, or the one that a step ended with."""
    value = value_of(row, "version")
    return int(value if value is not None else value_of(row, "step") or 0)


def is_recorded(row: Row) -> bool:
    """Whether a step trained on recorded answers, whose rows have a loss and no reward."""
    return value_of(row, "loss/total") is not None and value_of(row, "reward/mean") is None
