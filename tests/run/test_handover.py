"""`engine.kind = "auto"`: when a run leaves the engine in process, when it stays, and what a measurement says of that."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from miles.errors import BadInput, EngineError
from miles.run.crossover import ON_A_GPU, Point, cache_file, crossover, measured, write
from miles.run.handover import HandOver
from miles.run.servers import Servers
from miles.types import Completion, PolicyUpdate, Sampling, VersionSpan

LENGTH = 10


class Fake:
    """An engine and a publisher at once: the version is the last one that was published here."""

    def __init__(self, name: str, version: int = 0) -> None:
        self.name, self.version, self.asked = name, version, 0

    async def generate(self, ids, n, sampling, seeds, min_version=0):
        self.asked += n
        ids = tuple(range(LENGTH))
        return [Completion(ids, (0.0,) * LENGTH, (VersionSpan(self.version, 0, LENGTH),), "length")] * n

    def publish(self, update: PolicyUpdate) -> None:
        self.version = update.version


class FakeWays:
    """Servers that open when `go` is set; `fault` stands in their way, when they are opened or when they take weights."""

    def __init__(self, fault: str = "") -> None:
        self.go, self.fault, self.open = threading.Event(), fault, 0
        self.there = Fake("vllm")

    @contextmanager
    def servers(self) -> Iterator[Servers]:
        self.go.wait(20)
        if self.fault == "opening":
            raise EngineError("no vLLM here")
        self.open += 1
        yield Servers((), Path("/none"))
        self.open -= 1

    @contextmanager
    def serving(self, servers: Servers):
        if self.fault == "serving":
            raise EngineError("it differs")
        self.there.version = 3  # what it was given
        yield self.there, self.there


async def step(both: HandOver, version: int) -> Completion:
    """One step: 4 samples, then the weights of `version`."""
    (completion, *_) = await both.generate([1], 4, Sampling(LENGTH), range(4))
    both.publish(PolicyUpdate(version, lambda: iter(())))
    return completion


def hand_over(ways: FakeWays, crossover: int | None) -> tuple[HandOver, Fake]:
    here = Fake("inprocess")
    return HandOver(here, here, ways, samples=8, crossover=crossover, start_timeout_s=5.0), here


async def test_it_leaves_when_servers_are_ready_and_never_in_the_middle_of_a_step() -> None:
    ways = FakeWays()
    both, here = hand_over(ways, 8 * LENGTH)
    first, second = await step(both, 1), await step(both, 2)  # the servers are being opened, and training goes on
    assert [one.versions[0].version for one in (first, second)] == [0, 1]
    assert both._opening is not None
    ways.go.set()
    both._opening.join()
    assert not both.served  # ready, but a step is under way
    await step(both, 3)
    assert both.served
    assert (here.asked, ways.there.asked) == (12, 0)
    assert (await step(both, 4)).versions[0].version == 3
    assert (await step(both, 5)).versions[0].version == 4
    assert (here.asked, ways.there.asked) == (12, 8)
    assert ways.open == 1
    both.close()
    assert ways.open == 0


@pytest.mark.parametrize("limit", [8 * LENGTH + 1, None])
async def test_below_the_crossover_nothing_is_started(limit: int | None) -> None:
    both, _ = hand_over(FakeWays(), limit)
    for version in range(1, 4):
        await step(both, version)
    assert both._opening is None
    both.close()


@pytest.mark.parametrize(("fault", "message"), [("opening", "no vLLM here"), ("serving", "it differs")])
async def test_what_keeps_servers_from_serving_is_said_once_and_the_run_stays(fault: str, message: str, caplog) -> None:
    ways = FakeWays(fault)
    ways.go.set()
    both, here = hand_over(ways, 1)
    for version in range(1, 6):
        await step(both, version)
        assert both._opening is not None
        both._opening.join()
    assert (here.asked, here.version, both.served) == (20, 5, False)
    assert [record.getMessage() for record in caplog.records if "stay in process" in record.getMessage()] == [
        f"rollouts stay in process: {message}"
    ]
    both.close()
    assert ways.open == 0


def test_the_crossover_is_where_vllm_wins_for_good() -> None:
    points = [
        Point(8, 8, 1.0, 2.0),
        Point(8, 64, 4.0, 3.0),
        Point(64, 64, 9.0, 9.5),
        Point(256, 64, 40.0, 20.0),
        Point(512, 64, 80.0, 40.0),
    ]
    assert crossover(points) == 256 * 64
    assert crossover(points[:3]) is None
    assert crossover([Point(8, 8, 1.0, 1.0)]) == 64
    assert crossover([*points, Point(64, 256, 40.0, 41.0)]) == 512 * 64  # of equal work one lost
    assert crossover([]) is None


def test_measurements_are_kept_by_model_and_machine(tmp_path: Path) -> None:
    file = cache_file({"XDG_CACHE_HOME": str(tmp_path)})
    assert file == tmp_path / "miles" / "engine.json"
    assert measured(file, "a", "cpu")[0] is None
    assert "run `miles bench engine RECIPE`" in measured(file, "a", "cpu")[1]
    assert measured(file, "a", "cuda")[0] == ON_A_GPU
    write(file, "a", [Point(8, 8, 2.0, 1.0)])
    write(file, "b", [Point(8, 8, 1.0, 2.0)])
    assert measured(file, "a", "cuda")[0] == 64
    assert measured(file, "b", "cuda")[0] is None  # measured: never
    assert json.loads(file.read_text())["a"]["points"] == [dataclasses.asdict(Point(8, 8, 2.0, 1.0))]
    file.write_text('{"a": {"points": [{"samples": 8}]}}')
    with pytest.raises(BadInput, match="is not what `miles bench engine` writes"):
        measured(file, "a", "cpu")
    with pytest.raises(BadInput, match=r"cannot be written .*--to"):
        write(Path("/proc/none/engine.json"), "a", [])


def test_a_run_whose_vllm_is_not_installed_stays_in_process_and_says_so_once(runs, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nobody has measured anything
    changes = {"engine__python": sys.executable, "engine__crossover": 1, "algorithm__steps": 5}
    ended = runs.train("auto", engine__kind="auto", **changes)
    assert ended.code == 0
    assert ended.out.count("rollouts stay in process: vLLM is not installed") == 1
    plain = runs.train("plain", engine__kind="auto", algorithm__steps=5)
    assert plain.code == 0
    assert "go to vLLM never: nothing was measured" in plain.out


def test_recipes_that_cannot_be_handed_over_are_refused(runs) -> None:
    ended = runs.train(engine__kind="auto", publish__kind="files")
    assert ended.code == 2
    assert 'publish.kind = "files" is one way' in ended.message
    ended = runs.train(engine__kind="auto", parallel__shard=2)
    assert "hands over within one process, and this run may have several" in ended.message
    ended = runs.train(engine__kind="auto", algorithm__correction__mode="none")
    assert "is refused with engine.kind = auto" in ended.message
