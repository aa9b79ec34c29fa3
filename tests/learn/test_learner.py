from __future__ import annotations

import copy
import json
import logging
import math
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig

from miles.errors import CheckpointError, ConfigError, TrainingAborted
from miles.learn.learner import Learner
from miles.learn.tiny import tiny_model

RATE = 1e-2


def learner(groups, family="llama", seed=0, **keys):
    keys = {"learner__learning_rate": RATE, "algorithm__groups_per_step": 4, **keys}
    return Learner(tiny_model(family, seed=seed), groups.recipe(**keys))


def train(one, made, steps=1):
    rows = []
    for _ in range(steps):
        step = one.pack(made)
        rows.append(one.update(step, one.score(step)))
    return rows


def weights(one):
    return {name: p.detach().clone() for name, p in one.model.named_parameters()}


def moved(a, b):
    return max((a[name] - b[name]).abs().max().item() for name in a)


def off_policy(groups, **keys):
    return groups.measured(tiny_model("llama"), groups.draw(count=4, size=4, **keys), noise=0.4)


def comparable(row):
    return {key: value for key, value in row.items() if key != "memory/peak_bytes"}


def test_flex_attention_on_a_cpu_is_refused(groups):
    with pytest.raises(ConfigError, match=r"learner\.attention = 'flex', but the learner is on a CPU"):
        learner(groups, learner__attention="flex")


# --- laws ----------------------------------------------------------------------------------------------------------

PLACEMENTS = {
    "one batch": {},
    "small batches": {"learner__tokens_per_microbatch": 40},
    "one sample a batch": {"learner__tokens_per_microbatch": 1},
    "no sharing": {"learner__prefix_sharing": "off"},
    "no sharing, small batches": {"learner__prefix_sharing": "off", "learner__tokens_per_microbatch": 60},
    "small head chunks": {"learner__head_chunk": 3},
    "recomputed": {"learner__gradient_checkpointing": True},
}
ROWS = {
    "grpo": {},
    "dapo": {"algorithm__entropy_coef": 0.01},
    "gspo": {"learner__epochs": 2, "learner__minibatches": 2},
    "dr_grpo": {"algorithm__beta": 0.1, "algorithm__kl_place": "loss"},
    "ppo": {"learner__epochs": 2, "learner__minibatches": 2},
    "vapo": {"algorithm__critic_warmup": 0},
}


@pytest.mark.parametrize("row", ROWS)
def test_a_step_does_not_depend_on_how_its_tokens_are_packed(groups, row):
    """Gradient norms, losses and every other metric, and the weights after two updates or four, to 1e-5."""
    made = off_policy(groups)
    results = {}
    for name, keys in PLACEMENTS.items():
        # A large epsilon keeps AdamW from turning a difference of 1e-9 in a tiny gradient into a whole step.
        one = learner(groups, algorithm__name=row, learner__eps=1e-3, **ROWS[row], **keys)
        rows = train(one, made, steps=1 if one.recipe.learner.epochs > 1 else 2)
        results[name] = ([comparable(r) for r in rows], weights(one))
    rows, expected = results["one batch"]
    assert moved(expected, weights(learner(groups))) > 1e-3
    for name, (found, after) in results.items():
        assert moved(after, expected) < 1e-5, name
        for a, b in zip(found, rows, strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_step_on_separate_rows_is_plain_transformers(groups, family):
    """Loss, gradient norm and new weights against log-softmax of full logits, autograd and torch's AdamW."""
    model = tiny_model(family)
    made = groups.measured(model, groups.draw(count=4), noise=0.3)
    keys = {"algorithm__name": "dapo", "algorithm__correction": {"mode": "none"}, "algorithm__scale_std": False}
    one = learner(groups, family, learner__prefix_sharing="off", learner__eps=1e-3, **keys)
    row = train(one, made)[0]

    table = groups.step(made).table
    logprobs, _ = groups.plain_table(model, made)
    rewards = table.rewards
    means = torch.stack([rewards[table.group_ids == g].mean() for g in table.group_ids])
    advantage = (rewards - means)[table.sample_ids]
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28)).sum() / len(logprobs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0).step()
    assert row["loss/policy"] == pytest.approx(loss.item(), abs=1e-6)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert row["lr"] == RATE
    assert moved(weights(one), dict(model.named_parameters())) < 1e-5


