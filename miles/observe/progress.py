"""Where a run stands, as its rows tell it: what the live view, `watch` and the plain lines all show."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from miles.observe.rows import Row, value_of
from miles.observe.text import number

RECENT_STEPS = 10


@dataclass(frozen=True)
class ShownSample:
    """One completion as text; `reward` None: it could not be scored."""

    prompt: str
    completion: str
    reward: float | None


@dataclass
class Progress:
    """What has been seen of a run so far. `total_steps` None: the run ends with its data."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    started_version: int = 0
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    timeline: list[Row] = field(default_factory=list)  # of the last steps
    sample: ShownSample | None = None

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return int(value_of(self.steps[-1], "step") or 0) if self.steps else self.started_version

    @property
    def seconds_left(self) -> float | None:
        """Steps left times the median of the last steps' wall-clock time; None while nothing tells."""
        if self.total_steps is None or not self.steps:
            return None
        return max(self.total_steps - self.step, 0) * median(times) if (times := self._step_times()) else None

    @property
    def elapsed(self) -> float | None:
        """Seconds from the start of the first step that is known to the end of the last, evaluations included."""
        first, last = (value_of(row, "time") for row in (self.steps[0], self.steps[-1])) if self.steps else (None, None)
        if first is None or last is None:
            return None
        return last - first + (value_of(self.steps[0], "time/step_s") or 0.0)

    @property
    def usual_step_s(self) -> float | None:
        times = self._step_times()
        return median(times) if times else None

    def _step_times(self) -> list[float]:
        """`time/step_s` of the last steps, or where rows have none the time between them."""
        recent = self.steps[-RECENT_STEPS:]
        measured = [value for row in recent if (value := value_of(row, "time/step_s")) is not None]
        stamps = [value for row in recent if (value := value_of(row, "time")) is not None]
        return measured or [after - before for before, after in itertools.pairwise(stamps) if after >= before]


def eval_text(row: Row) -> str:
    """`0.981 ± 0.011 sampled, 1 greedy, 160 samples`, or `97.2% of the pairs right, loss 0.121`, as far as measured."""
    mean, error = value_of(row, "eval/reward/mean"), value_of(row, "eval/standard_error")
    greedy, samples = value_of(row, "eval/reward/greedy"), value_of(row, "eval/samples")
    parts = []
    if mean is not None:
        parts.append(f"{mean:.3f}{f' ± {error:.3f}' if error is not None else ''} sampled")
    if greedy is not None:
        parts.append(f"{greedy:.3f} greedy")
    if samples is not None:
        parts.append(f"{number(samples)} samples")
    accuracy, loss = value_of(row, "eval/pairs/accuracy"), value_of(row, "eval/loss")
    if accuracy is not None:
        parts.append(f"{accuracy:.1%} of the pairs right")
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    return ", ".join(parts) or "no score"


def first_and_last(rows: Sequence[Row], key: str) -> tuple[float, float] | None:
    """The first and the last value under `key`; None where it was never measured."""
    values = [value for row in rows if (value := value_of(row, key)) is not None]
    return (values[0], values[-1]) if values else None
