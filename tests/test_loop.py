"""The loop against fakes: the order of what happens, and that it stops when it should."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from miles.errors import BufferClosed
from miles.loop import train
from miles.types import PolicyUpdate


class World:
    """Learner, source, publisher and keeper in one; writes down what is asked of it."""

    def __init__(self, steps: int, stream: int = 100) -> None:
        self.version = 0
        self.events: list[object] = []
        self._steps, self._stream = steps, stream
        self._inside = 0

    def take(self, version: int) -> list:
        if version >= self._stream:
            raise BufferClosed("the stream has ended")
        self.events.append(("take", version))
        return [f"group of {version}"]

    def pack(self, groups):
        return groups

    def score(self, batches):
        self.events.append(("score", batches))
        return "signals"

    def update(self, batches, signals):
        assert self._inside, "an update must not be interrupted half-way"
        self.events.append(("update", batches, signals))
        self.version += 1
        return {"loss/total": 0.5}

    def policy_update(self) -> PolicyUpdate:
        return PolicyUpdate(self.version, lambda: iter(()))

    def publish(self, update: PolicyUpdate) -> None:
        self.events.append(("publish", update.version))

    def advance(self, version: int) -> None:
        self.events.append(("advance", version))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._inside += 1
        yield
        self._inside -= 1

    def begin(self) -> None:
        self.events.append("begin")

    def wants_more(self) -> bool:
        return self.version < self._steps

    def log_step(self, metrics) -> None:
        self.events.append(("log", self.version, metrics))

    def after_step(self) -> None:
        assert not self._inside
        self.events.append(("after", self.version))

    def end(self) -> None:
        self.events.append("end")


def run(world: World) -> list[object]:
    train(world, world, world, world)
    return world.events


def test_a_step_publishes_before_collectors_may_go_on():
    assert run(World(steps=1)) == [
        "begin",
        ("take", 0),
        ("score", ["group of 0"]),
        ("update", ["group of 0"], "signals"),
        ("publish", 1),
        ("advance", 1),
        ("log", 1, {"loss/total": 0.5}),
        ("after", 1),
        "end",
    ]


def test_each_step_takes_the_manifest_of_the_learners_version():
    events = run(World(steps=3))
    assert [e for e in events if e[0] == "take"] == [("take", 0), ("take", 1), ("take", 2)]


def test_the_end_of_the_stream_ends_the_run_as_its_steps_do():
    events = run(World(steps=100, stream=2))
    assert [e for e in events if e[0] == "log"] == [("log", 1, {"loss/total": 0.5}), ("log", 2, {"loss/total": 0.5})]
    assert events[-1] == "end"


def test_no_step_is_trained_where_none_is_wanted():
    assert run(World(steps=0)) == ["begin", "end"]


def test_an_error_of_the_learner_is_not_swallowed():
    world = World(steps=1)
    world.score = lambda batches: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(world)
    assert "end" not in world.events
