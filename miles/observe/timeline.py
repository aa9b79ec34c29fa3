"""Who did what when: the spans of the learner and of every collector, and how long each waited for another.

RUN/timeline.jsonl has one row a step: `{"step", "learner": [[name, start, end], ...], "groups": [[ordinal, worker, start,
end, reason], ...]}`, in seconds since the epoch. The learner's spans are by its own clock, the groups (leased to stored) by the
buffer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.observe.rows import LARGEST, Row, value_of

TIMELINE_FILE = "timeline.jsonl"
WAITING = "collect"
"""The learner's span in which it has no groups yet: it waits for collectors, or collects itself where there are no others."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that was done from `start` to `end`, seconds since the epoch, for one step."""

    name: str
    start: float
    end: float
    step: int


@dataclass(frozen=True)
class Wait:
    """How long a role did nothing, of the time that is looked at."""

    role: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Timeline:
    """The spans of some steps in a row. A collector's span is one group; the name says why it was dropped, or nothing."""

    learner: Sequence[Span] = ()
    collectors: Mapping[str, Sequence[Span]] = field(default_factory=dict)

    @property
    def window(self) -> Interval:
        """From the first to the last thing that the learner did."""
        return min(span.start for span in self.learner), max(span.end for span in self.learner)

    @property
    def steps(self) -> tuple[int, int]:
        numbers = [span.step for span in self.learner]
        return min(numbers), max(numbers)

    @property
    def ready(self) -> list[tuple[float, int]]:
        """(time, groups that are stored and not taken by the learner yet), wherever the number changes."""
        taken = {span.step: span.end for span in self.learner if span.name == WAITING}
        groups = [span for spans in self.collectors.values() for span in spans if not span.name]
        return levels([(group.end, taken[group.step]) for group in groups if group.end < taken.get(group.step, 0.0)])

    def waits(self) -> list[Wait]:
        """Of the learner, the time until it had its groups; of a collector, the time without a group under way."""
        left, right = self.window
        whole = max(right - left, 1e-9)
        idle = sum(span.end - span.start for span in self.learner if span.name == WAITING)
        found = [Wait("learner", idle, idle / whole)]
        for worker, spans in self.collectors.items():
            idle = whole - sum(end - start for start, end in merged(_within(spans, left, right)))
            found.append(Wait(worker, max(idle, 0.0), max(idle, 0.0) / whole))
        return found


def timeline_of(rows: Sequence[Row], steps: int | None = None) -> Timeline | None:
    """The timeline of the last `steps` rows; None where they have none. What is no span is left out."""
    learner: list[Span] = []
    collectors: dict[str, list[Span]] = {}
    for row in rows if steps is None else rows[-steps:]:
        step = int(value_of(row, "step") or 0)
        learner += (Span(str(name), start, end, step) for name, start, end in _lists(row.get("learner"), 3, 1))
        for _, worker, start, end, reason in _lists(row.get("groups"), 5, 2):
            collectors.setdefault(str(worker), []).append(Span(str(reason or ""), start, end, step))
    return Timeline(learner, dict(sorted(collectors.items()))) if learner else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out


def levels(intervals: Iterable[Interval]) -> list[tuple[float, int]]:
    """(time, intervals that hold it) wherever that number changes, in order."""
    changes: dict[float, int] = {}
    for start, end in intervals:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    out, level = [], 0
    for time, change in sorted(changes.items()):
        if change:
            level += change
            out.append((time, level))
    return out


def _within(spans: Iterable[Span], left: float, right: float) -> list[Interval]:
    cut = ((max(span.start, left), min(span.end, right)) for span in spans)
    return [(start, end) for start, end in cut if start < end]


def _lists(found: Any, length: int, first: int) -> list[list[Any]]:
    """The lists of this length whose places `first` and `first + 1` are a start and an end."""
    if not isinstance(found, list):
        return []
    return [
        each for each in found if isinstance(each, list) and len(each) == length and _ordered(*each[first : first + 2])
    ]


def _ordered(start: Any, end: Any) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (start, end))
    return numbers and 0 <= start <= end <= LARGEST
