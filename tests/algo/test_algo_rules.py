"""Which recipes a row refuses: each message names the key, the value and the way out."""

from __future__ import annotations

import pytest

from miles.algo import ROWS, AlgorithmRow, correction_mode, find, problems, warnings
from miles.config.schema import Recipe


def recipe(name="grpo", **sections) -> Recipe:
    """Sections as dictionaries: recipe("ppo", rollout={"group_size": 1})."""
    sections["algorithm"] = {"name": name, **sections.get("algorithm", {})}
    return Recipe.model_validate(sections)


def told(name="grpo", **sections) -> str:
    row = find(name)
    return "\n".join(problems(row, recipe(name, **sections)))


def test_every_row_accepts_its_own_defaults():
    for name, row in ROWS.items():
        defaults = dict(row.defaults)
        assert problems(row, recipe(name, algorithm=defaults)) == []
        assert problems(row, recipe(name)) == []


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.group_centred])
def test_one_sample_a_group_is_refused_by_every_group_row(name):
    text = told(name, rollout={"group_size": 1})
    assert text.startswith(f"rollout.group_size must be >= 2 for {name}, got 1")
    assert "reinforce or ppo" in text


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.group_centred])
def test_one_sample_a_group_is_fine_elsewhere(name):
    assert told(name, rollout={"group_size": 1}) == ""


@pytest.mark.parametrize("name", ["opo", "reinforce", "remax"])
def test_rows_without_a_clip_take_one_update(name):
    assert f"learner.epochs must be 1 for {name}, got 2" in told(name, learner={"epochs": 2})
    assert f"learner.minibatches must be 1 for {name}, got 4" in told(name, learner={"minibatches": 4})


@pytest.mark.parametrize("name", ["dppo", "opo", "reinforce", "remax"])
@pytest.mark.parametrize("mode", ["none", "decoupled"])
def test_bypass_rows_refuse_other_modes(name, mode):
    text = told(name, algorithm={"correction": {"mode": mode}})
    assert f'algorithm.correction.mode = "{mode}" does not fit {name}' in text
    assert "auto or bypass" in text


def test_gspo_refuses_bypass():
    assert "does not fit gspo" in told("gspo", algorithm={"correction": {"mode": "bypass"}})
    assert told("grpo", algorithm={"correction": {"mode": "bypass"}}) == ""


def test_no_correction_is_refused_off_policy():
    none = {"correction": {"mode": "none"}}
    assert told(algorithm=none) == ""
    assert "buffer.max_staleness = 1" in told(algorithm=none, buffer={"max_staleness": 1})
    text = told(algorithm=none, learner={"epochs": 2, "minibatches": 2})
    assert "learner.epochs * learner.minibatches = 4" in text
    assert "use auto, decoupled or bypass" in text


def test_an_engine_beside_the_learner_is_always_corrected_for():
    inprocess = recipe(algorithm={"correction": {"mode": "none"}})
    beside = inprocess.model_copy(update={"engine": inprocess.engine.model_copy(update={"kind": "vllm"})})
    assert "engine.kind = vllm" in problems(find("grpo"), beside)[0]
    automatic = beside.model_copy(update={"algorithm": recipe().algorithm})
    assert correction_mode(find("grpo"), automatic) == "decoupled"


@pytest.mark.parametrize(
    ("name", "sections", "mode"),
    [
        ("grpo", {}, "none"),
        ("grpo", {"buffer": {"max_staleness": 1}}, "decoupled"),
        ("grpo", {"learner": {"epochs": 2}}, "decoupled"),
        ("dppo", {"learner": {"epochs": 2}}, "bypass"),
        ("remax", {}, "bypass"),
        ("grpo", {"algorithm": {"correction": {"mode": "decoupled"}}}, "decoupled"),
    ],
)
def test_auto_mode(name, sections, mode):
    assert correction_mode(find(name), recipe(name, **sections)) == mode


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        ({"kind": "mask"}, "algorithm.correction.kind = mask has no effect: the mode is none here (auto)"),
        ({"mode": "bypass", "cap": 3.0}, "algorithm.correction.cap = 3.0 has no effect: the mode is bypass here;"),
        ({"mode": "decoupled", "low": 0.5}, 'low = 0.5 has no effect with kind = "truncate"'),
        ({"mode": "decoupled", "kind": "mask", "cap": 3.0}, 'cap = 3 has no effect with kind = "mask"'),
        ({"mode": "decoupled", "kind": "mask", "low": 6.0}, "low = 6 must be below high = 5"),
        ({"mode": "decoupled", "kind": "sequence_mask_geometric"}, "max_new_tokens = 64 allows none"),
    ],
)
def test_correction_keys_that_could_not_act(correction, words):
    assert words in told(algorithm={"correction": correction}, rollout={"max_new_tokens": 64})


def test_masks_that_can_act_are_fine():
    for kind in ("mask", "sequence_mask_geometric", "sequence_mask_product", "sequence_truncate"):
        assert told(algorithm={"correction": {"mode": "decoupled", "kind": kind}}) == ""


