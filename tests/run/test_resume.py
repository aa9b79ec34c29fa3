"""A run that was stopped, however, and resumed equals the run that was not: rows, samples and weights, to the bit."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from miles.buffer.ledger import LedgerReader
from miles.learn import folders

TWICE = {"learner.epochs": 2, "learner.minibatches": 2}
HELD_OUT = {"data.source": "task:addition", "eval.rows": 4, "eval.samples": 2}

CASES = {
    "grpo_2x2": ({**TWICE}, 14),
    "ppo_critic_reference": ({"algorithm.name": "ppo", "algorithm.beta": 0.01}, 14),
    "ppo_2x2_moving_reference": (
        {"algorithm.name": "ppo", "algorithm.beta": 0.1, "algorithm.ref_update_every": 2, "algorithm.kl_target": 0.05, **TWICE},
        14,
    ),
    "dapo_drops": ({"algorithm.name": "dapo", "rollout.group_size": 2}, 24),
    "two_turns": ({"data.source": "task:guess_number"}, 14),
    "stale": ({"buffer.max_staleness": 1, **TWICE}, 18),
    "stale_dapo": ({"buffer.max_staleness": 1, "algorithm.name": "dapo", "rollout.group_size": 2}, 24),
    "held_out": ({**HELD_OUT, "eval.every": 1, "run.keep_best": True}, 45),
    "epochs_short_end": ({"algorithm.steps": "none", "data.epochs": 1, "data.max_rows": 18, "learner.schedule": "cosine"}, 14),
    "sliding_window": ({"model.name": "tiny-random:gemma3"}, 14),
    "bf16": ({"learner.param_dtype": "bf16"}, 14),
    "written_beside": ({"run.checkpoint_async": "on"}, 14),
    "no_checkpoint": ({}, 2),
}  # fmt: skip


def settings(changes: dict[str, Any]) -> dict[str, Any]:
    return {"algorithm.steps": 5, "run.checkpoint_every": 2, **changes}


@pytest.mark.parametrize("name", CASES)
def test_killed_in_the_middle_of_a_step_and_resumed(name, runs, processes, tools, tmp_path):
    changes, call = CASES[name]
    unbroken = runs.arguments("unbroken", settings(changes))
    assert tools.command(*unbroken).code == 0
    kill = {"KILL_AT": str(call), "KILL_WITH": str(int(signal.SIGKILL))}
    killed = processes.run(runs.arguments("run", settings(changes)), tmp_path / "log", environ=kill)
    assert killed.code == -signal.SIGKILL
    assert not (runs["run"] / "final").exists()
    assert tools.command(*runs.arguments("run", settings(changes), resume=True)).code == 0
    tools.same_run(runs["unbroken"], runs["run"])
    if "keep_best" in json.dumps(changes):
        best = [(runs[name] / "best" / "model.safetensors").read_bytes() for name in ("unbroken", "run")]
        assert best[0] == best[1]
    if "drops" in name or "dapo" in name:
        reader = LedgerReader(runs["run"])
        assert reader.stats().drops_by_reason["equal_rewards"] > 0
        reader.close()


@pytest.mark.parametrize(
    ("signum", "call", "version", "changes"),
    [
        (signal.SIGINT, 14, 3, {}),
        (signal.SIGTERM, 17, 4, {}),
        (signal.SIGINT, 1, 0, {}),
        (signal.SIGTERM, 2, 0, HELD_OUT),  # the evaluation at the start has eight calls
        (signal.SIGINT, 8 + 20 + 3, 5, HELD_OUT),  # the one at the end
    ],
)
def test_a_signal_leaves_a_whole_checkpoint_and_says_so(
    signum, call, version, changes, runs, processes, tools, tmp_path
):
    given = settings(changes)
    environ = {"KILL_AT": str(call), "KILL_WITH": str(int(signum))}
    ended = processes.run(runs.arguments("run", given), tmp_path / "log", environ=environ)
    assert ended.code == 128 + signum
    assert "Traceback" not in ended.out
    assert f"stopped by a signal; a checkpoint is in {runs['run'] / 'checkpoints'}: continue with --resume" in ended.out
    assert (runs["run"] / "checkpoints" / "LATEST").read_text().strip() == f"step_{version:06d}"
    assert not (runs["run"] / "final").exists()
    reader = LedgerReader(runs["run"])
    assert reader.stats().leased == 0
    reader.close()
    resumed = tools.command(*runs.arguments("run", given, resume=True))
    assert resumed.code == 0
    assert (f"continues from step {version}" in resumed.out) == (version > 0)
    assert tools.command(*runs.arguments("unbroken", given)).code == 0
    tools.same_run(runs["unbroken"], runs["run"])


def test_ctrl_c_before_there_is_anything_to_keep(runs, processes, tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ndef f(p, c): return c\n", encoding="utf-8")
    ended = processes.run(runs.arguments("run", {"reward.functions": [f"{path}:f"]}), tmp_path / "log")
    assert (ended.code, ended.out) == (130, "miles: interrupted.\n")
    assert not runs["run"].exists()


KILLS_IN_ITS_LOSS = """
import os
from miles.algo import AlgorithmRow