def test_the_same_inputs_give_the_same_bits(groups):
    made = off_policy(groups)
    keys = {"algorithm__name": "ppo", "learner__minibatches": 2}
    first, second = learner(groups, **keys), learner(groups, **keys)
    assert [comparable(r) for r in train(first, made, 2)] == [comparable(r) for r in train(second, made, 2)]
    assert all(torch.equal(a, b) for a, b in zip(weights(first).values(), weights(second).values(), strict=True))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_learning_rate_of_zero_changes_no_bit_of_the_actor(groups, name):
    one = learner(groups, algorithm__name=name, learner__learning_rate=0.0, learner__weight_decay=0.1)
    before = weights(one)
    train(one, off_policy(groups), steps=2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(one).items())
    assert one.version == 2


def test_what_is_not_a_number_in_a_masked_place_does_no_harm(groups):
    made = off_policy(groups)
    poisoned = [
        replace(
            g,
            samples=tuple(
                replace(
                    s,
                    segments=tuple(
                        replace(
                            part,
                            behavior_logprobs=tuple(
                                value if trained else math.nan
                                for value, trained in zip(part.behavior_logprobs, part.loss_mask, strict=True)
                            ),
                        )
                        for part in s.segments
                    ),
                )
                for s in g.samples
            ),
        )
        for g in made
    ]
    first, second = learner(groups), learner(groups)
    assert comparable(train(first, made)[0]) == comparable(train(second, poisoned)[0])
    assert moved(weights(first), weights(second)) == 0


def test_samples_without_advantage_are_left_out_and_change_nothing(groups):
    """Equal rewards in a group give credit 0: the same update with and without them in the forward."""
    made = off_policy(groups)
    solved = replace(made[1], samples=tuple(replace(s, reward=1.0) for s in made[1].samples))
    made = [made[0], solved, *made[2:]]
    one = learner(groups, learner__eps=1e-3)
    row = train(one, made)[0]
    kept = sum(s.num_trained for g in made for s in g.samples if len(set(g.rewards)) > 1)
    assert row["tokens/scored"] == kept < row["tokens/trained"]

    whole = learner(groups, learner__eps=1e-3)
    object.__setattr__(whole.objective, "rows_with_gradient", lambda signal: None)
    assert train(whole, made)[0]["tokens/scored"] == row["tokens/trained"]
    assert moved(weights(whole), weights(one)) < 1e-6


def test_a_step_without_any_advantage_still_moves_by_its_momentum(groups):
    made = off_policy(groups)
    one = learner(groups)
    train(one, made)
    before = weights(one)
    equal = [replace(g, samples=tuple(replace(s, reward=0.0) for s in g.samples)) for g in made]
    row = train(one, equal)[0]
    assert (row["tokens/scored"], row["grad_norm"], row["update/skipped"]) == (0, 0.0, 0)
    assert "entropy" not in row
    assert moved(weights(one), before) > 0


def test_masked_samples_leave_the_denominator(groups):
    """2 finished and 8 truncated tokens: the loss is that of the 2 alone."""
    prompt = [1, 5, 6]

    def made(extra):
        parts = [([7, 2], 1.0, False), ([8, 2], 0.0, False)] + [([9] * 8, 1.0, True)] * extra
        return [
            groups.group(
                0,
                [
                    groups.sample(groups.segment([(prompt, False), (ids, True)]), reward=r, truncated=cut)
                    for ids, r, cut in parts
                ],
            )
        ]

    keys = {"reward__truncated": "mask", "algorithm__name": "dapo", "algorithm__groups_per_step": 1}
    with_cut, without = learner(groups, **keys), learner(groups, **keys)
    a, b = train(with_cut, made(2))[0], train(without, made(0))[0]
    assert comparable(a) == comparable(b)
    assert a["tokens/trained"] == 4
    assert moved(weights(with_cut), weights(without)) == 0


class PeakBytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Most bytes of tensors alive at the same time, among those made inside of it."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        torch.utils._pytree.tree_map_only(torch.Tensor, self.count, out)
        return out

    def count(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key)

    def drop(self, key):
        self.now -= self.live.pop(key, 0)


def peak(groups, count, limit):
    made = groups.draw(count=count, size=4, longest=8)
    one = learner(groups, algorithm__groups_per_step=count, learner__tokens_per_microbatch=limit)
    train(one, made)  # the optimizer's moments are there from then on
    step = one.pack(made)
    signal = one.score(step)
    with PeakBytes() as counter:
        one.update(step, signal)
    return counter.peak


def test_memory_grows_with_the_tokens_of_a_batch_and_not_with_the_step(groups):
    small, four_times, wide = (peak(groups, count, limit) for count, limit in ((12, 128), (48, 128), (48, 512)))
    assert four_times < 1.15 * small
    assert wide > 2 * small


def test_log_probabilities_of_the_policy_stand_in_the_order_of_the_table(groups):
    made = groups.draw(count=3)
    one = learner(groups, learner__tokens_per_microbatch=50)
    expected, _ = groups.plain_table(one.model, made)
    assert (one.logprobs(one.pack(made)) - expected).abs().max() < 1e-5


# --- roles ---------------------------------------------------------------------------------------------------------


def test_the_reference_stays_what_it_was_and_the_policy_leaves_it(groups):
    one = learner(groups, algorithm__beta=0.01, algorithm__kl_place="loss")
    made = off_policy(groups)
    step = one.pack(made)
    at_start = one.score(step).ref_logprobs
    rows = train(one, made, steps=5)
    assert torch.equal(one.score(step).ref_logprobs, at_start)
    assert rows[0]["kl/ref"] == pytest.approx(0, abs=1e-6)
    assert abs(rows[-1]["kl/ref"]) > 1e-3


def test_a_kl_in_the_loss_moves_the_policy_without_any_advantage(groups):
    made = [replace(g, samples=tuple(replace(s, reward=0.0) for s in g.samples)) for g in off_policy(groups)]
    one = learner(groups, algorithm__beta=100.0, algorithm__kl_place="loss", algorithm__kl_estimator="k3")
    with torch.no_grad():
        for parameter in one.model.parameters():
            parameter.mul_(1.3)
    before = weights(one)
    row = train(one, made)[0]
    assert row["kl/ref"] != 0
    assert row["grad_norm"] > 0
    assert moved(weights(one), before) > 1e-3


def test_the_reference_follows_every_so_many_steps(groups):
    one = learner(groups, algorithm__beta=0.1, algorithm__kl_place="loss", algorithm__ref_update_every=2)
    made = off_policy(groups)
    start = {name: p.clone() for name, p in one.roles.policies["ref"].model.named_parameters()}
    train(one, made)
    assert all(torch.equal(p, start[name]) for name, p in one.roles.policies["ref"].model.named_parameters())
    train(one, made)
    assert all(torch.equal(p, weights(one)[name]) for name, p in one.roles.policies["ref"].model.named_parameters())


def test_beta_follows_its_target_by_at_most_a_fifth(groups):
    """beta *= 1 + clip(KL/target - 1, -.2, .2) * samples / horizon, here 16 / 32."""
    keys = {"algorithm__beta": 0.5, "algorithm__kl_target": 0.01, "algorithm__kl_horizon": 32}
    one = learner(groups, algorithm__kl_place="loss", **keys)
    rows = train(one, off_policy(groups), steps=4)
    expected = [0.5]
    for row in rows:
        expected.append(expected[-1] * (1 + max(-0.2, min(0.2, row["kl/ref"] / 0.01 - 1)) / 2))
    assert [*(row["kl/beta"] for row in rows), one.beta] == pytest.approx(expected)
    assert expected[1] == pytest.approx(0.45), "the first step's KL is 0, far below the target"


