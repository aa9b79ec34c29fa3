"""Summaries of finished groups: hand-worked numbers."""

from __future__ import annotations

import math

import pytest

from miles.buffer.store import decode_summary, encode_summary
from miles.buffer.summary import summarise, unfinished
from miles.types import Group, Sample, Segment


def sample(tokens: tuple[int, ...], reward: float | None, stop: str = "stop", **parts: float | None) -> Sample:
    n = len(tokens)
    segment = Segment((9, *tokens), (False, *(True,) * n), (0.0, *(-1.0,) * n), (-1, *(3,) * n))
    return Sample((segment,), stop, "", reward, parts)  # type: ignore[arg-type]


def test_hand_worked_summary() -> None:
    group = Group(
        ordinal=12,
        row=2,
        samples=(
            sample((1, 2, 3, 4, 1, 2, 3, 4), 1.0, right=1.0),  # 4-grams 1234 2341 3412 4123 1234: 4 of 5 distinct
            sample((1, 2), None, "length", right=None, short=0.5),
            sample((1, 2), 0.0, right=0.0),
            sample((7, 7, 7, 7, 7), 0.0, right=0.0),  # 7777 twice: 1 of 2 distinct
        ),
    )
    summary = summarise(group, "solved_none")
    assert (summary.ordinal, summary.reason, summary.version_min) == (12, "solved_none", 3)
    assert summary.rewards == (1.0, None, 0.0, 0.0)
    assert summary.reward_parts == {"right": (1.0, None, 0.0, 0.0), "short": (None, 0.5, None, None)}
    assert summary.lengths == (8, 2, 2, 5)
    assert summary.truncated == (False, True, False, False)
    assert summary.unique_fraction == 0.75
    assert summary.repeat_fraction == pytest.approx((1 / 5 + 0 + 0 + 1 / 2) / 4)
    assert decode_summary(encode_summary(summary)) == summary


def test_prompt_and_environment_tokens_do_not_count() -> None:
    turns = Segment(
        (1, 2, 3, 8, 8, 8, 8, 8, 4), (False, True, True, *(False,) * 5, True), (0.0,) * 9, (-1, 0, 0, *(-1,) * 5, 0)
    )
    same_answers = Segment((7, 2, 3, 4), (False, True, True, True), (0.0,) * 4, (-1, 0, 0, 0))
    summary = summarise(Group(0, 0, (Sample((turns,), "stop", ""), Sample((same_answers,), "stop", ""))), None)
    assert summary.lengths == (3, 3)
    assert summary.unique_fraction == 0.5
    assert summary.repeat_fraction == 0.0


def test_a_prompt_without_samples_has_no_numbers() -> None:
    summary = unfinished(4, "error")
    assert (summary.ordinal, summary.reason, summary.rewards, summary.lengths, summary.version_min) == (
        4,
        "error",
        (),
        (),
        -1,
    )
    assert math.isnan(summary.unique_fraction)
    assert math.isnan(summary.repeat_fraction)
