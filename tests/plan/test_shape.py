"""Models of other depths, and the fullest micro-batch that a recipe's rows can make."""

from __future__ import annotations

import pytest

from miles.errors import ModelError
from miles.learn.tiny import tiny_config
from miles.plan.shape import (
    Lengths,
    depths,
    empty_model,
    longest_groups,
    microbatches,
    period_of,
    share_tokens,
    with_layers,
)

LENGTHS = Lengths(prompt=24, completion=16)


def test_a_model_of_fewer_layers_keeps_their_kinds() -> None:
    config = tiny_config("gemma3", num_hidden_layers=12, layer_types=["sliding_attention", "full_attention"] * 6)
    short = with_layers(config, 4)
    assert short.layer_types == ["sliding_attention", "full_attention"] * 2
    assert len(empty_model(short).model.layers) == 4
    assert config.num_hidden_layers == 12


@pytest.mark.parametrize(
    ("kinds", "period"),
    [(["f"] * 6, 1), (["s", "f"] * 3, 2), (["s", "s", "f"] * 2, 3), (["s", "s", "f", "s"], 3), ([], 1)],
)
def test_the_period_of_kinds(kinds: list[str], period: int) -> None:
    assert period_of(kinds) == period


def test_depths_have_a_middle_and_whole_periods() -> None:
    assert depths(tiny_config("llama", num_hidden_layers=80)) == (4, 5)
    assert depths(tiny_config("llama", num_hidden_layers=3)) == (3, 3)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 5
    assert depths(tiny_config("gemma3", num_hidden_layers=30, layer_types=kinds)) == (6, 12)


def test_prompts_are_as_long_as_the_recipe_or_the_context_says(recipe_of) -> None:
    config = tiny_config("llama")  # a context of 512
    assert Lengths.of(recipe_of(), config) == LENGTHS
    unset = recipe_of(data__max_prompt_tokens=None, rollout__max_new_tokens=100)
    assert Lengths.of(unset, config) == Lengths(412, 100)


def test_groups_share_their_prompt_and_nothing_else() -> None:
    groups = longest_groups(LENGTHS, samples=6, group_size=4, vocabulary=50)
    assert [len(group.samples) for group in groups] == [4, 4]
    texts = [sample.segments[0].token_ids for group in groups for sample in group.samples]
    assert len({text[: LENGTHS.prompt] for text in texts}) == 2
    assert len({text[: LENGTHS.prompt + 1] for text in texts}) == 8
    assert all(len(text) == LENGTHS.total for text in texts)


@pytest.mark.parametrize(("tokens", "most"), [(128, 128), (10, LENGTHS.total - 1), (10_000, 384)])
def test_the_fullest_batch_fills_the_microbatch(recipe_of, tokens: int, most: int) -> None:
    recipe, model = recipe_of(learner__tokens_per_microbatch=tokens), empty_model(tiny_config("llama"))
    step, batches = microbatches(recipe, model, LENGTHS, tokens)
    sizes = [batch.rows * batch.width for batch in batches]
    assert sizes == sorted(sizes, reverse=True)
    assert 0.5 * most <= sizes[0] <= most
    assert len(step.segments) <= 16


def test_ranks_divide_the_samples(recipe_of) -> None:
    recipe, model = recipe_of(parallel__shard=4, parallel__replicate=2), empty_model(tiny_config("llama"))
    step, _ = microbatches(recipe, model, LENGTHS, 128)
    assert len(step.segments) == 2
    assert share_tokens(recipe, LENGTHS) == 2 * 16 + 24
    assert share_tokens(recipe_of(), LENGTHS) == 16 * 16 + 4 * 24


def test_a_config_that_makes_no_model_is_refused() -> None:
    config = tiny_config("llama")
    config.hidden_act = "no-such-function"
    with pytest.raises(ModelError, match="makes no causal language model"):
        empty_model(config)
