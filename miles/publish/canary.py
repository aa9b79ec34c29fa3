"""Compares what a server computes with what the learner computes, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles.errors import ServerFault

CAUSES = (
    "unsynced or tied weights, a stale cache of prefixes, another data type, or another model than the learner's "
    "(`miles doctor RECIPE` shows both side by side)"
)


@dataclass(frozen=True)
class Tolerance:
    """Largest differences of log-probabilities, in nat, that rounding explains."""

    mean: float
    high: float  # 99th percentile
    worst: float

    @classmethod
    def of(cls, dtype: str) -> Tolerance:
        """fp32 is judged by its worst token. In bf16 single tokens are far off while the mean is close (measured)."""
        return cls(1e-3, 1e-3, 1e-3) if dtype == "fp32" else cls(0.06, 0.25, math.inf)


def compare(served: Sequence[float], learner: Sequence[float], tolerance: Tolerance) -> float:
    """The worst difference of two lists of log-probabilities. Raises ServerFault where it is beyond the tolerance."""
    if len(served) != len(learner):
        raise ServerFault(f"it gave {len(served)} log-probabilities of a canary that has {len(learner)}")
    gaps = sorted(abs(a - b) for a, b in zip(served, learner, strict=True))
    if not all(map(math.isfinite, gaps)):
        raise ServerFault("its log-probabilities of the canary are not finite: its weights hold NaN or infinity")
    mean, high, worst = math.fsum(gaps) / len(gaps), gaps[math.ceil(0.99 * len(gaps)) - 1], gaps[-1]
    if mean > tolerance.mean or high > tolerance.high or worst > tolerance.worst:
        raise ServerFault(
            f"its log-probabilities of the canary differ from the learner's by {mean:.2g} nat on average and {worst:.2g} at worst "
            f"({tolerance.mean:g} and {min(tolerance.worst, tolerance.high):g} are rounding): {CAUSES}"
        )
    return worst
