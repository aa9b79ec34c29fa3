"""What a user may get wrong: one paragraph that names the place, the value and the way out, and the right exit code."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


GOOD = [{"prompt": f"{i} =", "answer": i} for i in range(10)]
LONG = {"prompt": "1 + " * 300, "answer": 1}


# --- known before any model is loaded: exit code 2, and nothing is written ----------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm__stps": 3}, ["algorithm.stps = \"3\"", "the nearest is algorithm.steps"]),
        ({"data__epochs": 2}, ["algorithm.steps = 2 and data.epochs = 2", "leave one of them out"]),
        ({"learner__minibatches": 3}, ["learner.minibatches = 3 does not divide algorithm.groups_per_step = 4", "2 or 4"]),
        ({"algorithm__steps": 0}, ["algorithm.steps = 0", "an integer >= 1"]),
        ({"lora__rank": 0}, ["lora.rank = 0", "an integer >= 1"]),
        ({"learner__learning_rate": "fast"}, ['learner.learning_rate = "fast"', "a number >= 0"]),
        ({"rollout__group_size": 1}, ["rollout.group_size must be >= 2 for grpo, got 1", "raise rollout.group_size"]),
        ({"model__name": "./no/such/model"}, ["model.name = ./no/such/model does not exist", "a folder with a config.json"]),
        ({"model__name": "tiny-random:lama"}, ["model.name = tiny-random:lama names no family", "llama"]),
        ({"data__source": "no/such/rows.jsonl"}, ["no/such/rows.jsonl does not exist", "looked from"]),
        ({"data__source": "task:ecco_digit"}, ["there is no task 'ecco_digit'; the nearest is 'echo_digit'"]),
        ({"algorithm__groups_per_step": 161}, ["algorithm.groups_per_step = 161 is more than the 160 rows", "at most 160"]),
        ({"algorithm__name": "grpoo"}, ['there is no algorithm "grpoo"; the nearest is "grpo"']),
        ({"run__seed": 10**30}, ["run.seed = 1000", "must be an integer >= 0 and <= 1e+18"]),
        ({"run__threads": 100_000}, ["run.threads = 100000", "must be an integer >= 1 and <= 1024"]),
        ({"model__name": "m" * 5000}, ["model.name = mmm", "does not exist"]),
        ({"data__source": "d" * 5000 + ".jsonl"}, ["data.source: ddd", "does not exist"]),
        ({"reward__functions": ["exact_mach"]}, ["reward.functions = exact_mach is not known", "exact_match"]),
        ({"reward__functions": ["no/file.py:f"]}, ["the file no/file.py does not exist"]),
        ({"rollout__max_new_tokens": 512}, ["rollout.max_new_tokens = 512 leaves no room for a prompt", "context of 512"]),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_work(changes, words, runs):
    ended = runs.train(**changes)
    assert ended.code == 2
    for word in words:
        assert word in ended.message
    assert not runs["run"].exists()


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ({"answer": 1}, {}, ["row 10 of {path} (counted from 0) has no column 'prompt'", "data.prompt_column"]),
        ({"prompt": " \n", "answer": 1}, {}, ["row 10 of {path}", "column 'prompt' is empty", "remove the row"]),
        ({"prompt": 7, "answer": 1}, {}, ["row 10 of {path}", "must be text or a list of chat messages, got int: 7"]),
        ({"prompt": [{"role": "user"}], "answer": 1}, {}, ["row 10 of {path}", "content must be text"]),
        ({"prompt": [{"role": "user", "content": "1"}], "answer": 1}, {}, ["list of messages", "no chat template"]),
        (LONG, {}, ["1 of 11 prompts of {path} are longer than 508 tokens: row 10 (1201 tokens)", "shorten them"]),
        (LONG, {"data__max_prompt_tokens": 5}, ["longer than 5 tokens: row 10", 'data.overlong_prompts = "drop"']),
        ({"prompt": "1"}, {}, ["exact_number needs the column 'answer', which row 10 of {path}", "there is 'prompt'"]),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on(row, changes, words, runs, tmp_path):
    path = write(tmp_path / "rows.jsonl", *GOOD, row)
    ended = runs.train(data__source=path, reward__functions=["exact_number"], **changes)
    assert ended.code == 2
    for word in words:
        assert word.format(path=path) in ended.message
    assert not runs["run"].exists()


def test_long_prompts_are_left_out_when_asked_and_counted(runs, tmp_path):
    path = write(tmp_path / "rows.jsonl", *GOOD, LONG)
    ended = runs.train(data__source=path, data__overlong_prompts="drop", algorithm__steps=1)
    assert ended.code == 0
    assert "1 of 11 prompts" in ended.out
    assert "row 10 (1201 tokens); left out" in ended.out


def test_a_column_that_the_users_reward_needs(runs, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(prompts, completions, solution, **columns): return [0.0] * len(prompts)\n", encoding="utf-8")
    ended = runs.train(reward__functions=[f"{path}:f"])
    assert ended.code == 2
    assert "reward function f needs the column 'solution', which row 0 of task:echo_digit" in ended.message


def test_held_out_rows_without_a_column_of_the_reward(runs, tmp_path):
    path = write(tmp_path / "held_out.jsonl", {"prompt": "1 ="})
    rows = write(tmp_path / "rows.jsonl", *GOOD)
    ended = runs.train(data__source=rows, reward__functions=["exact_match"], eval__source=path, eval__rows=1)
    assert ended.code == 2
    assert f"exact_match needs the column 'answer', which row 0 of {path}" in ended.message
    assert not runs["run"].exists()


@pytest.mark.parametrize("key", ["reward.functions", "rollout.environment", "algorithm.name"])
def test_a_file_of_ones_own_that_ends_the_process(key, runs, tools, tmp_path):
    path = tmp_path / "ends.py"
    path.write_text("import sys\nsys.exit(0)\nname = None\n", encoding="utf-8")
    value = f'["{path}:name"]' if key == "reward.functions" else f"{path}:name"
    ended = tools.command("train", str(runs.recipe), f"--{key}", value, "--run", str(runs["run"]))
    assert ended.code == 2
    assert f"{key}: {path} could not be imported: SystemExit: 0" in ended.message


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_a_gpu_that_is_not_there(runs):
    ended = runs.train(run__device="cuda")
    assert ended.code == 2
    assert "run.device = 'cuda', but this machine has no usable GPU" in ended.message
    assert not runs["run"].exists()


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
def test_a_tracker_that_is_not_installed(runs):
    ended = runs.train(log__trackio=True)
    assert ended.code == 2
    assert "log.trackio needs the package trackio, which is not installed" in ended.message
    assert not runs["run"].exists()


OWN_ROW = """
from miles.algo import AlgorithmRow
def few(logprobs): return logprobs
def mean(logprobs, signal): return -logprobs.mean()
FEW = AlgorithmRow("few", "reward", "broadcast", few, "test")
MEAN = AlgorithmRow("mean", "reward", "broadcast", mean, "test")
"""


@pytest.mark.parametrize(
    ("name", "command", "words"),
    [
        (
            "FEW",
            "check",
            "algorithm.name = few: its policy_loss few(logprobs) cannot be called with (logprobs, signal)",
        ),
        (
            "FEW",
            "train",
            "algorithm.name = few: its policy_loss few(logprobs) cannot be called with (logprobs, signal)",
        ),
        ("MEAN", "train", "algorithm.name = mean: its policy_loss mean must return one loss a token, not their mean"),
    ],
)
def test_a_row_of_ones_own_that_cannot_be_used(name, command, words, runs, tools, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN_ROW, encoding="utf-8")
    if command == "check":
        ended = tools.command("check", str(runs.recipe), "--algorithm.name", f"{path}:{name}")
    else:
        ended = runs.train(algorithm__name=f"{path}:{name}")
    assert ended.code == 2
    assert words in ended.message
    assert not runs["run"].exists()


# --- a reward that breaks its contract: exit code 1, and what was reached is kept ----------------------------------------

BROKEN = '''
import itertools, math, time
calls = itertools.count(1)

def raises(prompts, completions, **columns): raise ValueError("no judge")
def nothing(prompts, completions, **columns): return None
def nan(prompts, completions, **columns): return [math.nan] * len(completions)
def huge(prompts, completions, **columns): return [1e308] * len(completions)
def few(prompts, completions, **columns): return [1.0]
def text(prompts, completions, **columns): return ["1.0"] * len(completions)
def leaves(prompts, completions, **columns): raise SystemExit(0)
def slow(prompts, completions, **columns): time.sleep(5)
def unscored(prompts, completions, **columns): return [None] * len(completions)
def solved(prompts, completions, **columns): return [1.0] * len(completions)
def hard(prompts, completions, **columns): return [0.0] * len(completions)

def later(prompts, completions, **columns):
    """Two steps of four prompts are scored, and then no more."""
    if next(calls) > 8:
        raise ValueError("no judge")
    return [float(i % 2) for i in range(len(completions))]

def no_threes(prompts, completions, answer, **columns):
    if answer[0] == 3:
        raise ValueError("three")
    return [float(i % 2) for i in range(len(completions))]
'''


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ["raised ValueError: no judge, on row", "let it return None for what cannot be scored"]),
        ("nothing", ["must return a list with one number or None for each completion", "it returned None"]),
        ("nan", ["returned a number that is not finite", "it returned nan", "None says `cannot be scored`"]),
        ("huge", ["above 1e+30 in size", "it returned 1e+308"]),
        ("few", ["returned 1 rewards for 4 completions", "it returned [1.0]"]),
        ("text", ["must return numbers or None", "it returned '1.0'"]),
        ("leaves", ["raised RuntimeError: SystemExit: 0"]),
        ("slow", ["took longer than 0.1 s on row", "raise reward.timeout_s"]),
    ],
)
def test_a_reward_that_breaks_its_contract(name, words, runs, broken):
    timeout_s = 0.1 if name == "slow" else 60.0
    ended = runs.train(reward__functions=[f"{broken}:{name}"], reward__timeout_s=timeout_s)
    assert ended.code == 1
    assert f"reward function {name} " in ended.message
    assert "of task:echo_digit" in ended.message
    for word in words:
        assert word in ended.message


def test_a_reward_that_fails_later_loses_nothing(runs, broken, tools):
    functions = [f"{broken}:later"]
    ended = runs.train(reward__functions=functions, algorithm__steps=4, run__checkpoint_every="none")
    assert ended.code == 1
    assert "reward function later raised ValueError: no judge" in ended.message
    assert [row["step"] for row in tools.rows(runs["run"])] == [1, 2]
    assert (runs["run"] / "checkpoints" / "LATEST").read_text().strip() == "step_000002"
    broken.write_text(BROKEN.replace("next(calls) > 8", "next(calls) > 99"), encoding="utf-8")
    ended = runs.train(reward__functions=functions, algorithm__steps=4, run__checkpoint_every="none", resume=True)
    assert ended.code == 0
    assert "continues from step 2" in ended.out
    assert [row["step"] for row in tools.rows(runs["run"])] == [1, 2, 3, 4]


def test_one_row_that_fails_is_dropped_with_its_reason(runs, broken, tools):
    ended = runs.train(reward__functions=[f"{broken}:no_threes"], algorithm__steps=4, algorithm__groups_per_step=8)
    assert ended.code == 0
    assert sum(row["groups/error"] for row in tools.rows(runs["run"])) > 0
    assert "attempt 3 of 3: reward function no_threes raised ValueError: three" in ended.out


@pytest.mark.parametrize(
    ("name", "reason", "mean"),
    [("solved", "equal_rewards", "1"), ("hard", "equal_rewards", "0"), ("unscored", "unscored", None)],
)
def test_a_task_with_nothing_to_learn_from(name, reason, mean, runs, broken, tools):
    ended = runs.train(reward__functions=[f"{broken}:{name}"], algorithm__name="dapo", rollout__max_dropped=6)
    assert ended.code == 1
    assert ended.err.startswith("miles: step 0: all ")
    assert "groups were dropped and none is left to train on (rollout.max_dropped = 6)" in ended.err
    table = next(line.split() for line in ended.err.splitlines() if line.split()[:1] == [reason])
    assert table[2:] == (["no", "rewards"] if mean is None else [mean] * 3)
    assert "raise rollout.group_size" in ended.err
    shown = [json.loads(line) for line in (runs["run"] / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["reason"] for line in shown} == {reason}
    assert (runs["run"] / "report.html").exists()


def test_a_group_estimator_trains_on_through_solved_groups(runs, broken, tools):
    """grpo keeps groups without a difference: no gradient, said by a warning, and weights that stand still."""
    ended = runs.train(reward__functions=[f"{broken}:solved"], algorithm__steps=1)
    assert ended.code == 0
    assert "100% of the groups are solved by every sample" in ended.out
    (row,) = tools.rows(runs["run"])
    assert (row["groups/solved_all"], row["grad_norm"]) == (4, 0.0)


# --- training that must stop to protect the model ------------------------------------------------------------------------

INFINITE = """
import math
from miles.algo import AlgorithmRow

