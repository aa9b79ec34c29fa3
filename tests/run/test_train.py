"""Whole runs of a tiny model: what stands in the run directory, what is printed, and that equal runs are equal."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tomllib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, BloomForCausalLM

from miles.learn.load import load_model, load_tokenizer, weights_hash
from miles.run.recipes import resolve

SETTINGS = {
    "data__source": "task:addition", "algorithm__steps": 6, "eval__rows": 4, "eval__samples": 2, "eval__every": 2,
    "run__checkpoint_every": 1, "run__keep_checkpoints": 2, "run__keep_best": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tools):
    """One run of six steps with evaluations, and what it printed."""
    runs = tools.runs(tmp_path_factory.mktemp("trained"))
    ended = runs.train(**SETTINGS)
    assert ended.code == 0, ended.err
    return runs, ended


def test_the_run_directory_holds_what_it_promises(trained):
    runs, _ = trained
    names = {path.name for path in runs["run"].iterdir()}
    assert names == {
        "config.toml", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "ledger.sqlite", "ledger.lock", "checkpoints", "final", "best",
        "logs", "report.html",
    }  # fmt: skip
    assert sorted(path.name for path in (runs["run"] / "checkpoints").iterdir()) == [
        "LATEST",
        "step_000005",
        "step_000006",
    ]
    assert (runs["run"] / "checkpoints" / "LATEST").read_text() == "step_000006\n"
    with sqlite3.connect(runs["run"] / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM step").fetchone() == (6,)
    ledger.close()
    shown = [json.loads(line) for line in (runs["run"] / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {line["step"] for line in shown if "step" in line} == set(range(1, 7))
    assert "starts from {'architecture': 'LlamaForCausalLM'" in (runs["run"] / "logs" / "main.log").read_text()


def test_what_is_printed(trained):
    runs, ended = trained
    lines = ended.out.splitlines()
    weights = weights_hash(load_model(resolve([runs.recipe], {}, {}).model, seed=0))
    assert f"weights {weights[:12]}" in lines[0]
    assert sum(line.startswith("prompt ") for line in lines) == 3
    assert [line.split()[0] for line in lines if "/6 " in line] == [f"{step}/6" for step in range(1, 7)]
    assert lines[-2:] == [f"model:  {runs['run'] / 'final'}", f"report: {runs['run'] / 'report.html'}"]
    assert ended.err == ""


def test_rows_come_in_order_with_evaluations_from_start_to_end(trained, tools):
    runs, _ = trained
    found = tools.rows(runs["run"])
    assert [row["step"] for row in found if "event" not in row] == [1, 2, 3, 4, 5, 6]
    assert all(row["version"] == row["step"] for row in found if "event" not in row)
    evaluations = [row for row in found if row.get("event") == "eval"]
    assert [row["version"] for row in evaluations] == [0, 2, 4, 6]
    assert all({"eval/reward/mean", "eval/reward/greedy", "eval/samples"} <= row.keys() for row in evaluations)
    assert [row["eval/samples"] for row in evaluations] == [8.0] * 4
    wanted = {
        "reward/mean", "completion/length_mean", "loss/policy", "loss/total", "entropy", "grad_norm", "lr", "ratio/mean",
        "advantage/mean", "groups/generated", "groups/trained", "tokens/trained", "staleness/max", "update/skipped",
    }  # fmt: skip
    full = [row for row in found if row.get("grad_norm", 0) > 0]
    assert full
    assert all(wanted <= row.keys() for row in full)


def test_the_final_model_is_a_plain_folder_of_the_last_step(trained):
    runs, _ = trained
    final = runs["run"] / "final"
    model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    start = load_model(resolve([runs.recipe], {}, {}).model, seed=0)
    moved = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert 1e-4 < max(moved) < 0.1
    tokenizer = load_tokenizer(resolve([runs.recipe], {}, {}).model)
    assert AutoTokenizer.from_pretrained(final).encode("1 + 2 =") == tokenizer.encode("1 + 2 =")


def test_the_resolved_recipe_feeds_back(trained):
    runs, _ = trained
    config = runs["run"] / "config.toml"
    assert tomllib.loads(config.read_text(encoding="utf-8"))["algorithm"]["steps"] == 6
    recipe = resolve([config], {}, {})
    changes = {
        "reward.functions": [f"{runs.rewards}:reward"],
        **{key.replace("__", "."): v for key, v in SETTINGS.items()},
    }
    assert recipe == resolve([runs.recipe], changes, {})


def test_an_equal_run_is_equal(trained, runs, tools):
    first, _ = trained
    runs.rewards = first.rewards
    assert tools.command("train", str(first["run"] / "config.toml"), "--run", str(runs["run"])).code == 0
    tools.same_run(first["run"], runs["run"])


def test_another_seed_is_another_run(trained, runs, tools):
    first, _ = trained
    runs.rewards = first.rewards
    assert runs.train(**{**SETTINGS, "run__seed": 1, "algorithm__steps": 1}).code == 0
    assert tools.rows(runs["run"])[1] != tools.rows(first["run"])[1]


# --- commands on a run ---------------------------------------------------------------------------------------------------


def test_watch_and_report(trained, tools):
    runs, _ = trained
    (runs["run"] / "report.html").unlink()
    assert tools.command("report", str(runs["run"])).out == f"{runs['run'] / 'report.html'}\n"
    page = (runs["run"] / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "task:addition" in page
    shown = tools.command("watch", str(runs["run"]))
    assert shown.code == 0
    assert "6/6" in shown.out


def test_export_writes_the_final_model_again(trained, tools, tmp_path):
    runs, _ = trained
    target = tmp_path / "an export ü"
    ended = tools.command("export", str(runs["run"]), "--to", str(target), "--merge")
    assert ended.code == 0
    assert "there is no adapter to merge" in ended.out
    assert ended.out.endswith(f"model of step 6: {target}\n")
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= names
    for name in names - {"miles_export.json"}:
        assert (target / name).read_bytes() == (runs["run"] / "final" / name).read_bytes(), name
    (target / "mine.txt").write_text("mine")
    ended = tools.command("export", str(runs["run"]), "--to", str(target))
    assert ended.code == 2
    assert "it holds mine.txt, which Miles did not write. Choose another folder" in ended.message


@pytest.mark.parametrize("words", [("export", "--to", "x"), ("watch",), ("report",)])
def test_a_folder_without_a_run(words, tools, tmp_path):
    name, *options = words
    ended = tools.command(name, str(tmp_path / "none"), *options)
    assert ended.code == 2
    assert str(tmp_path / "none") in ended.message


def test_export_before_the_first_checkpoint(runs, tools, tmp_path):
    path = tmp_path / "raises.py"
    path.write_text("def f(prompts, completions, **columns): raise ValueError('no')\n", encoding="utf-8")
    assert runs.train(reward__functions=[f"{path}:f"]).code == 1
    ended = tools.command("export", str(runs["run"]), "--to", str(tmp_path / "out"))
    assert ended.code == 2
    assert "has no complete checkpoint yet" in ended.message
    assert not (tmp_path / "out").exists()


def test_eval_gives_what_training_measured(trained, tools):
    runs, _ = trained
    options = [
        f"--{key}={value}" for key, value in (("data.source", "task:addition"), ("eval.rows", 4), ("eval.samples", 2))
    ]
    options.append(f'--reward.functions=["{runs.rewards}:reward"]')
    ended = tools.command("eval", str(runs.recipe), *options, "--model", str(runs["run"] / "final"))
    assert ended.code == 0
    found = dict(line.split() for line in ended.out.splitlines()[1:])
    last = tools.rows(runs["run"])[-1]
    assert found == {key: f"{last[key]:.4g}" for key in last if key.startswith("eval/")}


def test_eval_without_held_out_rows(trained, tools):
    runs, _ = trained
    ended = tools.command("eval", str(runs.recipe), "--model", str(runs["run"] / "final"))
    assert ended.code == 2
    assert "set eval.rows above 0" in ended.message


@pytest.mark.parametrize("changes", [[], ["--algorithm.name=ppo"]])
def test_doctor(changes, tools, runs, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ended = tools.command("doctor", *([str(runs.recipe)] if changes else []), *changes, "--run.threads=1")
    assert ended.code == 0
    assert ended.out.endswith("everything agrees\n")
    assert f"torch {torch.__version__}" in ended.out
    worst = float(
        next(line for line in ended.out.splitlines() if line.startswith("worst difference")).split(": ")[1].split()[0]
    )
    assert worst < 1e-4


def test_a_family_that_fits_no_fast_path_trains_from_a_folder_and_says_what_is_slow(runs, tools):
    """Bloom biases its attention by distance: its rows are not packed, and the engine goes through its own cache."""
    tokenizer = load_tokenizer(resolve([runs.recipe], {}, {}).model)
    torch.manual_seed(0)
    config = BloomConfig(
        vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    BloomForCausalLM(config).save_pretrained(runs["bloom"])
    tokenizer.save_pretrained(runs["bloom"])
    given = {"model__name": str(runs["bloom"]), "algorithm__steps": 1, "learner__minibatches": 2}
    ended = runs.train(**given)
    assert ended.code == 0, ended.err
    assert f"{runs['bloom']} is sampled from slowly, one prompt after another: " in ended.out
    assert "is trained on one sequence a row" in ended.out
    (row,) = tools.rows(runs["run"])
    assert row["grad_norm"] > 0
    assert row["kl/behavior"] < 1e-5
    final = AutoModelForCausalLM.from_pretrained(runs["run"] / "final")
    assert isinstance(final, BloomForCausalLM)


# --- what ends a run, and what is kept -----------------------------------------------------------------------------------


def test_the_data_ends_a_run_of_epochs_with_a_short_step(runs, tools):
    changes = {"data__epochs": 1, "algorithm__steps": "none", "data__max_rows": 10, "learner__schedule": "linear"}
    ended = runs.train(**changes)
    assert ended.code == 0
    assert "step 3 trained on fewer than 4 groups: the data has ended (data.epochs)" in ended.out
    found = tools.rows(runs["run"])
    assert [row["groups/trained"] for row in found] == [4, 4, 2]
    assert next(row["lr"] for row in found if "lr" in row) == 3e-3


LENGTH = """
def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]
"""


def test_a_run_stops_after_two_evaluations_at_the_goal(runs, tools, tmp_path):
    path = tmp_path / "length.py"
    path.write_text(LENGTH, encoding="utf-8")
    ended = runs.train(
        reward__functions=[f"{path}:length"], data__source="task:addition", eval__rows=2, eval__samples=1, eval__every=1,
        algorithm__steps=9, run__stop_at_reward=0.5,
    )  # fmt: skip
    assert ended.code == 0
    found = tools.rows(runs["run"])
    assert [row["version"] for row in found if "event" in row] == [0, 1]
    assert (runs["run"] / "final" / "config.json").exists()


def test_the_best_model_is_the_newest_of_the_best_evaluation(trained, tools):
    runs, _ = trained
    rewards = {row["version"]: row["eval/reward/mean"] for row in tools.rows(runs["run"]) if "event" in row}
    best = max(version for version, reward in rewards.items() if reward == max(rewards.values()))
    marker = json.loads((runs["run"] / "best" / "miles_export.json").read_text(encoding="utf-8"))
    assert marker["facts"]["version"] == best
    final = json.loads((runs["run"] / "final" / "miles_export.json").read_text(encoding="utf-8"))
    assert final["facts"]["version"] == 6


def test_a_best_model_that_a_killed_run_did_not_write_is_written_on_resume(runs, tmp_path):
    path = tmp_path / "same.py"
    path.write_text("def same(prompts, completions, **columns): return [1.0] * len(completions)\n", encoding="utf-8")
    given = {
        "reward__functions": [f"{path}:same"], "data__source": "task:addition", "eval__rows": 2, "eval__samples": 1,
        "eval__every": 1, "run__keep_best": True,
    }  # fmt: skip
    assert runs.train(**given).code == 0
    marker = runs["run"] / "best" / "miles_export.json"
    before = marker.read_bytes()
    assert json.loads(before)["facts"]["version"] == 2  # the newest on ties
    shutil.rmtree(runs["run"] / "best")
    assert runs.train(**given, resume=True).code == 0
    assert marker.read_bytes() == before


def test_a_short_warm_up_a_value_clip_and_a_critic_train_too(runs, tools):
    ended = runs.train(algorithm__name="ppo", learner__epochs=2, learner__minibatches=2, algorithm__critic_warmup=1)
    assert ended.code == 0
    found = tools.rows(runs["run"])
    assert {"loss/value", "value/explained_variance", "grad_norm/critic", "lr/critic"} <= found[1].keys()
    assert "grad_norm" not in found[0] or found[0]["grad_norm"] == 0.0