def test_ppo_reads_values_of_the_critic_at_the_start_of_the_step(groups):
    one = learner(groups, algorithm__name="ppo", learner__epochs=2, learner__learning_rate=1e-3)
    made = off_policy(groups)
    rows = train(one, made, steps=4)
    assert rows[0]["value/mean"] != 0, "its second epoch sees values that have moved"
    assert rows[0]["lr/critic"] == 5e-3
    assert rows[0]["grad_norm/critic"] > 0
    assert rows[-1]["loss/value"] < rows[0]["loss/value"]
    assert {"value/clip_fraction", "value/explained_variance", "kl/ref"} <= rows[-1].keys()


def test_in_the_critics_warm_up_the_actor_stands_still(groups):
    one = learner(groups, algorithm__name="ppo", algorithm__critic_warmup=1, learner__critic_learning_rate=1e-3)
    before, critic = weights(one), {n: p.clone() for n, p in one.roles.critics["critic"].named_parameters()}
    row = train(one, off_policy(groups))[0]
    assert moved(weights(one), before) == 0
    assert moved(dict(one.roles.critics["critic"].named_parameters()), critic) > 0
    assert "lr" not in row
    assert row["lr/critic"] == 1e-3
    assert one.version == 1
    train(one, off_policy(groups))
    assert moved(weights(one), before) > 0


def test_schedules_of_actor_and_critic_count_the_same_updates(groups):
    keys = {"learner__schedule": "linear", "learner__warmup_updates": 4, "learner__minibatches": 2}
    one = learner(groups, algorithm__name="ppo", algorithm__steps=4, **keys)
    rows = train(one, off_policy(groups), steps=4)
    # 8 updates, two a step, each step logs its last: 2/4, 4/4, then 1 and 3 quarters of the way down.
    assert [row["lr"] / RATE for row in rows] == pytest.approx([0.5, 1.0, 0.75, 0.25])
    assert [row["lr/critic"] / RATE / 5 for row in rows] == pytest.approx([0.5, 1.0, 0.75, 0.25])


def test_visible_fraction_is_measured_under_bf16_only(groups):
    made = off_policy(groups)
    assert "update/visible_fraction" not in train(learner(groups), made)[0]
    model = tiny_model("llama").bfloat16()
    low = Learner(model, groups.recipe(learner__learning_rate=1e-6, learner__param_dtype="bf16"))
    assert 0 <= train(low, made)[0]["update/visible_fraction"] < 0.5
    assert next(model.parameters()).dtype == torch.float32


def test_a_family_that_cannot_be_packed_is_trained_on_separate_rows_and_says_so(groups, caplog):
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made = groups.measured(model.eval(), groups.draw(count=4))
    with caplog.at_level(logging.WARNING):
        one = Learner(model, groups.recipe(learner__learning_rate=RATE))
    assert "BloomForCausalLM is trained on one sequence a row, padded" in caplog.text
    row = train(one, made)[0]
    assert row["kl/behavior"] == pytest.approx(0, abs=1e-8)
    assert row["grad_norm"] > 0


# --- failure and resume --------------------------------------------------------------------------------------------


def poisoned(made):
    bad = replace(made[0].samples[0], reward=math.inf)
    return [replace(made[0], samples=(bad, *made[0].samples[1:])), *made[1:]]