def loss(logprobs, signal):
    from miles.algo.losses import TokenLoss
    global calls
    calls += 1
    return TokenLoss(-signal.advantages * logprobs * (math.inf if calls in (2, 4, 5, 6) else 1.0), {})

calls = 0
ROW = AlgorithmRow("own", "group_centred", "broadcast", loss, "test", group_centred=True)
"""


def test_three_updates_in_a_row_that_are_not_finite_end_with_3_and_a_checkpoint(runs, tools, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(INFINITE, encoding="utf-8")
    given = {
        "algorithm__name": f"{path}:ROW", "algorithm__steps": 8, "reward__functions": [f"{runs.rewards}:half"],
        "run__checkpoint_every": "none",
    }  # fmt: skip
    ended = runs.train(**given)
    assert ended.code == 3
    assert (
        "step 6: the loss or the gradient was not finite in 3 updates in a row (run.max_skipped_updates)"
        in ended.message
    )
    assert "lower learner.learning_rate" in ended.message
    found = tools.rows(runs["run"])
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["update/skipped"] for row in found[:5]] == [0, 1, 0, 1, 1]
    assert (runs["run"] / "checkpoints" / "LATEST").read_text().strip() == "step_000006"
    assert (runs["run"] / "report.html").exists()
    assert not (runs["run"] / "final").exists()
    # The cause is gone: the run goes on behind the step that it was stopped at.
    path.write_text(INFINITE.replace("calls in (2, 4, 5, 6)", "False"), encoding="utf-8")
    assert runs.train(**given, resume=True).code == 0
    assert [row["step"] for row in tools.rows(runs["run"])] == list(range(1, 9))


# --- run directories -----------------------------------------------------------------------------------------------------


def test_a_directory_that_holds_something_is_left_alone(runs, tools):
    runs["run"].mkdir()
    (runs["run"] / "mine.txt").write_text("mine")
    ended = runs.train()
    assert ended.code == 2
    assert (
        f"--run {runs['run']} is not empty: continue its run with --resume, or name another directory" in ended.message
    )
    assert [path.name for path in runs["run"].iterdir()] == ["mine.txt"]


def test_another_run_is_left_alone(runs):
    assert runs.train(algorithm__steps=1).code == 0
    before = (runs["run"] / "config.toml").read_bytes()
    assert "is not empty" in runs.train(learner__learning_rate=0.5).message
    assert "holds a run with other settings" in runs.train(learner__learning_rate=0.5, resume=True).message
    assert (runs["run"] / "config.toml").read_bytes() == before


@pytest.mark.parametrize("name", ["n" * 300, "half\udcff", "half\udcff\0"])
def test_a_name_that_no_directory_can_have(name, runs):
    ended = runs.train(name)
    assert ended.code == 2
    assert "cannot write" in ended.message or "is not a name in UTF-8" in ended.message
    assert not any(path.is_dir() for path in runs.folder.iterdir())


@pytest.mark.parametrize("arguments", [["--run", ""], ["--run="]])
def test_an_unset_shell_variable_is_no_directory(arguments, runs, tools, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    ended = tools.command("train", str(runs.recipe), *arguments)
    assert ended.code == 2
    assert "Argument --run: an empty name, where a folder is meant" in ended.message
    assert not any((tmp_path / "empty").iterdir())


def test_code_of_ones_own_that_goes_elsewhere_takes_the_run_not_along(runs, processes, tmp_path):
    """A script's chdir, at its import or later: the run stays where it was named."""
    goes = tmp_path / "goes.py"
    goes.write_text(
        "import os\nos.chdir('/')\n"
        "def reward(prompts, completions, **columns):\n"
        "    os.chdir('/usr')\n"
        "    return [float(i % 2) for i in range(len(completions))]\n",
        encoding="utf-8",
    )
    arguments = runs.arguments("run", {"reward.functions": [f"{goes}:reward"]})
    arguments[arguments.index("--run") + 1] = "here/run"
    ended = processes.run(arguments, tmp_path / "log", cwd=str(tmp_path))
    assert ended.code == 0, ended.out
    assert f"model:  {tmp_path}/here/run/final" in ended.out
    assert {path.name for path in (tmp_path / "here" / "run").iterdir()} >= {"final", "checkpoints", "report.html"}
    assert not os.path.exists("/usr/here")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("file", "is a file: name a directory that is empty or does not exist yet"),
        ("file/below/it", "cannot be made: {folder}/file is a file; name another directory"),
    ],
)
def test_a_file_where_the_directory_should_be(name, words, runs):
    runs["file"].write_text("mine")
    ended = runs.train(name)
    assert ended.code == 2
    assert words.format(folder=runs.folder) in ended.message
    assert runs["file"].read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written(runs):
    runs["closed"].mkdir(mode=0o555)
    ended = runs.train("closed/run")
    assert ended.code == 2
    assert f"{runs['closed']} is read-only; name another directory" in ended.message


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses new folders")
def test_a_place_that_takes_no_folder(runs, tools):
    ended = tools.command("train", str(runs.recipe), "--run", "/proc/self/run")
    assert ended.code == 2
    assert "/proc/self/run" in ended.message


