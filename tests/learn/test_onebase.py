from __future__ import annotations

import copy

import pytest
import torch

from miles.errors import CheckpointError
from miles.learn.adapters import adapter_parameters, layers_of
from miles.learn.learner import Learner
from miles.learn.load import weights_hash
from miles.learn.model import SeparateModels
from miles.learn.onebase import AdapterRoles
from miles.learn.tiny import tiny_model

LORA = {"lora__rank": 4, "learner__learning_rate": 1e-2, "algorithm__groups_per_step": 4}
PPO = {**LORA, "algorithm__name": "ppo", "algorithm__beta": 0.1, "algorithm__kl_place": "reward"}


def learner(groups, family="llama", **keys):
    return Learner(tiny_model(family), groups.recipe(**{**LORA, **keys}))


def off_policy(groups):
    return groups.measured(tiny_model("llama"), groups.draw(count=4, size=4), noise=0.4)


def train(one, made, steps=1):
    rows = []
    for _ in range(steps):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    return rows


def comparable(row):
    return {key: value for key, value in row.items() if key != "memory/peak_bytes"}


def base_hash(model):
    """Of the weights below the adapters."""
    plain = copy.deepcopy(model)
    for path, layer in layers_of(plain).items():
        plain.set_submodule(path, layer.base)
    return weights_hash(plain)


def test_the_recipe_chooses_the_arrangement(groups):
    assert isinstance(learner(groups).roles, AdapterRoles)
    assert isinstance(learner(groups, lora__rank=None).roles, SeparateModels)


@pytest.mark.parametrize("critic", ["adapter", "full"])
def test_roles_of_ppo_learn_and_the_base_stays(groups, critic):
    one = learner(groups, **PPO, lora__critic=critic)
    assert one.roles.names == ("actor", "ref", "critic")
    made, start = off_policy(groups), base_hash(one.model)
    before = {role: {n: p.detach().clone() for n, p in one.roles.trained(role).items()} for role in ("actor", "critic")}
    rows = train(one, made, 6)
    assert base_hash(one.model) == start == weights_hash(tiny_model("llama"))
    for role, held in before.items():
        moved = {n: (p.detach() - held[n]).abs().max().item() for n, p in one.roles.trained(role).items()}
        assert min(moved.values()) > 0, role
    assert rows[-1]["loss/value"] < rows[0]["loss/value"]
    assert rows[-1]["kl/ref"] != 0


def test_the_reference_is_the_untouched_base_bit_for_bit_at_every_step(groups):
    one, plain = learner(groups, **PPO), learner(groups, lora__rank=None)
    made = off_policy(groups)
    expected = plain.logprobs(plain.pack(made))
    for _ in range(3):
        step = one.pack(made)
        signal = one.score(step)
        assert torch.equal(signal.ref_logprobs, expected)
        one.update(step, signal)
    assert (one.logprobs(one.pack(made)) - expected).abs().max() > 0.01


