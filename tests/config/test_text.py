"""Command lines and environment variables: text becomes the value that its key takes."""

from __future__ import annotations

from typing import Any

import pytest

from miles.config.text import parse_value, split_overrides
from miles.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("algorithm.steps", "6", 6),
        ("algorithm.steps", "none", None),
        ("algorithm.steps", "six", "six"),
        ("learner.learning_rate", "1e-5", 1e-5),
        ("eval.greedy", "false", False),
        ("eval.greedy", "False", "False"),
        ("learner.betas", "[0.9, 0.99]", [0.9, 0.99]),
        ("rollout.stop", '["a", "b"]', ["a", "b"]),
        ("model.name", "7", "7"),
        ("model.name", "true", "true"),
        ("model.name", '"quoted"', "quoted"),
        ("model.name", "none", "none"),
        ("data.system_prompt", "none", None),
        ("data.system_prompt", '"none"', "none"),
        ("data.system_prompt", "1 = 2\nx = 3", "1 = 2\nx = 3"),
        ("run.seed", "1\nother = 2", "1\nother = 2"),
        ("algorithm.correction.mode", "none", "none"),
        ("no.such", "3", "3"),
    ],
)
def test_text_is_read_as_its_key_needs_it(key: str, text: str, value: Any) -> None:
    assert parse_value(key, text) == value
    assert type(parse_value(key, text)) is type(value)


def test_overrides_are_taken_out_of_the_command_line() -> None:
    arguments = [
        "train",
        "a.toml",
        "--algorithm.steps",
        "6",
        "--run",
        "runs/x.y",
        "--learner.learning-rate=2e-5",
        "--reward.truncated_value",
        "-1",
        "--algorithm.correction.mode",
        "none",
        "--resume",
        "--algorithm.steps",
        "7",
    ]
    overrides, rest = split_overrides(arguments)
    assert overrides == {
        "algorithm.steps": 7,
        "learner.learning_rate": 2e-5,
        "reward.truncated_value": -1,
        "algorithm.correction.mode": "none",
    }
    assert rest == ["train", "a.toml", "--run", "runs/x.y", "--resume"]


def test_an_equals_sign_may_stand_in_the_value_and_the_value_may_be_empty() -> None:
    overrides, rest = split_overrides(["--data.system_prompt=a = b", "--rollout.environment=", "--run=a.b"])
    assert overrides == {"data.system_prompt": "a = b", "rollout.environment": ""}
    assert rest == ["--run=a.b"]


def test_keys_without_a_value_are_told_with_what_they_expect() -> None:
    with pytest.raises(ConfigError) as error:
        split_overrides(["--eval.greedy", "--no.such", "--run", "x", "--algorithm.steps"])
    assert error.value.problems == [
        "--eval.greedy (command line) needs a value: true or false.",
        "--no.such (command line) needs a value.",
        '--algorithm.steps (command line) needs a value: an integer >= 1, or "none".',
    ]