def test_kl_in_the_reward_needs_token_rewards():
    text = told("grpo", algorithm={"beta": 0.1, "kl_place": "reward"})
    assert 'algorithm.kl_place = "reward" does not fit grpo' in text
    assert told("ppo", algorithm={"kl_place": "reward"}) == ""
    assert told("ppo", algorithm={"kl_place": "loss", "kl_estimator": "k3"}) == ""
    assert 'algorithm.kl_estimator = "k3" has no effect' in told("ppo", algorithm={"kl_estimator": "k3"})


def test_keys_of_a_reference_that_is_not_used():
    assert "algorithm.kl_target = 0.1 has no effect with beta = 0" in told(algorithm={"kl_target": 0.1})
    assert "algorithm.ref_update_every = 5 has no effect" in told(algorithm={"ref_update_every": 5})
    assert told(algorithm={"beta": 0.1, "kl_target": 0.1, "ref_update_every": 5}) == ""


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("dr_grpo", "scale_std", True),
        ("ppo", "scale_std", False),
        ("cispo", "clip_high", 0.3),
        ("reinforce", "dual_clip", 3.0),
        ("grpo", "ratio_cap", 3.0),
        ("cispo", "mask_threshold", 0.1),
        ("grpo", "gamma", 0.9),
        ("grpo", "lam", 0.9),
        ("ppo", "vapo_alpha", 1.0),
        ("grpo", "value_clip", 0.5),
        ("grpo", "critic_warmup", 5),
        ("grpo", "value_ref", 0.5),
    ],
)
def test_a_key_that_the_row_does_not_read_is_refused(name, key, value):
    assert f"algorithm.{key} = {value} has no effect with {name}" in told(name, algorithm={key: value})


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("grpo", {"scale_std": False, "clip_high": 0.28, "dual_clip": 3.0, "reduction": "constant", "beta": 0.1}),
        ("ppo", {"gamma": 0.9, "lam": 0.9, "value_clip": 0.5, "critic_warmup": 5}),
        ("vapo", {"vapo_alpha": 1.0, "nll_coef": 0.0}),
        ("dppo", {"mask_threshold": 0.1, "ratio_cap": 5.0}),
        ("ppo", {"value_clip": None}),
    ],
)
def test_overrides_that_a_row_reads_are_fine(name, algorithm):
    assert told(name, algorithm=algorithm) == ""


def test_overlong_buffer_must_lie_inside_the_answer():
    assert "reward.overlong_buffer = 0 must lie in 1..256" in told(reward={"overlong": True, "overlong_buffer": 0})
    assert "overlong_buffer = 300 must lie" in told(reward={"overlong": True, "overlong_buffer": 300})
    assert told(reward={"overlong_buffer": 0}) == ""


def test_maxrl_refuses_recipes_with_negative_rewards():
    assert "reward.overlong = true does not fit maxrl" in told("maxrl", reward={"overlong": True})
    value = {"truncated": "value", "truncated_value": -1.0}
    assert "reward.truncated_value = -1 does not fit maxrl" in told("maxrl", reward=value)
    assert told("grpo", reward=value) == ""


def warned(name="grpo", **sections) -> str:
    return "\n".join(warnings(find(name), recipe(name, **sections)))


def test_vapo_warns_about_short_answers():
    assert "use vapo_alpha = 1" in warned("vapo", rollout={"max_new_tokens": 8})
    assert "vapo" not in warned("vapo", rollout={"max_new_tokens": 40})
    assert warned("vapo", rollout={"max_new_tokens": 8}, algorithm={"lam": 0.95}) == ""
    assert warned("vapo", rollout={"max_new_tokens": 8}, algorithm={"vapo_alpha": 1.0}) == ""
    assert warned("ppo", rollout={"max_new_tokens": 8}) == ""


def test_bf16_warns_at_small_learning_rates():
    text = warned(learner={"param_dtype": "bf16", "learning_rate": 1e-5})
    assert "learner.param_dtype = bf16 at learner.learning_rate = 1e-05" in text
    assert "update/visible_fraction" in text
    assert warned(learner={"param_dtype": "bf16", "learning_rate": 3e-5}) == ""
    assert warned(learner={"param_dtype": "bf16", "learning_rate": 0.0}) == ""
    assert warned(learner={"param_dtype": "fp32", "learning_rate": 1e-5}) == ""


def test_a_kl_loss_without_a_gradient_is_named():
    assert "zero expected gradient" in warned(algorithm={"beta": 0.1, "kl_estimator": "k1"})
    assert warned(algorithm={"kl_estimator": "k1"}) == ""


def test_gspo_warns_about_token_weights():
    assert "long answers dominate" in warned("gspo", algorithm={"reduction": "token_mean"})


def test_a_user_row_lists_the_keys_it_reads():
    row = AlgorithmRow("mine", "reward", "broadcast", "clipped", source="", defaults={"clip_low": 0.1})
    assert problems(row, recipe(algorithm={"clip_low": 0.3})) == []
    assert "algorithm.clip_high = 0.3 has no effect with mine" in problems(row, recipe(algorithm={"clip_high": 0.3}))[0]