def test_roles_on_one_base_are_the_roles_on_separate_copies(groups):
    """Each role on its own copy of the base, with only its own adapter ever on: the same numbers, bit for bit."""

    class Copies(AdapterRoles):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.copies = {role: copy.deepcopy(self.root) for role in self.names}
            for role, root in self.copies.items():
                next(iter(layers_of(root).values())).switch.adapter = None if role == "ref" else role
            self.actor = self.copies["actor"].model

        def logprobs(self, role, batch, with_entropy=True):
            return self.copies[role](batch, self._stored_type, None, with_entropy)

        def values(self, role, batch):
            return self.copies[role](batch, self._stored_type, role, False)[0]

        def trained(self, role):
            root = self.copies[role] if hasattr(self, "copies") else self.root
            head = dict(root.heads[role].named_parameters("value_head")) if role == "critic" else {}
            return {**adapter_parameters(root.model, role), **head}

        def rest(self):
            pass

    made = off_policy(groups)
    one = learner(groups, **PPO)
    other = learner(groups, **PPO)
    other.roles = Copies(tiny_model("llama"), other.recipe, other.objective, other.compute)
    settings = other.recipe.learner
    other.optimizer = other._optimizer("actor", settings.learning_rate, 10)
    other.critic_optimizer = other._optimizer("critic", 5 * settings.learning_rate, 10)
    assert [comparable(r) for r in train(one, made, 3)] == [comparable(r) for r in train(other, made, 3)]
    for role in ("actor", "critic"):
        for a, b in zip(one.roles.trained(role).values(), other.roles.trained(role).values(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dr_grpo", "ppo"])
def test_a_step_does_not_depend_on_how_its_tokens_are_packed(groups, name):
    made = off_policy(groups)
    results = {}
    for keys in ({}, {"learner__tokens_per_microbatch": 40}, {"learner__gradient_checkpointing": True}):
        one = learner(groups, algorithm__name=name, learner__eps=1e-3, **keys)
        results[str(keys)] = [comparable(row) for row in train(one, made, 2)]
    expected = results["{}"]
    for found in results.values():
        for a, b in zip(found, expected, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_recomputed_blocks_use_the_adapter_of_their_forward(groups):
    """The backward of a critic runs blocks again: with another adapter on, its gradients would be wrong."""
    made = off_policy(groups)
    results = []
    for recompute in (False, True):
        one = learner(groups, **PPO, learner__gradient_checkpointing=recompute)
        train(one, made, 2)
        results.append({n: p.detach() for n, p in one.roles.trained("critic").items()})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, atol=1e-6, rtol=1e-5)


def test_between_steps_the_actor_is_on(groups):
    one = learner(groups, **PPO)
    made = off_policy(groups)
    train(one, made, 2)
    step = one.pack(made)
    one.score(step)  # the critic comes last
    ours = one.logprobs(step)
    plain, _ = groups.plain_table(one.model, made)
    torch.testing.assert_close(plain, ours, atol=1e-5, rtol=1e-5)


def test_a_reference_that_moves_has_an_adapter_of_its_own(groups):
    one = learner(groups, **PPO, algorithm__ref_update_every=2)
    made = off_policy(groups)
    expected = one.logprobs(one.pack(made))
    train(one, made)
    assert torch.equal(one.logprobs(one.pack(made), "ref"), expected)
    train(one, made)
    step = one.pack(made)
    assert torch.equal(one.logprobs(step, "ref"), one.logprobs(step))
    assert not torch.equal(one.logprobs(step), expected)


@pytest.mark.parametrize("keys", [{}, {"lora__critic": "full"}, {"algorithm__ref_update_every": 1}])
def test_a_checkpoint_holds_no_base_and_continues_to_the_bit(groups, keys):
    made = off_policy(groups)
    whole = learner(groups, **PPO, **keys)
    first = learner(groups, **PPO, **keys)
    rows = train(whole, made, 4)
    assert [comparable(r) for r in train(first, made, 2)] == [comparable(r) for r in rows[:2]]
    tensors, state = first.state()
    held = {name for file in ("adapter", "reference") for name in tensors.get(file, {})}
    assert all(".A." in name or ".B." in name for name in held)
    assert "model" not in tensors
    tensors = {file: {name: t.clone() for name, t in group.items()} for file, group in tensors.items()}
    second = learner(groups, **PPO, **keys)
    second.load_state(tensors, state)
    assert [comparable(r) for r in train(second, made, 2)] == [comparable(r) for r in rows[2:]]


def test_a_checkpoint_of_full_weights_is_refused(groups):
    tensors, state = learner(groups, lora__rank=None).state()
    with pytest.raises(CheckpointError, match="another model or recipe"):
        learner(groups).load_state(tensors, state)


def test_the_policy_update_is_merged_and_carries_the_adapter(groups):
    one = learner(groups)
    train(one, off_policy(groups), 2)
    update = one.policy_update()
    merged, plain = dict(update.weights()), dict(tiny_model("llama").named_parameters())
    assert merged.keys() >= plain.keys()
    adapter = dict(update.adapter())
    key = "model.layers.0.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{key}.lora_{kind}.weight"] for kind in "AB")
    torch.testing.assert_close(merged[f"{key}.weight"], plain[f"{key}.weight"] + 2 * b @ a, atol=1e-6, rtol=0)
    assert b.abs().max() > 0
    assert torch.equal(merged["model.norm.weight"], plain["model.norm.weight"])
    assert learner(groups, lora__rank=None).policy_update().adapter is None


def test_in_bf16_the_base_is_stored_rounded_and_adapters_and_heads_are_not(groups):
    one = learner(groups, **PPO, learner__param_dtype="bf16")
    assert one.model.lm_head.weight.dtype is torch.bfloat16
    for role in ("actor", "critic"):
        assert {p.dtype for p in one.roles.trained(role).values()} == {torch.float32}
    rows = train(one, off_policy(groups), 3)
    assert all(row["update/skipped"] == 0 for row in rows)
    assert "update/visible_fraction" not in rows[0]
    assert one.model.model.rotary_emb.inv_freq.dtype is torch.float32


@pytest.mark.parametrize("keys", [{}, {"lora__rank": None}, {"lora__critic": "full"}])
def test_the_reference_critic_stays_where_the_critic_began_and_holds_it(groups, keys):
    """From a critic that says 0, so v_ref = 0 at every step; a strong hold leaves smaller values."""
    made = off_policy(groups)
    sizes = {}
    for strength in (0.0, 50.0):
        one = learner(groups, **{**PPO, **keys}, algorithm__value_ref=strength, learner__critic_learning_rate=2e-3)
        assert ("ref_critic" in one.roles.names) is (strength > 0)
        for _ in range(12):
            step = one.pack(made)
            signal = one.score(step)
            assert strength == 0 or not signal.ref_values.any()
            row = one.update(step, signal)
        sizes[strength] = one.score(one.pack(made)).values.abs().mean().item()
        assert ("value/ref_gap" in row) is (strength > 0)
        assert all("ref" not in name for name in one.state()[0]["critic"])
    assert sizes[50.0] < 0.5 * sizes[0.0]
