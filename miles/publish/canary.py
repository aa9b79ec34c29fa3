"""Compares what a server computes with what the learner computes, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from miles.errors import ServerFault

CAUSES = (
    "unsynced or tied weights, a stale cache of prefixes, another data type, or another model than the learner's "
    "(`miles doctor RECIPE` shows both side by side)"
)


@dataclass(frozen=True)
class Difference:
    """Of two lists of log-probabilities of the same tokens, in nat, without signs."""

    mean: float
    high: float  # 99th percentile
    worst: float

    @classmethod
    def between(cls, a: Sequence[float], b: Sequence[float]) -> Difference:
        """NaN where one of them is not finite."""
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        if not all(map(math.isfinite, gaps)):
            return cls(math.nan, math.nan, math.nan)
        ordered = sorted(gaps)
        return cls(math.fsum(gaps) / len(gaps), ordered[math.ceil(0.99 * len(gaps)) - 1], ordered[-1])


@dataclass(frozen=True)
class Tolerance(Difference):
    """Largest differences that rounding explains."""

    @classmethod
    def of(cls, dtype: str) -> Tolerance:
        """fp32 is judged by its worst token. In bf16 single tokens are far off while the mean is close (measured)."""
        return cls(1e-3, 1e-3, 1e-3) if dtype == "fp32" else cls(0.06, 0.25, math.inf)

    def holds(self, found: Difference) -> bool:
        """NaN never does."""
        return found.mean <= self.mean and found.high <= self.high and found.worst <= self.worst


class Expected:
    """The learner's log-probabilities of a canary: scored once, in the thread that may use the learner, and waited for in others."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._scored: Future[Sequence[float]] = Future()

    def score(self, score: Callable[[], Sequence[float]]) -> None:
        """Raises what `score` raises; those who wait raise it too."""
        try:
            self._scored.set_result(score())
        except BaseException as error:
            self._scored.set_exception(error)
            raise

    def logprobs(self) -> Sequence[float]:
        return self._scored.result()


def compare(served: Sequence[float], learner: Sequence[float], tolerance: Tolerance) -> float:
    """The worst difference of two lists of log-probabilities. Raises ServerFault where it is beyond the tolerance."""
    if len(served) != len(learner):
        raise ServerFault(f"it gave {len(served)} log-probabilities of a canary that has {len(learner)}")
    found = Difference.between(served, learner)
    if math.isnan(found.worst):
        raise ServerFault("its log-probabilities of the canary are not finite: its weights hold NaN or infinity")
    if not tolerance.holds(found):
        raise ServerFault(
            f"its log-probabilities of the canary differ from the learner's by {found.mean:.2g} nat on average and "
            f"{found.worst:.2g} at worst ({tolerance.mean:g} and {min(tolerance.worst, tolerance.high):g} are rounding): {CAUSES}"
        )
    return found.worst
