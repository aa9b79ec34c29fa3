"""Whole runs that train adapters: what they leave behind, that they resume to the bit, and what their adapters are worth."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from miles.learn.load import load_model
from miles.run.recipes import resolve

SETTINGS = {"lora__rank": 4, "learner__learning_rate": 1e-2, "algorithm__steps": 4, "run__checkpoint_every": 2}
PPO = {**SETTINGS, "algorithm__name": "ppo", "algorithm__beta": 0.1, "algorithm__kl_place": "reward"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tools):
    runs = tools.runs(tmp_path_factory.mktemp("lora"))
    ended = runs.train(**PPO)
    assert ended.code == 0, ended.err
    return runs


def base(runs):
    return load_model(resolve([runs.recipe], {}, {}).model, seed=0)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(4, 30)[None], use_cache=False).logits


def test_final_is_an_adapter_that_peft_loads(trained):
    final = trained["run"] / "final"
    names = {path.name for path in final.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names
    plain = logits(base(trained))
    assert (logits(PeftModel.from_pretrained(base(trained), str(final)).eval()) - plain).abs().max() > 1e-3
    assert not any("head" in name for name in load_file(final / "adapter_model.safetensors"))


def test_a_checkpoint_has_no_weight_of_the_base(trained):
    files = sorted((trained["run"] / "checkpoints" / "step_000004").glob("*.safetensors"))
    assert [path.stem for path in files] == ["adapter", "critic", "critic_optimizer", "optimizer"]
    held = {name.removeprefix("exp_avg.").removeprefix("exp_avg_sq.") for path in files for name in load_file(path)}
    assert {name.split(".")[-3] for name in held if not name.startswith("value_head")} == {"A", "B"}


def test_export_gives_the_adapter_again_and_merged_a_plain_model(trained, tools, tmp_path):
    run = trained["run"]
    ended = tools.command("export", str(run), "--to", str(tmp_path / "adapter"))
    assert ended.out.endswith(f"adapter of step 4: {tmp_path / 'adapter'}\n")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "adapter" / name).read_bytes() == (run / "final" / name).read_bytes()
    ended = tools.command("export", str(run), "--to", str(tmp_path / "merged"), "--merge")
    assert ended.out.endswith(f"model of step 4: {tmp_path / 'merged'}\n")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    adapted = PeftModel.from_pretrained(base(trained), str(run / "final")).eval()
    torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=1e-5)


def test_an_adapter_alone_is_no_model_to_start_from(trained, tools):
    words = ["--data.source", "task:addition", "--eval.rows", "2", "--eval.samples", "1"]
    ended = tools.command("eval", str(trained.recipe), "--model", str(trained["run"] / "final"), *words)
    assert ended.code == 2
    assert "miles export RUN --merge" in ended.message


def test_a_run_that_was_stopped_goes_on_to_the_bit(trained, tools, tmp_path):
    runs = tools.runs(tmp_path)
    assert runs.train(**{**PPO, "algorithm__steps": 2}).code == 0
    assert runs.train(**PPO, resume=True).code == 0
    assert tools.rows(runs["run"]) == tools.rows(trained["run"])
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (runs["run"] / "final" / name).read_bytes() == (trained["run"] / "final" / name).read_bytes()


def test_a_base_in_few_bits_is_sampled_from_as_it_is_trained_and_resumes_to_the_bit(runs, tools):
    pytest.importorskip("bitsandbytes", reason="the extra `quantized` is not installed")
    settings = {**SETTINGS, "lora__base_bits": 4, "algorithm__steps": 2, "run__checkpoint_every": 1}
    ended = runs.train(**settings)
    assert ended.code == 0, ended.err
    assert all(row["kl/behavior"] < 1e-8 for row in tools.rows(runs["run"]))
    assert runs.train("parts", **{**settings, "algorithm__steps": 1}).code == 0
    assert runs.train("parts", resume=True, **settings).code == 0
    tools.same_run(runs["parts"], runs["run"])
    held = load_file(runs["run"] / "checkpoints" / "step_000002" / "adapter.safetensors")
    assert not any("codes" in name for name in held)


def test_another_rank_is_another_run(trained):
    ended = trained.train(**{**PPO, "lora__rank": 8}, resume=True)
    assert ended.code == 2
    assert "lora.rank was 4 and is now 8" in ended.message


def test_targets_that_are_nowhere_end_the_run_before_it_begins(runs):
    ended = runs.train(**SETTINGS, lora__targets=["q_proj", "query"])
    assert ended.code == 2
    assert 'lora.targets holds "query", which is no linear layer in the blocks of LlamaForCausalLM' in ended.message
    assert not runs["run"].exists()


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt_neox"])
def test_other_families_train_adapters_too(runs, family, tools):
    ended = runs.train(**{**SETTINGS, "algorithm__steps": 1}, model__name=f"tiny-random:{family}")
    assert ended.code == 0, ended.err
    config = json.loads((runs["run"] / "final" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    # What the engine sampled with is what the learner scores, adapters and all.
    assert tools.rows(runs["run"])[0]["kl/behavior"] < 1e-8