def loss(logprobs, signal):
    from miles.algo.losses import TokenLoss
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), int(os.environ["KILL_WITH"]))
    return TokenLoss(-signal.advantages * logprobs, {})

calls = 0
ROW = AlgorithmRow("own", "group_centred", "broadcast", loss, "test", group_centred=True)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_stopped_in_the_middle_of_an_update(signum, code, runs, processes, tools, tmp_path):
    path = tmp_path / "own.py"
    path.write_text(KILLS_IN_ITS_LOSS, encoding="utf-8")
    functions = [f"{runs.rewards}:half"]
    changes = settings({"algorithm.name": f"{path}:ROW", "learner.minibatches": 2, "reward.functions": functions})
    environ = {"KILL_AT": "6", "KILL_WITH": str(int(signum))}  # the second update of the third step
    ended = processes.run(runs.arguments("run", changes), tmp_path / "log", environ=environ)
    assert ended.code == code
    whole = {-9: "step_000002", 143: "step_000003"}  # a signal that can wait waits for the end of the step
    assert (runs["run"] / "checkpoints" / "LATEST").read_text().strip() == whole[code]
    assert tools.command(*runs.arguments("run", changes, resume=True)).code == 0
    assert tools.command(*runs.arguments("unbroken", changes)).code == 0
    tools.same_run(runs["unbroken"], runs["run"])


# --- a finished run that is resumed with other settings --------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tools):
    """A run of three steps with evaluations, whose folder tests copy."""
    runs = tools.runs(tmp_path_factory.mktemp("finished"))
    ended = runs.train("run", algorithm__steps=3, run__checkpoint_every=1, run__keep_checkpoints=2, **KEYS)
    assert ended.code == 0, ended.err
    return runs


KEYS = {key.replace(".", "__"): value for key, value in HELD_OUT.items()}


@pytest.fixture
def again(finished, runs):
    """The same runs in a folder of this test; paths in the recipe are those of the first."""
    runs.rewards = finished.rewards
    shutil.copytree(finished["run"], runs["run"])
    return runs


def test_more_steps_equal_a_run_that_had_them_from_the_start(again, tools):
    ended = again.train(resume=True, algorithm__steps=5, run__checkpoint_every=1, **KEYS)
    assert ended.code == 0
    assert "continues from step 3" in ended.out
    assert again.train("long", algorithm__steps=5, run__checkpoint_every=1, **KEYS).code == 0
    found = tools.rows(again["run"])
    # The first run had evaluated where it ended.
    assert [row["version"] for row in found if row.get("event") == "eval"] == [0, 3, 5]
    assert [row for row in found if row.get("event") != "eval" or row["version"] != 3] == tools.rows(again["long"])
    weights = [(again[name] / "final" / "model.safetensors").read_bytes() for name in ("run", "long")]
    assert weights[0] == weights[1]


def test_evaluations_that_stand_in_the_file_are_not_made_again(again, tools):
    before = (again["run"] / "metrics.jsonl").read_bytes()
    ended = again.train(resume=True, algorithm__steps=3, **KEYS)
    assert ended.code == 0
    assert (again["run"] / "metrics.jsonl").read_bytes() == before
    assert "held-out at" not in ended.out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner__learning_rate": 0.1}, "learner.learning_rate was 0.003 and is now 0.1"),
        ({"algorithm__groups_per_step": 3}, "algorithm.groups_per_step was 4 and is now 3"),
        ({"run__seed": 1}, "run.seed was 0 and is now 1"),
        ({"data__epochs": 2, "algorithm__steps": "none"}, "data.epochs was None and is now 2"),
        ({"model__name": "tiny-random:qwen3"}, "model.name was 'tiny-random:llama' and is now 'tiny-random:qwen3'"),
        ({"reward__functions": ["exact_number"]}, "reward.functions was ["),
    ],
)
def test_other_keys_may_not_change(again, changes, words):
    before = (again["run"] / "config.toml").read_bytes()
    ended = again.train(resume=True, **{"algorithm__steps": 4, **KEYS, **changes})
    assert ended.code == 2
    assert words in ended.message
    assert "set the others back, or start a new run in another directory" in ended.message
    assert (again["run"] / "config.toml").read_bytes() == before