def test_two_processes_in_one_directory(runs, processes, tools, tmp_path):
    """The second one is refused, new or resumed, and the first one never hears of it."""
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import pathlib, time\n"
        "def reward(prompts, completions, **columns):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'started').touch()\n"
        f"    while not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.01)\n"
        "    return [float(i % 2) for i in range(len(completions))]\n",
        encoding="utf-8",
    )
    given = {"reward.functions": [f"{waits}:reward"]}
    first = processes.start(runs.arguments("run", given), tmp_path / "log")
    try:
        while not (tmp_path / "started").exists():
            first.join(0.02)
            assert first.exitcode is None, (tmp_path / "log").read_text()
        before = (runs["run"] / "config.toml").read_bytes()
        ended = tools.command(*runs.arguments("run", given))
        assert ended.code == 2
        assert "is not empty" in ended.message
        ended = tools.command(*runs.arguments("run", {**given, "algorithm.steps": 9}, resume=True))
        assert ended.code == 2
        assert f"{runs['run']} is in use by process {first.pid}: wait until it ends" in ended.message
        assert (runs["run"] / "config.toml").read_bytes() == before
    finally:
        (tmp_path / "go").touch()
        first.join(60)
    assert first.exitcode == 0


@pytest.mark.parametrize(
    ("limit", "words"), [(30_000, "ledger.sqlite"), (290_000, "checkpoint 1 could not be written")]
)
def test_a_disk_that_takes_no_more(limit, words, runs, processes, tools, tmp_path):
    """No file may grow beyond the limit: the ledger fails, or a checkpoint; the run can be resumed later."""
    ended = processes.run(runs.arguments("run", {"run.checkpoint_every": 1}), tmp_path / "log", file_limit=limit)
    assert ended.code == 1, ended.out
    assert "Traceback" not in ended.out
    assert words in ended.err
    assert str(runs["run"]) in ended.err
    assert not any((runs["run"] / "checkpoints").glob("step_*"))
    assert tools.command(*runs.arguments("run", {"run.checkpoint_every": 1}, resume=True)).code == 0
    assert tools.command(*runs.arguments("unbroken", {"run.checkpoint_every": 1})).code == 0
    tools.same_run(runs["unbroken"], runs["run"])
