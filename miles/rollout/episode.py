"""Makes one finished group: episodes, rewards and, where asked for, the greedy baseline. Evaluation shares it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miles.errors import EpisodeError
from miles.protocols import Engine, Environment
from miles.types import Completion, Group, Sample, Sampling

Row = Mapping[str, Any]


class Scorer(Protocol):
    """Gives samples their rewards."""

    async def score(self, index: int, row: Row, samples: Sequence[Sample]) -> list[Sample]:
        """The samples in the same order with `reward` and `reward_parts` set; `index` names the row in messages."""
        ...


@dataclass(frozen=True)
class Episodes:
    """All that turns a row into a group."""

    environment: Environment
    engine: Engine
    rewards: Scorer
    sampling: Sampling
    prompt_text: Callable[[Row], str]  # the rendered prompt, for people to read

    async def group(
        self, ordinal: int, index: int, row: Row, seeds: Sequence[int], *, greedy_baseline: bool = False
    ) -> Group:
        """One scored sample for each seed; row `index` of the data is `row`.

        With `greedy_baseline` the prompt's greedy completion is scored beside them. Raises RewardError, EpisodeError,
        EngineError.
        """
        sampled, baseline = await _both(
            self._scored(index, row, self.sampling, seeds),
            self._scored(index, row, greedy(self.sampling), seeds[:1]) if greedy_baseline else None,
        )
        return Group(
            ordinal=ordinal,
            row=index,
            samples=tuple(sampled),
            prompt_text=str(self.prompt_text(row)),  # it may be of another library's kind of text
            baseline_reward=baseline[0].reward if baseline else None,
        )

    def at_least(self, version: int, on_answer: Callable[[], None]) -> Episodes:
        """The same, from weights of at least `version`; `on_answer` is called each time the engine has answered."""
        return replace(self, engine=_Watched(self.engine, version, on_answer))

    async def _scored(self, index: int, row: Row, sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        samples = await self.environment.episodes(row, self.engine, sampling, seeds)
        if len(samples) != len(seeds):
            raise EpisodeError(
                f"the environment gave {len(samples)} samples for {len(seeds)} seeds on row {index}; give one for each"
            )
        return await self.rewards.score(index, row, samples)


def greedy(sampling: Sampling) -> Sampling:
    """The same limits and stops, taking the likeliest token each time."""
    return replace(sampling, temperature=0.0)


async def _both(first: Any, second: Any | None) -> tuple[Any, Any]:
    """Both results, awaited together so that the engine can batch them; a failure cancels the other."""
    tasks = [asyncio.ensure_future(call) for call in (first, second) if call is not None]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return results[0], results[1] if len(results) == 2 else None


@dataclass(frozen=True)
class _Watched:
    """An engine that never answers with older weights and tells when it has answered."""

    engine: Engine
    version: int
    on_answer: Callable[[], None]

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        completions = await self.engine.generate(ids, n, sampling, seeds, max(self.version, min_version))
        self.on_answer()
        return completions