def test_the_keys_that_may_change(again, tools):
    changes = {
        "algorithm__steps": 4, "learner__tokens_per_microbatch": 64, "run__keep_checkpoints": 1, "run__checkpoint_every": 2,
        "eval__samples": 4, "log__samples_per_step": 1,
    }  # fmt: skip
    assert again.train(resume=True, **{**KEYS, **changes}).code == 0
    assert sorted(path.name for path in (again["run"] / "checkpoints").iterdir()) == ["LATEST", "step_000004"]
    assert tools.rows(again["run"])[-1]["eval/samples"] == 16
    assert "steps = 4" in (again["run"] / "config.toml").read_text(encoding="utf-8")


def test_rows_that_move_between_training_and_evaluation_are_refused(runs):
    data = runs["rows.jsonl"]
    data.write_text("".join(json.dumps({"prompt": f"{i} =", "answer": i}) + "\n" for i in range(20)), encoding="utf-8")
    given = {"data__source": str(data), "eval__rows": 2, "eval__samples": 1, "algorithm__steps": 1}
    assert runs.train(**given).code == 0
    config = (runs["run"] / "config.toml").read_bytes()
    ended = runs.train(resume=True, **{**given, "eval__rows": 3})
    assert ended.code == 2
    assert "the training rows are not those that the run" in ended.message
    assert "eval.rows or eval.source" in ended.message
    data.write_text(data.read_text(encoding="utf-8").replace('"5 ="', '"55 ="'), encoding="utf-8")
    assert "data.source has changed" in runs.train(resume=True, **given).message
    assert (runs["run"] / "config.toml").read_bytes() == config


def test_fewer_steps_than_the_run_has_train_nothing_and_say_so(again, tools):
    before = (again["run"] / "final" / "model.safetensors").read_bytes()
    ended = again.train(resume=True, algorithm__steps=2, **KEYS)
    assert ended.code == 0
    assert "algorithm.steps = 2, but the run stands at step 3: nothing is trained" in ended.out
    assert (again["run"] / "final" / "model.safetensors").read_bytes() == before


def test_resume_needs_a_run(runs, tools):
    assert "--resume needs --run DIR" in tools.command("train", str(runs.recipe), "--resume").message
    ended = runs.train("nothing", resume=True)
    assert ended.code == 2
    assert f"{runs['nothing']} holds no config.toml, so no run to resume; leave --resume out" in ended.message
    assert not runs["nothing"].exists()


