"""Simulated steps against real ones, and few blocks against all of them."""

from __future__ import annotations

import pytest

from miles.learn.learner import Learner
from miles.learn.tiny import tiny_config, tiny_model
from miles.plan.counter import LiveBytes
from miles.plan.shape import Lengths, longest_groups
from miles.plan.simulate import continued, simulate, simulate_depth

SHAPE = {"hidden_size": 64, "num_hidden_layers": 7}


def real_peak(recipe) -> float:
    """Bytes at the fullest moment of a second step of the learner itself."""
    config = tiny_config("llama", tied=False, **SHAPE)
    groups = longest_groups(Lengths.of(recipe, config), 16, recipe.rollout.group_size, config.vocab_size)
    with LiveBytes() as counter:
        learner = Learner(tiny_model("llama", tied=False, **SHAPE), recipe)
        for _ in range(2):
            counter.forget_peaks()
            step = learner.pack(groups)
            learner.update(step, learner.score(step))
    return max(sum(kinds.values()) for kinds in counter.peaks.values())


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm__name": "grpo"},
        {"algorithm__name": "ppo", "learner__gradient_checkpointing": True},
        {"algorithm__name": "ppo", "lora__rank": 4, "learner__param_dtype": "bf16"},
    ],
)
def test_a_simulated_step_holds_what_the_learner_holds(recipe_of, keys) -> None:
    recipe = recipe_of(**keys)
    planned = simulate(recipe, tiny_config("llama", tied=False, **SHAPE), tokens=128)
    assert planned.peak == pytest.approx(real_peak(recipe), rel=0.03)


@pytest.mark.parametrize("ranks", [1, 4])
def test_few_blocks_say_what_all_of_them_hold(recipe_of, ranks: int) -> None:
    recipe = recipe_of(algorithm__name="grpo", learner__gradient_checkpointing=True, parallel__shard=ranks)
    config = tiny_config("llama", tied=False, num_hidden_layers=9)
    short = simulate(recipe, config, 128)
    whole = simulate_depth(recipe, config, 128, 9)
    assert short.blocks == (4, 5)
    assert short.phases.keys() == whole.phases.keys()
    for phase, kinds in whole.phases.items():
        assert sum(short.phases[phase].values()) == pytest.approx(sum(kinds.values()), rel=1e-3)
    assert short.resting == pytest.approx(whole.resting)


def test_ranks_share_weights_gradients_and_moments(recipe_of) -> None:
    config = tiny_config("llama", tied=False, **SHAPE)
    one, two = (simulate(recipe_of(algorithm__name="grpo", parallel__shard=n), config, 128) for n in (1, 2))
    for kind in ("parameters/actor", "optimizer/actor"):
        assert two.resting[kind] <= 0.51 * one.resting[kind]
    assert two.phases["update actor/optimizer"]["gradients/actor"] <= 0.51 * one.resting["parameters/actor"]


def test_lora_trains_little(recipe_of) -> None:
    recipe = recipe_of(algorithm__name="ppo", lora__rank=2, learner__param_dtype="bf16")
    config = tiny_config("llama", tied=False, **SHAPE)
    planned = simulate(recipe, config, 128)
    rest = planned.resting
    assert planned.roles == ("actor", "ref", "critic")
    adapters = 4 * 2 * 7 * sum(64 + n for n in (64, 32, 32, 64, 128, 128)) + 4 * 2 * 7 * (128 + 64)
    assert rest["parameters/actor"] == adapters
    assert rest["optimizer/actor"] == 2 * adapters
    assert rest["parameters/critic"] == adapters + 4 * 65


def test_lines_are_straight_and_never_below_zero() -> None:
    assert continued({"a": 10.0, "b": 4.0}, {"a": 12.0, "b": 2.0, "c": 1.0}, 3.0) == {"a": 16.0, "b": 0.0, "c": 3.0}
