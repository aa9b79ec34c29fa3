"""SFT, reward models and PPO with one: runs by the command line, what they leave behind, and what is refused before them."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from miles.buffer.ledger import LedgerReader

DIGITS = [f"{i % 10}{i // 10}" for i in range(40)]
ROWS = [{"prompt": f"{d} =", "completion": d[0], "chosen": d[0], "rejected": d[1] + "."} for d in DIGITS]
PLAIN = {"reward.functions": [], "eval.rows": 6, "run.checkpoint_every": 2, "eval.every": 2, "log.samples_per_step": 1}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return path


def settings(name: str, data: Path, **changes: Any) -> dict[str, Any]:
    return {"algorithm.name": name, "data.source": str(data), "algorithm.steps": 4, **PLAIN, **changes}


def trained(runs, tools, name: str, data: Path, **changes: Any) -> Path:
    ended = tools.command(*runs.arguments(name, settings(name, data, **changes)))
    assert ended.code == 0, ended.err
    return runs[name]


def test_sft_lowers_the_held_out_loss_and_leaves_a_language_model(runs, tools, data):
    run = trained(runs, tools, "sft", data, **{"algorithm.steps": 12})
    found = tools.rows(run)
    losses = [row["eval/loss"] for row in found if row.get("event") == "eval"]
    assert losses[-1] < 0.8 * losses[0]
    step = next(row for row in found if "event" not in row)
    assert step["groups/trained"] == 4
    assert step["tokens/trained"] == 8  # of each answer the digit and the end token
    assert step["completion/length_mean"] == 2
    assert not {k for k in step if k.startswith(("reward", "ratio", "kl", "advantage", "staleness", "loss/policy"))}
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    held_out = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    ended = tools.command("eval", str(run / "config.toml"), "--model", str(run / "final"))
    assert f"eval/loss  {held_out['eval/loss']:.4g}" in ended.out
    ids = torch.tensor([[*tokenizer("12 =1").input_ids, tokenizer.eos_token_id]])
    assert model(input_ids=ids, labels=ids).loss.isfinite()
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "Held-out loss" in report
    assert "Training reward" not in report


def test_a_reward_model_learns_the_order_and_leaves_a_classifier(runs, tools, data):
    run = trained(runs, tools, "reward_model", data, **{"algorithm.steps": 16, "learner.learning_rate": 0.01})
    evals = [row for row in tools.rows(run) if row.get("event") == "eval"]
    assert evals[0]["eval/pairs/accuracy"] == 0.5
    assert evals[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert evals[-1]["eval/pairs/accuracy"] >= 0.8
    model = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.config.num_labels == 1
    assert tokenizer.pad_token_id == model.config.pad_token_id not in (None, tokenizer.eos_token_id)
    texts = [row["prompt"] + row[side] + tokenizer.eos_token for row in ROWS for side in ("chosen", "rejected")]
    with torch.no_grad():
        scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    assert (scores[::2] > scores[1::2]).float().mean() >= 0.8
    ended = tools.command("eval", str(run / "config.toml"), "--model", str(run / "final"))
    assert f"eval/pairs/accuracy  {evals[-1]['eval/pairs/accuracy']:.4g}" in ended.out


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_reward_model_is_the_reward(runs, tools, data, algorithm):
    scorer = trained(runs, tools, "reward_model", data, **{"algorithm.steps": 8})
    given = {
        "algorithm.name": algorithm, "data.source": str(data), "algorithm.steps": 2, "reward.model": str(scorer / "final"),
        "reward.model_weight": 2.0, "eval.rows": 6, "eval.samples": 2,
    }  # fmt: skip
    both = {**given, "reward.functions": [f"{runs.rewards}:half"], "reward.weights": [0.5]}
    ended = tools.command(*runs.arguments(algorithm, both))
    assert ended.code == 0, ended.err
    reader = LedgerReader(runs[algorithm])
    samples = [s for group in reader.groups(0) for s in group.samples]
    prompts = [group.prompt_text for group in reader.groups(0) for _ in group.samples]
    reader.close()
    model = AutoModelForSequenceClassification.from_pretrained(scorer / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(scorer / "final")
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = [*tokenizer(prompt + sample.text).input_ids, tokenizer.eos_token_id]
        expected = model(input_ids=torch.tensor([ids])).logits.item()
        assert sample.reward_parts["reward_model"] == pytest.approx(expected, abs=1e-5)
        assert sample.reward == pytest.approx(2 * expected + 0.5 * sample.reward_parts["half"], abs=1e-4)
    row = tools.rows(runs[algorithm])[0]
    assert "eval/reward/reward_model/mean" in row
    assert "eval/pass@1" not in row  # a score has no full mark
    alone = tools.command(*runs.arguments("alone", {**given, "reward.functions": []}))
    assert alone.code == 0, alone.err


LORA = {"lora.rank": 4, "learner.learning_rate": 0.02}


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_a_reward_model_is_exported_whole(runs, tools, data, lora, tmp_path):
    run = trained(runs, tools, "reward_model", data, **{"algorithm.steps": 8, **lora})
    last = [row for row in tools.rows(run) if row.get("event") == "eval"][-1]
    assert last["eval/loss"] < 0.68
    again = tools.command("export", str(run), "--to", str(tmp_path / "again"))
    assert again.code == 0, again.err
    for folder in (run / "final", tmp_path / "again"):
        assert AutoModelForSequenceClassification.from_pretrained(folder).config.pad_token_id == 0
        ended = tools.command("eval", str(run / "config.toml"), "--model", str(folder), "--lora.rank=none")
        assert f"eval/loss            {last['eval/loss']:.4g}" in ended.out, ended.out + ended.err
        assert f"eval/score/mean      {last['eval/score/mean']:.4g}" in ended.out
    assert tools.command("replay", str(run), "--to", str(tmp_path / "replayed")).code == 0
    folders = (run / "final", tmp_path / "again", tmp_path / "replayed")
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_sft_by_lora_leaves_an_adapter(runs, tools, data):
    run = trained(runs, tools, "sft", data, **{"algorithm.steps": 12, **LORA})
    losses = [row["eval/loss"] for row in tools.rows(run) if row.get("event") == "eval"]
    assert losses[-1] < 0.9 * losses[0]
    assert (run / "final" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["sft", "reward_model"])
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_resumed_with_more_steps_equals_the_run_that_had_them(runs, tools, data, name, lora):
    changes = settings(name, data, **{"learner.minibatches": 2, "learner.epochs": 2, "run.keep_best": True, **lora})
    assert tools.command(*runs.arguments("whole", changes)).code == 0
    half = {**changes, "algorithm.steps": 2}
    assert tools.command(*runs.arguments("parts", half)).code == 0
    assert tools.command(*runs.arguments("parts", changes, resume=True)).code == 0
    tools.same_run(runs["whole"], runs["parts"])


OWN = """
import os
from miles.algo import AlgorithmRow
from miles.algo.losses import TokenLoss

