"""Roles in processes of their own, started by hand: the same run, to the bit, as in one process."""

from __future__ import annotations

import pytest

from miles.buffer.client import RemoteSource
from miles.buffer.transport import Address
from tests.buffer.serving import served

SHORT = {"eval.rows": 4, "algorithm.steps": 3, "run.checkpoint_every": 1}


def arguments(runs, role: str, url: str, changes, name: str = "far") -> list[str]:
    places = {"buffer.url": url, "buffer.run": "demo", "publish.directory": str(runs.folder / "weights")}
    _, *rest = runs.arguments(name, {**SHORT, **places, "run.collectors": 2, **changes})
    options = rest[: rest.index("--run")]
    return [role, *options, *(["--run", str(runs[name])] if role == "learn" else [])]


def start_collectors(runs, processes, url: str, changes):
    return [
        processes.start(
            [*arguments(runs, "collect", url, changes), "--worker", f"c{number}"], runs.folder / f"c{number}.log"
        )
        for number in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora.rank": 4}], ids=["full", "lora"])
def test_two_collectors_and_a_learner_equal_one_process(runs, tools, processes, changes):
    assert tools.command(*runs.arguments("near", {**SHORT, **changes})).code == 0
    with served(runs.folder / "buffer") as (url, _):
        collectors = start_collectors(runs, processes, url, changes)
        ended = processes.run(arguments(runs, "learn", url, changes), runs.folder / "learn.log")
        assert ended.code == 0, ended.out
        for collector in collectors:
            collector.join(30)
            assert collector.exitcode == 0
        with RemoteSource(Address(url, "demo")) as source:
            assert source.stats().trained == 3 * 4
    tools.same_run(runs["near"], runs["far"])
    logs = [(runs.folder / f"c{number}.log").read_text(encoding="utf-8") for number in range(2)]
    assert any("samples with version 2" in log for log in logs)  # who was quick may have had all of a step


@pytest.mark.slow
def test_a_collector_of_another_recipe_is_refused_and_one_that_is_stopped_gives_back(runs, processes):
    with served(runs.folder / "buffer") as (url, _):
        kept = start_collectors(runs, processes, url, {})
        other = arguments(runs, "collect", url, {"rollout.max_new_tokens": 5})
        stranger = processes.start(other, runs.folder / "other.log")
        ended = processes.run(arguments(runs, "learn", url, {"algorithm.steps": 40}), runs.folder / "learn.log")
        assert ended.code == 0, ended.out
        stranger.join(60)
        assert stranger.exitcode == 2
        assert "is not of this recipe" in (runs.folder / "other.log").read_text(encoding="utf-8")
        for collector in kept:
            collector.join(30)
            assert collector.exitcode == 0


def test_a_role_that_is_not_told_where_the_others_are(runs, tools):
    _, *rest = runs.arguments("far", {})
    alone = tools.command("learn", *rest)
    assert alone.code == 2
    assert "buffer.url is not set" in alone.message
    assert "publish.directory is not set" in alone.message
    collector = tools.command("collect", *rest[: rest.index("--run")])
    assert collector.code == 2
    assert "buffer.url is not set" in collector.message
