"""What stands on the other side of the collector's seams, in memory: a sink, a stream, an engine, an environment, rewards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from miles.algo import AlgorithmRow
from miles.config import schema
from miles.errors import LeaseLost
from miles.rollout.collect import Collector
from miles.rollout.episode import Episodes
from miles.types import Completion, Group, Lease, Prompt, Sample, Sampling, Segment, VersionSpan


@dataclass
class FakeSink:
    """Hands out ordinals below `total` while fewer than `credit` are leased or finished; given-back ones first."""

    total: int
    credit: int
    version: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    dropped: dict[int, tuple[str, Group | None]] = field(default_factory=dict)
    held: dict[int, Lease] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    renewals: list[list[int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # ordinals whose leases are taken away
    issued: int = 0
    leases: int = 0

    async def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        given = []
        while len(given) < n and (self.returned or self._room()):
            if self.returned:
                ordinal = self.returned.pop(0)
            else:
                ordinal, self.issued = self.issued, self.issued + 1
            self.leases += 1
            self.held[ordinal] = Lease(ordinal, f"lease-{self.leases}", ttl, self.version)
            given.append(self.held[ordinal])
        return given

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        self.renewals.append([lease.ordinal for lease in leases])
        for ordinal in self.lost & self.held.keys():
            del self.held[ordinal]
        return [lease for lease in leases if self.held.get(lease.ordinal) == lease]

    async def put(self, lease: Lease, group: Group) -> None:
        self._end(lease)
        self.groups[lease.ordinal] = group

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        self._end(lease)
        self.dropped[lease.ordinal] = (reason, group)

    async def release(self, lease: Lease) -> None:
        self._end(lease)
        self.returned.append(lease.ordinal)

    def _room(self) -> bool:
        return self.issued < self.total and len(self.held) + len(self.groups) + len(self.returned) < self.credit

    def _end(self, lease: Lease) -> None:
        if lease.ordinal in self.lost or self.held.get(lease.ordinal) != lease:
            raise LeaseLost(f"the lease of ordinal {lease.ordinal} is not held")
        del self.held[lease.ordinal]


@dataclass
class FakeStream:
    """Every ordinal is a row, round and round."""

    rows: int

    def at(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, ordinal // self.rows, ordinal % self.rows)


@dataclass
class FakeEngine:
    """Four digits from each seed; always 4444 when greedy. Keeps what it was asked and how many calls ran at a time."""

    version: int = 0
    asked: list[tuple[Sampling, tuple[int, ...], int]] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        self.asked.append((sampling, tuple(seeds), min_version))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        version = max(self.version, min_version)
        return [self._completion(sampling, seed, version) for seed in seeds]

    def _completion(self, sampling: Sampling, seed: int, version: int) -> Completion:
        draw = random.Random(seed)
        ids = tuple(4 if sampling.temperature == 0 else draw.randrange(10) for _ in range(4))
        return Completion(ids, (-1.0,) * 4, (VersionSpan(version, 0, 4),), "length")


class FakeEnvironment:
    """One turn whose text is the digits of the answer. `fail` may raise for a row."""

    def __init__(self, fail: Callable[[Mapping[str, Any]], None] = lambda row: None) -> None:
        self.fail = fail

    async def episodes(
        self, row: Mapping[str, Any], engine: FakeEngine, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        prompt = (90, 91)
        completions = await engine.generate(prompt, len(seeds), sampling, seeds)
        self.fail(row)
        return [
            Sample(
                segments=(
                    Segment(
                        prompt + c.token_ids,
                        (False, False, True, True, True, True),
                        (0.0, 0.0, *c.logprobs),
                        (-1, -1, *(c.versions[0].version,) * 4),
                    ),
                ),
                stop_reason=c.stop_reason,
                text="".join(map(str, c.token_ids)),
            )
            for c in completions
        ]


class FakeRewards:
    """`reward(row, text)` for each sample; it may raise, wait, or give None."""

    def __init__(self, reward: Callable[[Mapping[str, Any], str], Any]) -> None:
        self.reward = reward

    async def score(self, index: int, row: Mapping[str, Any], samples: Sequence[Sample]) -> list[Sample]:
        scored = []
        for sample in samples:
            value = self.reward(row, sample.text)
            if asyncio.iscoroutine(value):
                value = await value
            scored.append(replace(sample, reward=value, reward_parts={"digits": value}))
        return scored


GRPO = AlgorithmRow("grpo", "group_standardized", "broadcast", "clipped", "test", group_centred=True)


def first_digit(row: Mapping[str, Any], text: str) -> float:
    return float(text[0])


@dataclass
class World:
    """A collector and everything around it."""

    sink: FakeSink
    engine: FakeEngine
    episodes: Episodes
    recipe: schema.Recipe
    collector: Collector

    def run(self) -> int:
        return asyncio.run(self.collector.run())


@pytest.fixture
def make_world() -> Callable[..., World]:
    def make(
        *,
        reward: Callable[[Mapping[str, Any], str], Any] = first_digit,
        fail: Callable[[Mapping[str, Any]], None] = lambda row: None,
        row: AlgorithmRow = GRPO,
        total: int = 6,
        credit: int = 6,
        groups_per_step: int = 4,
        clock: Callable[[], float] = lambda: 0.0,
        **sections: Any,
    ) -> World:
        recipe = schema.Recipe(
            algorithm=schema.Algorithm(groups_per_step=groups_per_step),
            rollout=schema.Rollout(group_size=4, max_new_tokens=4),
            **sections,
        )
        sink, engine = FakeSink(total, credit), FakeEngine()
        episodes = Episodes(
            FakeEnvironment(fail), engine, FakeRewards(reward), Sampling(4), lambda r: f"prompt {r['name']}"
        )
        rows = [{"name": i} for i in range(3)]
        collector = Collector(sink, FakeStream(3), rows, episodes, recipe=recipe, row=row, clock=clock)
        return World(sink, engine, episodes, recipe, collector)

    return make