def test_updates_that_are_not_finite_are_skipped_and_the_third_in_a_row_aborts(groups):
    made = off_policy(groups)
    one = learner(groups, algorithm__name="dr_grpo")
    train(one, made)
    before, moments = weights(one), copy.deepcopy(one.state()[0]["optimizer"])
    for version in (2, 3):
        row = train(one, poisoned(made))[0]
        assert row["update/skipped"] == 1
        assert "grad_norm" not in row
        assert "loss/policy" not in row
        assert one.version == version
    with pytest.raises(TrainingAborted, match=r"step 4: the loss or the gradient was not finite in 3 updates in a row"):
        train(one, poisoned(made))
    assert one.version == 4
    assert moved(weights(one), before) == 0
    assert all(torch.equal(tensor, moments[name]) for name, tensor in one.state()[0]["optimizer"].items())


def test_a_finite_update_starts_the_count_again(groups):
    made = off_policy(groups)
    one = learner(groups, algorithm__name="ppo")
    for _ in range(2):
        train(one, poisoned(made))
        train(one, poisoned(made))
        assert one.state()[1]["skipped_in_a_row"] == 2
        assert train(one, made)[0]["update/skipped"] == 0


def test_a_step_in_which_nothing_is_scored_makes_no_update(groups):
    made = [replace(g, samples=tuple(replace(s, reward=None) for s in g.samples)) for g in off_policy(groups)]
    one = learner(groups, algorithm__name="ppo")
    before = weights(one)
    row = train(one, made)[0]
    assert row["tokens/trained"] == 0
    assert moved(weights(one), before) == 0
    assert one.version == 1


RESUMED = {
    "grpo": {"learner__minibatches": 2, "learner__schedule": "cosine"},
    "ppo": {"learner__epochs": 2, "algorithm__kl_target": 0.01},
    "bf16": {"learner__param_dtype": "bf16"},
    "moving reference": {"algorithm__beta": 0.1, "algorithm__kl_place": "loss", "algorithm__ref_update_every": 2},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_learner_goes_on_to_the_bit(groups, kind):
    keys = {"algorithm__name": "ppo" if kind == "ppo" else "grpo", **RESUMED[kind]}
    made = off_policy(groups)
    whole = learner(groups, **keys)
    train(whole, made, steps=3)
    tensors, state = whole.state()
    saved = {file: {name: tensor.clone() for name, tensor in held.items()} for file, held in tensors.items()}
    resumed = learner(groups, **keys)
    resumed.load_state(saved, json.loads(json.dumps(state)))
    assert resumed.version == 3
    a, b = train(whole, made, steps=2), train(resumed, made, steps=2)
    assert [comparable(r) for r in a] == [comparable(r) for r in b]
    (after, state_a), (again, state_b) = whole.state(), resumed.state()
    assert state_a == state_b
    assert after.keys() == again.keys()
    for file, held in after.items():
        assert held.keys() == again[file].keys()
        assert all(torch.equal(tensor, again[file][name]) for name, tensor in held.items()), file


def test_a_checkpoint_of_another_recipe_is_refused(groups):
    one = learner(groups)
    train(one, off_policy(groups))
    tensors, state = one.state()
    with pytest.raises(CheckpointError, match=r"no tensor trunk\."):
        learner(groups, algorithm__name="ppo").load_state(tensors, {**state, "critic_optimizer": {"applied": 0}})


def test_new_weights_leave_under_their_own_names(groups):
    one = learner(groups)
    train(one, off_policy(groups))
    update = one.policy_update()
    assert update.version == 1
    names = dict(update.weights())
    assert names.keys() == {name for name, _ in one.model.named_parameters()}
    assert all(torch.equal(tensor, weights(one)[name]) for name, tensor in names.items())


def test_the_canary_is_scored_when_it_is_asked_for_at_temperature_1(groups):
    one = learner(groups, rollout__temperature=0.5)
    assert one.policy_update().canary is None
    one.canary_ids = [3, 5, 4, 9, 11]
    canary = one.policy_update().canary
    train(one, off_policy(groups))
    with torch.no_grad():
        table = one.model(torch.tensor([canary.ids])).logits[0].log_softmax(-1)
    assert canary.logprobs() == pytest.approx(table[range(4), list(canary.ids[1:])].tolist(), abs=1e-5)
