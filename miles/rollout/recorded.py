"""Makes groups of recorded answers: what `Episodes` is to sampled ones, without an engine and without rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miles.types import Group, Sample

Row = Mapping[str, Any]


class AnswerSource(Protocol):
    """Renders the answers of a row."""

    def samples(self, row: Row, version: int = 0) -> Sequence[Sample]: ...

    def prompt_text(self, row: Row) -> str: ...


@dataclass(frozen=True)
class Recorded:
    """The samples of a group are the row's answers. `version` stands where the version that sampled a token would."""

    answers: AnswerSource
    version: int = 0

    async def group(
        self, ordinal: int, index: int, row: Row, seeds: Sequence[int], *, greedy_baseline: bool = False
    ) -> Group:
        """A pure function of the row; seeds have no part in it."""
        return self.read(ordinal, index, row)

    def read(self, ordinal: int, index: int, row: Row) -> Group:
        return Group(ordinal, index, tuple(self.answers.samples(row, self.version)), self.answers.prompt_text(row))

    def at_least(self, version: int, on_answer: Callable[[], None]) -> Recorded:
        """The same for a lease whose tokens may not be older than `version`."""
        return replace(self, version=version)