calls = 0

def loss(values, signal):
    global calls
    calls += 1
    if calls == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), int(os.environ["KILL_WITH"]))
    return TokenLoss((values - 2 * signal.advantages) ** 2)

ANSWERS = AlgorithmRow("own", "reward", "broadcast", loss, "test", data="answers")
PAIRS = AlgorithmRow("own", "pair_side", "broadcast", loss, "test", data="pairs", scorer=True)
"""


@pytest.mark.parametrize("row", ["ANSWERS", "PAIRS"])
def test_killed_in_an_update_and_resumed(runs, processes, tools, data, tmp_path, row):
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    changes = settings(f"{path}:{row}", data, **{"learner.minibatches": 2, "eval.rows": 0, "eval.every": "none"})
    assert tools.command(*runs.arguments("unbroken", changes)).code == 0
    kill = {"KILL_AT": "6", "KILL_WITH": str(int(signal.SIGKILL))}
    assert processes.run(runs.arguments("run", changes), tmp_path / "log", environ=kill).code == -signal.SIGKILL
    assert tools.command(*runs.arguments("run", changes, resume=True)).code == 0
    tools.same_run(runs["unbroken"], runs["run"])


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("sft", {"prompt": "1 ="}, "has no column 'completion'"),
        ("sft", {"prompt": "1 =", "completion": ""}, "has an empty answer under 'completion'"),
        ("reward_model", {"prompt": "1 =", "chosen": "1"}, "has no column 'rejected'"),
        ("reward_model", {"prompt": "1 =", "chosen": "1", "rejected": "1"}, "equals the rejected one"),
        ("sft", {"prompt": "1 =", "completion": "1" * 600}, "longer than 512 tokens"),
    ],
)
def test_bad_rows_end_before_a_model_is_loaded(runs, tools, data, name, row, words):
    data.write_text("".join(json.dumps(r) + "\n" for r in [*ROWS[:8], row]), encoding="utf-8")
    ended = tools.command(*runs.arguments("run", settings(name, data, **{"eval.rows": 0, "eval.every": "none"})))
    assert ended.code == 2
    assert words in ended.message
    assert "row 8" in ended.message
    assert not runs["run"].exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "is no folder with a config.json"),
        ({"architectures": ["LlamaForCausalLM"]}, "is a LlamaForCausalLM, which gives no score"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "has 2 labels"),
        ({"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}, "holds no .safetensors weights"),
    ],
)  # fmt: skip
def test_a_reward_model_that_is_none_is_found_by_check(runs, tools, tmp_path, config, words):
    folder = tmp_path / "rm"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
    ended = tools.command("check", str(runs.recipe), f"--reward.model={folder}")
    assert ended.code == 2
    assert f"reward.model = {folder} {words}" in ended.message


def test_check_shows_what_recorded_rows_do_and_do_not_have(runs, tools, data):
    options = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings("sft", data).items()]
    ended = tools.command("check", str(runs.recipe), *options)
    assert ended.code == 0, ended.err
    assert "each: 4 answers, 1 update" in ended.out
    assert "inprocess, with the learner's own weights" not in ended.out
    assert "rollout.group_size has no effect: sft learns from recorded answers" in ended.out
    refused = tools.command("check", str(runs.recipe), *options, "--rollout.temperature=0.5")
    assert "rollout.temperature = 0.5 has no meaning with sft" in refused.message
    turns = tools.command("check", str(runs.recipe), "--data.source=task:guess_number", f"--reward.model={data.parent}")
    assert "guess_number may have several turns" in turns.message


def test_a_classifier_is_no_policy_and_the_doctor_wants_sampled_answers(runs, tools, data):
    scorer = trained(runs, tools, "reward_model", data, **{"algorithm.steps": 1})
    ended = runs.train(model__name=str(scorer / "final"))
    assert ended.code == 2
    assert "is a LlamaForSequenceClassification: give a causal language model" in ended.message
    more = settings("reward_model", data, **{"model.name": str(scorer / "final"), "algorithm.steps": 1})
    assert tools.command(*runs.arguments("more", more)).code == 0
    doctor = tools.command("doctor", str(scorer / "config.toml"))
    assert "reward_model samples none" in doctor.message
