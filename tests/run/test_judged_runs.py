"""Chains by adapters: SFT -> reward model -> PPO on one frozen base, and what is refused before them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from miles.buffer.ledger import LedgerReader
from miles.learn.load import load_model
from miles.learn.scorer import as_scorer
from miles.run.recipes import resolve

DIGITS = [f"{i % 10}{i // 10}" for i in range(40)]
ROWS = [{"prompt": f"{d} =", "completion": d[0], "chosen": d[0], "rejected": d[1] + "."} for d in DIGITS]
SHORT = {"algorithm.steps": 2, "lora.rank": 4, "run.checkpoint_every": 1}
PARTS = {"sft": {"learner.learning_rate": 0.01}, "reward_model": {"algorithm.steps": 8, "learner.learning_rate": 0.02}}


class Chain:
    """A starting adapter and a reward model on one base, and runs that start from them."""

    def __init__(self, runs, tools):
        self.runs, self.tools = runs, tools
        self.data = runs.folder / "rows.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
        for name, changes in PARTS.items():
            ended = self.run(name, **{"algorithm.name": name, "reward.functions": [], **changes})
            assert ended.code == 0, ended.err
        self.scorer, self.adapter = runs["reward_model"] / "final", runs["sft"] / "final"

    def settings(self, **changes):
        return {"data.source": str(self.data), "reward.functions": [f"{self.runs.rewards}:half"], **SHORT, **changes}

    def run(self, name, resume=False, **changes):
        return self.tools.command(*self.runs.arguments(name, self.settings(**changes), resume))

    def ppo(self, place, **changes):
        return {
            "algorithm.name": "ppo", "reward.functions": [], "reward.model": str(self.scorer), "reward.model_place": place,
            "learner.critic_model": str(self.scorer), "algorithm.value_ref": 0.5, "lora.path": str(self.adapter),
            "eval.rows": 6, "eval.samples": 2, "learner.learning_rate": 3e-3, **changes,
        }  # fmt: skip

    def check(self, **changes):
        options = [f"--{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in self.settings(**changes).items()]
        return self.tools.command("check", str(self.runs.recipe), *options)


@pytest.fixture(scope="module")
def chain(tmp_path_factory, tools):
    return Chain(tools.runs(tmp_path_factory.mktemp("chain")), tools)


@pytest.fixture(scope="module")
def judged(chain):
    ended = chain.run("judged", **chain.ppo("learner"))
    assert ended.code == 0, ended.err
    return chain.runs["judged"]


def base(chain):
    return load_model(resolve([chain.runs.recipe], {}, {}).model, seed=0)


def numbers(tools, run):
    return [{key: value for key, value in row.items() if key != "event"} for row in tools.rows(run)]


def test_a_scorer_leaves_its_adapter_and_head_beside_the_whole_of_it(chain):
    """peft puts them on the base under a new head, and gives the scores of the whole classifier."""
    whole = AutoModelForSequenceClassification.from_pretrained(chain.scorer).eval()
    plain = as_scorer(base(chain))
    again = PeftModel.from_pretrained(plain, str(chain.scorer / "adapter")).eval()
    ids = torch.arange(4, 24).view(2, 10)
    again.base_model.model.config.pad_token_id = whole.config.pad_token_id
    with torch.no_grad():
        expected, found = whole(input_ids=ids).logits, again(input_ids=ids).logits
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_role_scores_as_the_separate_scorer_does(chain, judged, tools):
    ended = chain.run("apart", **chain.ppo("collecting"))
    assert ended.code == 0, ended.err
    for a, b in zip(numbers(tools, judged), numbers(tools, chain.runs["apart"]), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    reader = LedgerReader(chain.runs["apart"])
    stored = [s.reward_parts["reward_model"] for group in reader.groups(0) for s in group.samples]
    reader.close()
    line = json.loads((judged / "scores.jsonl").read_text().splitlines()[0])
    assert [p["reward_model"] for group in line["parts"].values() for p in group] == pytest.approx(stored, abs=1e-5)
    assert len(stored) == 16
    row = tools.rows(judged)[1]
    assert row["reward/mean"] == pytest.approx(sum(stored) / 16, abs=1e-5)
    shown = json.loads((judged / "samples.jsonl").read_text().splitlines()[-1])
    assert all(sample["reward"] == sample["parts"]["reward_model"] for sample in shown["samples"])


def test_weights_and_functions_add_up_with_the_score(chain, tools):
    more = {"reward.functions": [f"{chain.runs.rewards}:half"], "reward.weights": [0.5], "reward.model_weight": 2.0}
    found = {}
    for place in ("learner", "collecting"):
        assert chain.run(f"more-{place}", **chain.ppo(place, **more)).code == 0
        found[place] = numbers(tools, chain.runs[f"more-{place}"])
    for a, b in zip(found["learner"], found["collecting"], strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    row = found["learner"][1]
    assert row["reward/mean"] == pytest.approx(2 * row["reward/reward_model/mean"] + 0.5 * row["reward/half/mean"])


def test_the_reference_is_the_adapter_that_the_run_starts_from(chain, judged, tools):
    steps = [row for row in tools.rows(judged) if "event" not in row]
    assert steps[0]["kl/ref"] == 0.0
    assert steps[1]["kl/ref"] != 0.0
    assert steps[0]["value/ref_gap"] == 0.0  # the reference critic starts as the critic does
    started = PeftModel.from_pretrained(base(chain), str(chain.adapter)).eval()
    held_out = load_file(chain.adapter / "adapter_model.safetensors")
    assert max(tensor.abs().max() for name, tensor in held_out.items() if "lora_B" in name) > 1e-3
    reader = LedgerReader(judged)
    sample = reader.groups(0)[0].samples[0].segments[0]
    reader.close()
    with torch.no_grad():
        logprobs = torch.log_softmax(started(torch.tensor([sample.token_ids])).logits[0], -1)
    for place, trained in enumerate(sample.loss_mask):
        if trained:
            expected = logprobs[place - 1, sample.token_ids[place]].item()
            assert sample.behavior_logprobs[place] == pytest.approx(expected, abs=1e-5)


def test_a_stopped_run_goes_on_to_the_bit_and_a_replay_agrees(chain, judged, tools):
    assert chain.run("again", **chain.ppo("learner", **{"algorithm.steps": 1})).code == 0
    assert chain.run("again", resume=True, **chain.ppo("learner")).code == 0
    rows = tools.rows(chain.runs["again"])
    assert [row for row in rows if "event" not in row] == [row for row in tools.rows(judged) if "event" not in row]
    assert (chain.runs["again"] / "scores.jsonl").read_bytes() == (judged / "scores.jsonl").read_bytes()
    replayed = tools.command("replay", str(judged))
    assert replayed.code == 0
    assert "to the bit" in replayed.out


def test_another_reward_model_in_the_folder_is_another_run(chain, tmp_path):
    folder = tmp_path / "rm"
    shutil.copytree(chain.scorer, folder)
    settings = chain.ppo("learner", **{"reward.model": str(folder), "algorithm.steps": 1})
    assert chain.run("moved", **settings).code == 0
    altered(folder / "adapter", lambda tensors: tensors["base_model.model.score.weight"].mul_(2))
    ended = chain.run("moved", resume=True, **{**settings, "algorithm.steps": 2})
    assert ended.code in (1, 2)
    assert "weights of reward.model" in ended.message


def test_full_weights_start_their_critic_from_a_whole_reward_model(chain, tools):
    keys = {"lora.rank": "none", "reward.model_place": "collecting", "lora.path": "none", "eval.rows": 0}
    ended = chain.run("full", **chain.ppo("collecting", **keys))
    assert ended.code == 0, ended.err
    row = tools.rows(chain.runs["full"])[0]
    assert row["value/mean"] != 0.0
    assert row["value/ref_gap"] == 0.0


def altered(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def setting(folder: Path, **changes) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


LAYER = "base_model.model.model.layers.0.mlp.up_proj"
BAD = {
    "rank": (lambda f: setting(f, r=8), "has rank 8, and lora.rank = 4: set lora.rank to 8"),
    "alpha": (lambda f: setting(f, lora_alpha=4), "has alpha 4, and the recipe 8: set lora.alpha to 4"),
    "dora": (lambda f: setting(f, use_dora=True), "has use_dora = True, which Miles does not train"),
    "bias": (lambda f: setting(f, bias="all"), "has bias = 'all'"),
    "kind": (lambda f: setting(f, peft_type="IA3"), "is a IA3 adapter"),
    "half": (lambda f: altered(f, lambda t: t.pop(f"{LAYER}.lora_B.weight")), f"lacks {LAYER}.lora_B.weight"),
    "torn": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\1" * 12), "is no safetensors file"),
    "gone": (lambda f: (f / "adapter_model.safetensors").unlink(), "cannot be read (No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_adapter_that_does_not_fit_is_found_by_check(chain, tmp_path, case):
    spoil, words = BAD[case]
    folder = tmp_path / "adapter"
    shutil.copytree(chain.adapter, folder)
    assert chain.check(**{"lora.path": str(folder)}).code == 0
    spoil(folder)
    ended = chain.check(**{"lora.path": str(folder)})
    assert ended.code == 2
    assert f"lora.path = {folder}" in ended.message
    assert words in ended.message


def test_other_bases_heads_and_layers_are_refused(chain, runs):
    other = chain.check(**{"lora.path": str(chain.adapter), "model.name": "tiny-random:qwen3"})
    assert "stands on the base tiny-random:llama, and model.name = tiny-random:qwen3" in other.message
    headless = chain.check(**chain.ppo("learner", **{"reward.model": str(chain.adapter)}))
    assert "has no head that gives a score" in headless.message
    headed = chain.check(**{"lora.path": str(chain.scorer / "adapter")})
    assert "score.weight, which is no part of a LoRA adapter of a policy" in headed.message
    nothing = chain.check(**{"algorithm.name": "ppo", "learner.critic_model": str(runs.folder)})
    assert f"learner.critic_model = {runs.folder} cannot be read" in nothing.message
    ended = chain.run("targets", **{"lora.path": str(chain.adapter), "lora.targets": ["q_proj"]})
    assert ended.code == 2
    assert "which lora.targets leaves out" in ended.message
    assert not chain.runs["targets"].exists()


def test_what_the_place_of_a_reward_model_asks_for(chain):
    for name, why in {"dapo": "drops groups by their rewards", "remax": "scores a greedy answer"}.items():
        keys = {"algorithm.name": name, "reward.model": str(chain.scorer), "reward.model_place": "learner"}
        ended = chain.check(**keys)
        assert ended.code == 2
        assert f"does not fit {name}, which {why}" in ended.message
    keys = {"reward.model": str(chain.scorer), "reward.model_place": "learner"}
    assert "lora.rank is not set" in chain.check(**keys, **{"lora.rank": "none"}).message
    assert "needs reward.model" in chain.check(**{"reward.model_place": "learner"}).message
    assert "needs lora.rank" in chain.check(**{"lora.path": "somewhere", "lora.rank": "none"}).message
    grpo = chain.check(**{"learner.critic_model": str(chain.scorer)})
    assert "has no effect with grpo, which has no critic" in grpo.message
    shown = chain.check(**chain.ppo("learner"))
    assert "a frozen adapter and head on the same base, scores before each update" in shown.out