def test_without_its_checkpoints_a_run_replays_its_ledger(again, tools):
    shutil.rmtree(again["run"] / "checkpoints")
    weights, before = (again["run"] / "final" / "model.safetensors").read_bytes(), tools.rows(again["run"])
    ended = again.train(resume=True, algorithm__steps=3, **KEYS)
    assert ended.code == 0
    assert "has no checkpoint: the run starts again from the beginning" in ended.out
    assert tools.rows(again["run"]) == before
    assert (again["run"] / "final" / "model.safetensors").read_bytes() == weights


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int = -100) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def files(folder: Path) -> dict[str, bytes]:
    """Everything but the log, and what SQLite keeps beside its file while it reads."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "logs"]
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in paths if not path.name.startswith("ledger.sqlite-")
    }


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_flipped_byte_in_a_checkpoint_falls_back_and_says_so(name, again, tools, finished):
    flip(again["run"] / "checkpoints" / "step_000003" / name, 60)
    ended = again.train(resume=True, algorithm__steps=3, **KEYS)
    assert ended.code == 0
    assert "step_000003 is passed over" in ended.out
    assert f"step_000003/{name} is altered" in ended.out
    assert "falling back to the checkpoint" in ended.out
    assert "continues from step 2" in ended.out
    tools.same_run(finished["run"], again["run"])


def test_a_checkpoint_of_another_run_is_refused(again):
    assert again.train("other", algorithm__steps=1, learner__learning_rate=0.1, **KEYS).code == 0
    shutil.rmtree(again["run"] / "checkpoints")
    shutil.copytree(again["other"] / "checkpoints", again["run"] / "checkpoints")
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 1
    assert f"checkpoint {again['run'] / 'checkpoints' / 'step_000001'} is of another run: recipe is" in ended.message


def test_no_whole_checkpoint_is_an_error_and_changes_nothing(again):
    for step in ("step_000002", "step_000003"):
        flip(again["run"] / "checkpoints" / step / "model.safetensors")
    before = files(again["run"])
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 1
    assert "no checkpoint in" in ended.message
    assert "Restore one from a backup, or move the folder away to start from the beginning." in ended.message
    assert files(again["run"]) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "is not valid TOML"),
        ('[model]\nnam = "x"\n', "the nearest is model.name"),
        ("[algorithm]\nsteps = 0\n", "algorithm.steps = 0"),
        ("\0\xff", "is not UTF-8 text"),
    ],
)
def test_a_damaged_config_is_an_error_that_names_the_file_alone(text, words, again):
    config = again["run"] / "config.toml"
    config.write_text(text, encoding="latin-1")
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 2
    assert f"{config} is not the recipe that Miles wrote" in ended.message
    assert words in ended.message
    assert "data.source is not set" not in ended.message
    assert config.read_text(encoding="latin-1") == text


def test_a_file_where_the_checkpoints_should_be(again):
    shutil.rmtree(again["run"] / "checkpoints")
    (again["run"] / "checkpoints").write_text("mine")
    before = files(again["run"])
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 2
    assert f"{again['run'] / 'checkpoints'} is a file, where the checkpoints of the run belong" in ended.message
    assert files(again["run"]) == before


def test_a_damaged_line_of_the_metrics_is_an_error(again):
    path = again["run"] / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"\n" + b"".join(lines[2:]))
    before = path.read_bytes()
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 2
    assert f"{path} line 2 is no JSON object" in ended.message
    assert path.read_bytes() == before


@pytest.mark.parametrize(("kept", "lost"), [(2, "2, 3"), (0, "1, 2, 3")])
def test_lost_metrics_are_told(kept, lost, again, tools):
    path = again["run"] / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]) + b'{"step": 2, "ver' * bool(kept))
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 0
    assert f"metrics.jsonl has lost its rows of the steps {lost}; the run goes on without them" in ended.out
    assert tools.rows(again["run"])[-2]["step"] == 4


def test_a_lost_ledger_is_made_again_from_the_checkpoint(again):
    (again["run"] / "ledger.sqlite").unlink()
    ended = again.train(resume=True, algorithm__steps=5, **KEYS)
    assert ended.code == 0
    assert "ledger.sqlite was lost: it was made again from" in ended.out
    assert again.train("whole", algorithm__steps=5, **KEYS).code == 0
    weights = [(again[name] / "final" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]
    reader = LedgerReader(again["run"])
    assert (reader.verify(), reader.stats().replayable_from) == (5, 3)
    reader.close()


def test_a_lost_ledger_without_a_snapshot_is_an_error_before_anything_is_loaded(again):
    (again["run"] / "ledger.sqlite").unlink()
    for checkpoint in (again["run"] / "checkpoints").glob("step_*"):
        (checkpoint / "ledger.snapshot").unlink()
        content = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").unlink()
        folders.seal(checkpoint, "manifest.json", format=content["format"], version=content["version"])
    before = files(again["run"])
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 2
    assert "has checkpoints but no ledger.sqlite, which says what they were trained on: put it back" in ended.message
    assert files(again["run"]) == before


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + b"\xff" * 3000, b"no database at all" * 300])
def test_a_damaged_ledger_is_an_error(content, again):
    ledger = again["run"] / "ledger.sqlite"
    ledger.write_bytes(content)
    config = (again["run"] / "config.toml").read_bytes()
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code in (1, 2)
    assert str(ledger) in ended.message
    assert (again["run"] / "config.toml").read_bytes() == config


@pytest.mark.parametrize(
    "change", [lambda final: (final / "mine.txt").write_text("mine"), lambda final: flip(final / "config.json", 5)]
)
def test_a_final_folder_that_the_user_changed_is_not_replaced(change, again):
    final = again["run"] / "final"
    change(final)
    before = files(final)
    ended = again.train(resume=True, algorithm__steps=4, **KEYS)
    assert ended.code == 2
    assert f"cannot export to {final}" in ended.message
    assert files(final) == before
