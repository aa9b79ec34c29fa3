"""Whole runs on two ranks: the same as on one, killed and restarted, stopped by a signal and gone on with on one."""

from __future__ import annotations

import signal

import pytest
from safetensors.torch import load_file

from miles.learn import checkpoint
from miles.learn.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

TWO = {"parallel.shard": 2, "algorithm.steps": 4, "run.checkpoint_every": 2, "run.keep_checkpoints": 5}
HELD_OUT = {"data.source": "task:addition", "eval.rows": 3, "eval.samples": 2, "eval.every": 2}

REWARDS = '''
"""The call KILL_AT on rank KILL_RANK sends KILL_WITH to itself, or to the process that started it; once for each MARK."""

import itertools
import os
import pathlib

calls = itertools.count(1)


def reward(prompts, completions, **columns):
    if os.environ.get("RANK") == os.environ.get("KILL_RANK") and next(calls) == int(os.environ.get("KILL_AT", 0)):
        mark = pathlib.Path(os.environ["MARK"])
        if not mark.exists():
            mark.touch()
            to = os.getpid() if os.environ["KILL_WHOM"] == "rank" else os.getppid()
            os.kill(to, int(os.environ["KILL_WITH"]))
    return [float(sum(map(ord, text)) % 3) for text in completions]
'''


@pytest.fixture(scope="module")
def world(tmp_path_factory, tools, processes):
    """Starts runs of one recipe, in one folder; `whole` is the one that nothing happens to."""
    runs = tools.runs(tmp_path_factory.mktemp("ranks"))
    runs.rewards.write_text(REWARDS, encoding="utf-8")

    def train(name: str, changes: dict, resume: bool = False, **environ: str):
        given = {"MARK": str(runs.folder / f"mark-{name}"), **environ}
        return processes.run(
            runs.arguments(name, {**TWO, **HELD_OUT, **changes}, resume), runs.folder / f"log-{name}", environ=given
        )

    ended = train("whole", {})
    assert ended.code == 0, ended.out
    return runs, train


def kill(whom: str, signum: int) -> dict[str, str]:
    """In the third step of four: an evaluation, at the start and after the second, has 2 calls on rank 1, and so has a step."""
    return {"KILL_RANK": "1", "KILL_AT": "10", "KILL_WITH": str(int(signum)), "KILL_WHOM": whom}


def close(one: dict, other: dict) -> bool:
    given = {
        key: value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in one.items()
    }
    return other == given


@pytest.mark.parametrize("weights", [{}, {"lora.rank": 4, "learner.learning_rate": 1e-2}])
def test_a_model_with_files_is_read_in_parts_and_trains_as_on_one_rank(world, tools, tmp_path, weights):
    runs, train = world
    folder = tmp_path / "model"
    tiny_model("llama", tied=False, seed=4).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(folder)
    # With a smaller eps Adam makes of a gradient that is nothing but rounding a step like any other.
    changes = {"model.name": str(folder), "algorithm.steps": 2, "learner.eps": 1e-4, **weights}
    name = f"parts-{len(weights)}"
    for ranks in (1, 2):
        assert train(f"{name}-{ranks}", {**changes, "parallel.shard": ranks}).code == 0
    pairs = zip(tools.rows(runs[f"{name}-1"]), tools.rows(runs[f"{name}-2"]), strict=True)
    assert all(close(one, other) for one, other in pairs)
    files = [load_file(next((runs[f"{name}-{ranks}"] / "final").glob("*model.safetensors"))) for ranks in (1, 2)]
    assert files[0].keys() == files[1].keys()
    assert all((tensor - files[1][key]).abs().max() < 1e-5 for key, tensor in files[0].items())


def test_two_ranks_train_as_one_does_and_leave_one_model(world, tools):
    runs, train = world
    assert train("alone", {"parallel.shard": 1}).code == 0
    pairs = zip(tools.rows(runs["alone"]), tools.rows(runs["whole"]), strict=True)
    assert all(close(one, other) for one, other in pairs)
    step = runs["whole"] / "checkpoints" / "step_000004"
    assert (step / "model-00001-of-00002.safetensors").exists()
    tensors, _ = checkpoint.load(step)
    alone, _ = checkpoint.load(runs["alone"] / "checkpoints" / "step_000004")
    for name, tensor in alone["model"].items():
        assert tensors["model"][name].sub(tensor).abs().max() < 1e-5
    replayed = tools.command("replay", str(runs["whole"]))
    assert replayed.code == 2
    assert "trained on 2 ranks (parallel.shard = 2 x parallel.replicate = 1)" in replayed.message
    logs = runs["whole"] / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["learner-0.log", "learner-1.log"]
    assert "rank 1 of 2 begins step 4" in (logs / "learner-1.log").read_text(encoding="utf-8")


def test_a_killed_rank_ends_the_run_with_its_last_lines_and_other_ranks_go_on(world, tools):
    runs, train = world
    ended = train("killed", {}, **kill("rank", signal.SIGKILL))
    assert ended.code == 1
    assert ended.message.startswith("miles: rank 1 of 2 was ended by SIGKILL (out of memory, or someone's kill)")
    assert "learner-1.log" in ended.message
    assert "rank 1 of 2 begins step" in ended.message
    assert (runs["killed"] / "checkpoints" / "LATEST").read_text() == "step_000002\n"
    assert train("killed", {"parallel.shard": 1}, resume=True).code == 0
    pairs = zip(tools.rows(runs["whole"]), tools.rows(runs["killed"]), strict=True)
    assert all(close(one, other) for one, other in pairs)


def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_nothing_had_happened(world, tools):
    runs, train = world
    ended = train("restarted", {"run.restarts": 1}, **kill("rank", signal.SIGKILL))
    assert ended.code == 0, ended.out
    assert "all ranks start again (1 of run.restarts = 1)" in ended.out
    tools.same_run(runs["whole"], runs["restarted"])


def test_sigterm_leaves_a_whole_checkpoint_of_all_ranks(world, tools):
    runs, train = world
    ended = train("stopped", {}, **kill("starter", signal.SIGTERM))
    assert ended.code == 143, ended.out
    assert "stopped by a signal; a checkpoint is in" in ended.out
    assert checkpoint.newest(runs["stopped"] / "checkpoints") is not None
    assert train("stopped", {}, resume=True).code == 0
    tools.same_run(runs["whole"], runs["stopped"])


def test_bad_input_that_only_the_ranks_can_see_is_one_paragraph(world):
    runs, train = world
    ended = train("bad", {"lora.rank": 2, "lora.targets": ["nothing_of_that_name"]})
    assert ended.code == 2
    assert "nothing_of_that_name" in ended.message
    assert not runs["bad"].exists()
