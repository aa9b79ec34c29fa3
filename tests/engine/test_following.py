"""An engine that follows published weights: when it takes them up, and that they stand still under a call."""

from __future__ import annotations

import asyncio

import pytest

from miles.engine.following import FollowingEngine
from miles.errors import EngineError
from miles.types import Completion, Sampling, VersionSpan

SAMPLING = Sampling(max_new_tokens=1)


class Weights:
    """`published`: versions that are there; the copy is `held`."""

    def __init__(self) -> None:
        self.published: list[int] = [0]
        self.held = -1
        self.deleted: set[int] = set()

    def newest(self) -> int | None:
        return max(self.published, default=None)

    def load(self, version: int) -> bool:
        if version in self.deleted:
            self.published.remove(version)
            self.published.append(version + 1)
            return False
        self.held = version
        return True


class Slow:
    """Answers when told to, with the version that was held at the beginning; fails where it has moved since."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.go = weights, asyncio.Event()

    async def generate(self, ids, n, sampling, seeds, min_version=0):
        version = self.weights.held
        await self.go.wait()
        assert self.weights.held == version, "the weights moved under a call"
        return [Completion((1,), (0.0,), (VersionSpan(version, 0, 1),), "length") for _ in seeds]


def version_of(completions: list[Completion]) -> int:
    return completions[0].versions[0].version


def test_a_new_version_waits_for_calls_under_way_and_later_calls_wait_for_it():
    async def main() -> list[int]:
        weights = Weights()
        engine = Slow(weights)
        following = FollowingEngine(engine, weights, 5.0)
        first = asyncio.create_task(following.generate((1,), 1, SAMPLING, [1]))
        await asyncio.sleep(0.01)
        weights.published.append(1)
        later = [asyncio.create_task(following.generate((1,), 1, SAMPLING, [1])) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert weights.held == 0
        engine.go.set()
        return [version_of(await task) for task in (first, *later)]

    assert asyncio.run(main()) == [0, 1, 1]


def test_what_was_deleted_in_the_meantime_is_passed_over_and_a_learner_may_go_back():
    async def main() -> list[int]:
        weights = Weights()
        engine = Slow(weights)
        engine.go.set()
        following = FollowingEngine(engine, weights, 5.0)
        weights.published, weights.deleted = [4], {4}
        versions = [version_of(await following.generate((1,), 1, SAMPLING, [1]))]
        weights.published = [2]  # the learner went back to a checkpoint
        versions.append(version_of(await following.generate((1,), 1, SAMPLING, [1])))
        return versions

    assert asyncio.run(main()) == [5, 2]


def test_a_version_that_does_not_come_is_an_error():
    async def main() -> None:
        weights = Weights()
        following = FollowingEngine(Slow(weights), weights, 0.1)
        await following.generate((1,), 1, SAMPLING, [1], min_version=3)

    with pytest.raises(EngineError, match="version 3 or newer are asked for, but the newest published ones are 0"):
        asyncio.run(main())
