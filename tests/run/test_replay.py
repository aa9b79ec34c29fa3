"""A run is trained again from its ledger alone, and its samples are written out as a table."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from miles.buffer.ledger import LedgerReader

CASES = {
    "grpo_2x2": {"learner.epochs": 2, "learner.minibatches": 2},
    "ppo": {"algorithm.name": "ppo", "algorithm.beta": 0.1, "algorithm.kl_target": 0.05},
    "stale_dapo": {"buffer.max_staleness": 1, "algorithm.name": "dapo", "rollout.group_size": 2},
    "epochs": {"algorithm.steps": "none", "data.epochs": 1, "data.max_rows": 10, "learner.schedule": "cosine"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_replay_ends_in_the_same_bits(name, runs, tools):
    changes = {"algorithm.steps": 3, **CASES[name]}
    assert tools.command(*runs.arguments("run", changes)).code == 0
    ended = tools.command("replay", str(runs["run"]), "--to", str(runs["again"]))
    assert ended.code == 0, ended.out + ended.err
    assert "step 3: " in ended.out
    assert "differ" not in ended.out
    assert "equal" in ended.out.splitlines()[-1]
    assert "to the bit" in ended.out.splitlines()[-1]
    name = "model.safetensors"
    assert (runs["again"] / name).read_bytes() == (runs["run"] / "final" / name).read_bytes()


def test_a_replay_says_where_the_run_was_something_else(runs, tools):
    assert runs.train(algorithm__steps=3).code == 0
    file = runs["run"] / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[1]["grad_norm"] += 1e-7
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = tools.command("replay", str(runs["run"]))
    assert ended.code == 1
    assert "step 2: " in ended.out
    assert "differs: grad_norm" in ended.out
    assert ended.out.splitlines()[-1] == "replayed 3 steps; 1 differ, the first is 2"


def test_a_replay_compares_every_tensor_of_the_checkpoint(runs, tools):
    assert runs.train(algorithm__steps=2).code == 0
    assert runs.train("other", algorithm__steps=2, run__seed=1).code == 0
    shutil.rmtree(runs["run"] / "checkpoints")
    shutil.copytree(runs["other"] / "checkpoints", runs["run"] / "checkpoints")
    ended = tools.command("replay", str(runs["run"]))
    assert ended.code == 1
    assert "tensors differ from" in ended.out


def test_a_replay_without_checkpoints_says_that_nothing_was_compared(runs, tools):
    assert runs.train(algorithm__steps=2).code == 0
    shutil.rmtree(runs["run"] / "checkpoints")
    ended = tools.command("replay", str(runs["run"]))
    assert ended.code == 0
    assert ended.out.splitlines()[-1] == "replayed 2 steps; the run has no checkpoint of step 2 to compare with"


def test_a_replay_needs_the_weights_that_the_run_started_from(runs, tools):
    assert runs.train(algorithm__steps=1).code == 0
    db = sqlite3.connect(runs["run"] / "ledger.sqlite")
    identity = json.loads(db.execute("SELECT identity FROM run").fetchone()[0])
    identity["weights of model.name"] = "0" * 64
    db.execute("UPDATE run SET identity = ?", [json.dumps(identity)])
    db.commit()
    db.close()
    ended = tools.command("replay", str(runs["run"]))
    assert ended.code == 2
    assert "started from the weights 000000000000" in ended.message
    assert tools.command("replay", str(runs.folder / "nothing")).code == 2


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_samples_are_written_with_what_became_of_them(kind, runs, tools):
    changes = {"algorithm.name": "dapo", "rollout.group_size": 2, "algorithm.steps": 5}
    assert tools.command(*runs.arguments("run", changes)).code == 0
    target = runs.folder / f"table.{kind}"
    arguments = ["export-samples", str(runs["run"]), "--format", kind, "--to", str(target)]
    ended = tools.command(*arguments)
    assert ended.code == 0, ended.err
    rows = _read(target)
    reader = LedgerReader(runs["run"])
    stats = reader.stats()
    trained = {row["ordinal"] for row in rows if row["dropped"] is None}
    dropped = {row["ordinal"] for row in rows if row["dropped"] is not None}
    assert trained == {ordinal for step in range(5) for ordinal in reader.manifest(step)}
    assert len(dropped) == stats.drops_by_reason["equal_rewards"] > 0
    row = rows[0]
    group = reader.group(row["ordinal"])
    reader.close()
    sample = group.samples[row["sample"]]
    assert (row["prompt"], row["completion"], row["reward"]) == (group.prompt_text, sample.text, sample.reward)
    assert row["token_ids"] == [list(sample.segments[0].token_ids)]
    assert row["behavior_logprobs"][0] == pytest.approx(sample.segments[0].behavior_logprobs)
    again = tools.command(*arguments)
    assert again.code == 2
    assert "exists already" in again.message


def _read(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()
