"""A model that is built without memory and filled part by part is the model that was loaded whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.config.schema import Model
from miles.errors import ModelError
from miles.learn.learner import Learner
from miles.learn.load import describe, load_model, open_model
from miles.learn.tiny import FAMILIES, tiny_model, tiny_tokenizer

PPO = {
    "algorithm__name": "ppo", "algorithm__beta": 0.1, "algorithm__kl_place": "reward", "algorithm__groups_per_step": 4,
    "learner__learning_rate": 1e-2,
}  # fmt: skip
ARRANGEMENTS = [{}, {"lora__rank": 4}, {"lora__rank": 4, "lora__critic": "full", "learner__param_dtype": "bf16"}]


def saved(folder: Path, family: str, tied: bool) -> Path:
    """In several files."""
    tiny_model(family, tied, seed=5).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


def steps(groups, learner):
    made = groups.draw(count=4, size=4)
    rows = []
    for _ in range(2):
        step = learner.pack(made)
        rows.append(learner.update(step, learner.score(step)))
    return [{key: value for key, value in row.items() if key != "memory/peak_bytes"} for row in rows]


def both(groups, folder, keys):
    """The steps of a model that was loaded whole, and of one that was filled; and the filled learner."""
    section = Model(name=str(folder))
    whole = Learner(load_model(section, seed=0), groups.recipe(**PPO, **keys))
    model, weights = open_model(section)
    assert all(p.is_meta for p in model.parameters())
    assert describe(model, weights) == describe(load_model(section, seed=0))
    filled = Learner(model, groups.recipe(**PPO, **keys), weights=weights)
    return steps(groups, whole), steps(groups, filled), filled


PLAIN = [(family, tied) for family in FAMILIES for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), PLAIN)
def test_every_family_is_filled_to_the_bit(groups, family, tied, tmp_path):
    whole, filled, learner = both(groups, saved(tmp_path, family, tied), {})
    assert filled == whole
    head, embedding = learner.model.get_output_embeddings(), learner.model.get_input_embeddings()
    assert (head.weight is embedding.weight) is tied


SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURES = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=8, num_experts=3, num_experts_per_tok=2, head_dim=8)
    ),
}


def mixture(folder: Path, kind: str) -> Path:
    torch.manual_seed(7)
    MIXTURES[kind]().save_pretrained(folder, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("keys", [{}, {"lora__rank": 4, "lora__targets": ["q_proj", "v_proj"]}])
def test_experts_that_stand_one_by_one_in_the_files_are_filled_to_the_bit(groups, kind, keys, tmp_path):
    folder = mixture(tmp_path, kind)
    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert any("experts.2." in name for name in names)
    whole, filled, _ = both(groups, folder, keys)
    assert filled == whole


def test_a_part_of_the_experts_is_read_from_their_files(tmp_path):
    """Boxes that begin and end within experts and between gate and up."""
    section = Model(name=str(mixture(tmp_path, "mixtral")))
    model = load_model(section, seed=0)
    _, weights = open_model(section)
    for key in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{key}"
        expected = model.get_parameter(name)
        assert torch.equal(weights[name].full(), expected)
        assert torch.equal(weights[name].part((1, 3, 2), (2, 13, 5)), expected[1:3, 3:16, 2:7])


@pytest.mark.parametrize("keys", ARRANGEMENTS)
def test_roles_are_filled_to_the_bit(groups, keys, tmp_path):
    whole, filled, _ = both(groups, saved(tmp_path, "llama", True), keys)
    assert filled == whole


def job_ranks(folder: str, keys: dict[str, Any]) -> Any:
    whole, filled, learner = both(groups_module(), Path(folder), {**keys, "parallel__shard": 2})
    held = [p.to_local().numel() / p.numel() for p in learner.model.parameters() if isinstance(p, DTensor)]
    return whole == filled, max(held), len(held) == len(list(learner.model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "keys"), [("gemma3", True, {}), ("llama", False, {}), ("llama", True, ARRANGEMENTS[2])]
)
def test_each_rank_reads_its_part(gang, family, tied, keys, tmp_path):
    for same, most, all_sharded in gang.run(2, job_ranks, str(saved(tmp_path / "model", family, tied)), keys):
        assert same
        assert most <= 0.5
        assert all_sharded


def job_steps(folder: str, keys: dict[str, Any]) -> Any:
    groups = groups_module()
    model, weights = open_model(Model(name=folder))
    return steps(groups, Learner(model, groups.recipe(**PPO, **keys, learner__eps=1e-3), weights=weights))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MIXTURES, "gpt_neox-untied"])
def test_mixtures_and_renamed_heads_train_on_two_ranks_as_on_one(gang, kind, tmp_path):
    folder = str(mixture(tmp_path, kind) if kind in MIXTURES else saved(tmp_path, "gpt_neox", False))
    expected = job_steps(folder, {})
    results = gang.run(2, job_steps, folder, {"parallel__shard": 2})
    assert results[0] == results[1]
    for a, b in zip(results[0], expected, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_weights_that_do_not_stand_under_the_models_names_are_refused(tmp_path):
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("up_proj", "up"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"up_proj\.weight of shape \(128, 64\), which its files hold under no such name"
    ):
        open_model(Model(name=str(folder)))
    with pytest.raises(ModelError, match="has no files to read in parts"):
        open_model(Model(name="tiny-random:llama"))


def test_a_buffer_that_nothing_computes_is_refused(groups, tmp_path):
    model, weights = open_model(Model(name=str(saved(tmp_path, "llama", True))))
    model.model.layers[0].register_buffer("mystery", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(ModelError, match=r"does not say how its buffer model\.layers\.0\.mystery is computed"):
        Learner(model, groups.recipe(**PPO), weights=weights)
