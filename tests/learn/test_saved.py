"""Runs that start from what others have trained: adapters, a critic, a reward model; on one rank and on several."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.config.adapters import adapter_problems
from miles.config.schema import Model
from miles.errors import ModelError, RewardError
from miles.learn.adapters import adapter_parameters
from miles.learn.critic import weights_of
from miles.learn.export import save_trained
from miles.learn.judge import READS, with_scores
from miles.learn.learner import Learner
from miles.learn.load import load_model, open_model
from miles.learn.parallel import whole
from miles.learn.saved import check_saved
from miles.learn.scorer import as_scorer, load_classifier, sequence_scores
from miles.learn.tiny import tiny_model, tiny_tokenizer

LORA = {"lora__rank": 4, "algorithm__groups_per_step": 4}


def groups_module():
    spec = importlib.util.spec_from_file_location("miles_learn_groups", Path(__file__).with_name("groups.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles_learn_groups"] = module
    spec.loader.exec_module(module)
    return module


def noisy(learner: Learner, seed: int) -> Learner:
    """As if it had been trained: no tensor of the actor's adapter or head is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in learner.roles.trained("actor").values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return learner


@pytest.fixture(scope="module")
def folders(groups, tmp_path_factory) -> dict[str, str]:
    """A base, an adapter of a policy on it, and a reward model: whole, with adapter and head inside."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer, base = tiny_tokenizer(), tiny_model("llama", seed=5)
    base.save_pretrained(folder / "base", max_shard_size="60KB")
    tokenizer.save_pretrained(folder / "base")
    section = Model(name=str(folder / "base"))
    for name, made, keys in (
        ("policy", load_model(section, seed=0), {}),
        ("judge", as_scorer(load_model(section, seed=0)), {"algorithm__name": "reward_model"}),
    ):
        one = noisy(Learner(made, groups.recipe(**LORA, **keys)), len(name))
        save_trained(one.model, tokenizer, folder / name, {})
    return {path.name: str(path) for path in folder.iterdir()}


def keys_of(folders: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        **LORA, "model__name": folders["base"], "algorithm__name": "ppo", "algorithm__beta": 0.1,
        "algorithm__kl_place": "reward", "algorithm__value_ref": 0.5, "learner__critic_model": folders["judge"],
        "lora__path": folders["policy"], "reward__model": folders["judge"], "reward__model_place": "learner",
        "reward__model_weight": 2.0, **more,
    }  # fmt: skip


def readable(groups, count=4, size=4):
    """Drawn groups of one segment a sample, each with what a reward model reads of it."""
    from dataclasses import replace

    def short(sample):
        segment = sample.segments[0]
        return replace(sample, segments=(segment,), extras={READS: [*segment.token_ids, 0]})

    return [replace(g, samples=tuple(map(short, g.samples))) for g in groups.draw(count=count, size=size)]


def steps(groups, one: Learner, count=2):
    made, rows = readable(groups), []
    for _ in range(count):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    trained = [whole(p.detach()).flatten().tolist() for r in ("actor", "critic") for p in one.roles.trained(r).values()]
    scores = [sample.reward for group in one.judged for sample in group.samples]
    return [{k: v for k, v in row.items() if k != "memory/peak_bytes"} for row in rows], trained, scores


def test_every_role_starts_from_its_folder(groups, folders):
    one = Learner(load_model(Model(name=folders["base"]), seed=0), groups.recipe(**keys_of(folders)))
    assert one.roles.names == ("actor", "ref", "critic", "ref_critic", "reward_model")
    made = readable(groups)
    step = one.pack(made)
    assert torch.equal(one.logprobs(step, "ref"), one.logprobs(step))
    plain = Learner(load_model(Model(name=folders["base"]), seed=0), groups.recipe(**LORA))
    assert (one.logprobs(step) - plain.logprobs(step)).abs().max() > 0.01

    scorer = load_classifier(Path(folders["judge"]), "reward.model")
    sequences = [s.extras[READS][:-1] for g in made for s in g.samples]
    expected = sequence_scores(scorer, sequences)
    signal = one.score(step)
    scores = [s.reward_parts["reward_model"] for g in one.judged for s in g.samples]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    rewards = [s.reward for g in made for s in g.samples]
    assert signal.table.rewards.tolist() == pytest.approx(
        [r + 2 * e for r, e in zip(rewards, expected.tolist(), strict=True)], abs=1e-4
    )
    assert torch.equal(signal.values, signal.ref_values)
    prefix = [scorer(input_ids=torch.tensor([made[0].samples[0].segments[0].token_ids[:-1]])).logits.item()]
    assert signal.values[signal.table.lengths[0] - 1].item() == pytest.approx(prefix[0], abs=1e-5)


def test_only_actor_and_critic_move(groups, folders):
    one = Learner(load_model(Model(name=folders["base"]), seed=0), groups.recipe(**keys_of(folders)))
    before = {name: p.detach().clone() for name, p in one.roles.root.named_parameters()}
    steps(groups, one)
    moved = {name for name, p in one.roles.root.named_parameters() if not torch.equal(p, before[name])}
    trained = {id(p) for role in ("actor", "critic") for p in one.roles.trained(role).values()}
    assert moved == {name for name, p in one.roles.root.named_parameters() if id(p) in trained}
    held = {name for tensors in one.roles.tensors().values() for name in tensors}
    assert not any(".ref." in name or ".ref_critic." in name or ".reward_model." in name for name in held)


def test_a_critic_with_full_weights_starts_from_the_whole_scorer(groups, folders):
    scorer = load_classifier(Path(folders["judge"]), "reward.model")
    for more in ({"lora__critic": "full"}, {"lora__rank": None, "lora__path": None, "reward__model": None}):
        place = {} if "lora__critic" in more else {"reward__model_place": "collecting"}
        recipe = groups.recipe(**keys_of(folders, **more, **place))
        one = Learner(load_model(Model(name=folders["base"]), seed=0), recipe)
        roots = {id(root): root for root in one.roles.roots if hasattr(root, "value_head")}
        assert len(roots) == 2  # critic and reference critic
        for root in roots.values():
            assert torch.equal(root.value_head.weight, scorer.score.weight)
            for name, tensor in weights_of(root.trunk).items():
                assert torch.equal(tensor, scorer.base_model.get_parameter(name))


def job_steps(folders: dict[str, str], keys: dict[str, Any], parts: bool) -> Any:
    groups = groups_module()
    recipe = groups.recipe(**keys_of(folders, **keys))
    model, weights = open_model(recipe.model) if parts else (load_model(recipe.model, seed=0), None)
    return steps(groups, Learner(model, recipe, weights=weights))


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora__critic": "full"}])
def test_ranks_start_as_one_process_does(gang, groups, folders, more):
    keys = {"learner__eps": 1e-3, "learner__learning_rate": 1e-2, **more}
    expected = job_steps(folders, keys, False)
    for parts in (False, True):
        results = gang.run(2, job_steps, folders, {**keys, "parallel__shard": 2}, parts)
        assert results[0] == results[1]
        rows, trained, scores = results[0]
        for a, b in zip(rows, expected[0], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
        for a, b in zip([*trained, scores], [*expected[1], expected[2]], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_layers_and_sizes_that_differ_are_named(groups, folders):
    fewer = groups.recipe(**keys_of(folders, lora__targets=["q_proj"]))
    with pytest.raises(ModelError, match=r"lora.path = .* has .*, which lora.targets leaves out"):
        check_saved(tiny_model("llama"), fewer)
    wider = groups.recipe(**keys_of(folders))
    with pytest.raises(
        ModelError, match=r"lora.path = .* of shape .*, and the model of this run .*: it was made of another"
    ):
        check_saved(tiny_model("llama", hidden_size=32), wider)
    with pytest.raises(ModelError, match=r"has no base_model.model.model.layers.2.*, which lora.targets asks for"):
        check_saved(tiny_model("llama", num_hidden_layers=3), wider)
    check_saved(tiny_model("llama"), wider)


def test_the_base_is_known_under_the_name_of_the_recipe_or_its_folder(groups, folders):
    assert list(adapter_problems(groups.recipe(**keys_of(folders)))) == []
    other = groups.recipe(**keys_of(folders, model__name="tiny-random:llama"))
    assert [text.split(" stands on")[0] for text in adapter_problems(other)] == [
        f"lora.path = {folders['policy']}", f"reward.model = {folders['judge']}", f"learner.critic_model = {folders['judge']}",
    ]  # fmt: skip


def test_a_score_that_is_not_finite_is_an_error(groups):
    made = readable(groups, count=1, size=2)
    with pytest.raises(RewardError, match=r"a score of nan for the answer"):
        with_scores(made, [0.0, float("nan")], 1.0)


def test_adapters_of_the_reward_model_and_the_actor_are_not_one(groups, folders):
    """The reward model's adapter is the scorer's, tensor by tensor."""
    one = Learner(load_model(Model(name=folders["base"]), seed=0), groups.recipe(**keys_of(folders)))
    adapters = [
        torch.cat([p.flatten() for p in adapter_parameters(one.model, n).values()]) for n in ("actor", "reward_model")
    ]
    assert (adapters[0] - adapters[1]).abs().max() > 1e-3
