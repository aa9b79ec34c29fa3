"""Dotted names, what keys expect in words, and the nearest valid name."""

from __future__ import annotations

import pytest

from miles.config import tree
from miles.config.schema import Recipe


def test_every_key_has_a_description_and_words_for_what_it_expects() -> None:
    for key, info in tree.fields().items():
        assert info.description, key
        assert tree.expected(key), key
    assert len(tree.fields()) > 90


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("algorithm.steps", 'an integer >= 1, or "none"'),
        ("algorithm.lam", 'a number >= 0 and <= 1, or "none"'),
        ("algorithm.dual_clip", 'a number > 1, or "none"'),
        ("algorithm.scale_std", 'true or false, or "none"'),
        ("learner.betas", "a list of 2 numbers >= 0 and < 1"),
        ("rollout.stop", "a list of texts"),
        ("reward.weights", "a list of numbers"),
        ("run.device", 'one of "auto", "cpu", "cuda"'),
        ("run.launcher", 'one of "local", "processes", "ray"'),
        ("learner.gradient_checkpointing", 'true or false or "selective"'),
        ("data.system_prompt", 'a text, or "none"'),
        ("eval.greedy", "true or false"),
    ],
)
def test_expected_in_words(key: str, words: str) -> None:
    assert tree.expected(key) == words


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("algorithm.step", "algorithm.steps"),
        ("rollout.group_sise", "rollout.group_size"),
        ("algorithm.group_size", "rollout.group_size"),
        ("algoritm.name", "algorithm.name"),
        ("modle.name", "model.name"),
        ("learner.lr", "learner.learning_rate"),
        ("algorithm.kl_coef", "algorithm.beta"),
        ("temperature", "rollout.temperature"),
        ("rollout.learningrate", "learner.learning_rate"),
        ("correction.mode", "algorithm.correction.mode"),
        ("rollout.zzzzzz", None),
    ],
)
def test_nearest_key(misspelt: str, meant: str | None) -> None:
    assert tree.nearest(misspelt) == meant


def test_words_of_other_tools_lead_to_keys_that_exist() -> None:
    assert set(tree.OTHER_WORDS.values()) <= set(tree.fields())
    assert not set(tree.OTHER_WORDS) & {key.rpartition(".")[2] for key in tree.fields()}


def test_nearest_section() -> None:
    assert tree.nearest_section("algoritm") == "algorithm"
    assert tree.nearest_section("zzzz") is None


def test_values_by_dotted_name() -> None:
    assert tree.get(Recipe(), "algorithm.correction.cap") == 2.0


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        ("algorithm.steps = 3 is", True),
        ("set algorithm.steps.", True),
        ("algorithm.steps_more = 3", False),
        ("algorithm.steps.more = 3", False),
        ("my.algorithm.steps = 3", False),
    ],
)
def test_a_key_is_mentioned_only_as_a_whole(text: str, mentioned: bool) -> None:
    assert tree.mentions(text, "algorithm.steps") is mentioned
