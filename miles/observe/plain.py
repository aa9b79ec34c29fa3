"""The run as aligned lines of text, one a step, for logs, pipes and terminals that cannot redraw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from miles.observe.progress import Progress
from miles.observe.rows import Row, is_recorded, value_of
from miles.observe.text import duration, number, one_line, question, tail


@dataclass(frozen=True)
class Column:
    """A head, a width, and what to print of a step; `rank` says which columns go first when there is little room."""

    head: str
    width: int
    rank: int
    cell: Callable[[Progress, Row], str]


def _value(key: str, form: Callable[[float], str]) -> Callable[[Progress, Row], str]:
    def cell(progress: Progress, row: Row) -> str:
        value = value_of(row, key)
        return form(value) if value is not None else "-"

    return cell


def _fixed(value: float) -> str:
    return f"{value:.3f}"


def _tenths(value: float) -> str:
    return f"{value:.1f}"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _place(progress: Progress, row: Row) -> str:
    total = f"/{progress.total_steps}" if progress.total_steps is not None else ""
    return f"{value_of(row, 'step') or 0:.0f}{total}"


def _left(progress: Progress, row: Row) -> str:
    return duration(progress.seconds_left) if progress.seconds_left else "-"


COLUMNS = (
    Column("step", 9, 0, _place),
    Column("reward", 7, 1, _value("reward/mean", _fixed)),
    Column("length", 7, 3, _value("completion/length_mean", _tenths)),
    Column("cut", 5, 6, _value("completion/truncated_fraction", _share)),
    Column("entropy", 8, 5, _value("entropy", _fixed)),
    Column("kl/ref", 8, 9, _value("kl/ref", _fixed)),
    Column("grad", 8, 7, _value("grad_norm", _fixed)),
    Column("samples/s", 10, 8, _value("throughput/samples_per_s", _tenths)),
    Column("step time", 10, 4, _value("time/step_s", duration)),
    Column("left", 8, 2, _left),
)


RECORDED_COLUMNS = (
    COLUMNS[0],
    Column("loss", 8, 1, _value("loss/total", _fixed)),
    Column("accuracy", 9, 3, _value("pairs/accuracy", _share)),
    *(column for column in COLUMNS if column.head in ("length", "entropy", "grad", "step time", "left")),
)
"""Of steps on recorded answers, which have no reward."""


def head_line(width: int, row: Row | None = None) -> str:
    return "".join(f"{column.head:>{column.width}}" for column in _fitting(width, row or {}))


def step_line(progress: Progress, row: Row, width: int) -> str:
    return "".join(f"{column.cell(progress, row):>{column.width}}" for column in _fitting(width, row))


def sample_line(prompt: str, completion: str, reward: float | None, width: int) -> str:
    """What the prompt asks, the completion and its reward on one line."""
    score = "unscored" if reward is None else f"reward {number(reward)}"
    room = max(width - len(score) - 16, 8)
    asked = tail(question(prompt), room // 2)
    return f"  sample: {asked} → {one_line(completion, room - len(asked))}  {score}"


def fact_lines(progress: Progress) -> Iterator[str]:
    width = max((len(str(name)) for name in progress.facts), default=0)
    for name, value in progress.facts.items():
        yield f"{name!s:<{width}}  {one_line(str(value), 10_000)}"


def _fitting(width: int, row: Row) -> list[Column]:
    columns = RECORDED_COLUMNS if is_recorded(row) else COLUMNS
    kept: list[Column] = []
    for column in sorted(columns, key=lambda column: column.rank):
        if sum(other.width for other in kept) + column.width <= width:
            kept.append(column)
    return sorted(kept, key=columns.index)
