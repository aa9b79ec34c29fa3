"""The prompt stream is a pure function whose epochs are permutations and whose steps never meet a row twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.buffer.stream import PromptStream
from miles.errors import ConfigError
from miles.types import Prompt


def rows(stream: PromptStream, count: int) -> list[int]:
    return [stream.at(ordinal).row for ordinal in range(count)]


@given(st.data(), st.integers(1, 24), st.integers(0, 2**40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_epoch_is_a_permutation_and_every_window_distinct(
    data: st.DataObject, num_rows: int, seed: int, shuffle: bool
) -> None:
    groups = data.draw(st.integers(1, num_rows))
    found = rows(PromptStream(num_rows, seed, shuffle, groups), 5 * num_rows)
    for epoch in range(5):
        assert sorted(found[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    for start in range(len(found) - groups + 1):
        assert len(set(found[start : start + groups])) == groups


@given(st.integers(2, 20), st.integers(0, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_the_order_of_questions_does_not_matter(num_rows: int, seed: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, num_rows))
    expected = rows(PromptStream(num_rows, seed, True, groups), 8 * num_rows)
    asked = PromptStream(num_rows, seed, True, groups)
    for ordinal in data.draw(st.lists(st.integers(0, 8 * num_rows - 1), max_size=20)):
        assert asked.at(ordinal) == Prompt(ordinal, ordinal // num_rows, expected[ordinal])


GOLDEN_1000 = [404, 708, 413, 847, 217, 802, 70, 483, 849, 569, 427, 180, 825, 75, 796, 927]


def test_the_order_is_bitwise_the_same_in_another_process() -> None:
    program = (
        "from miles.buffer.stream import PromptStream as P; s = P(1000, 7, True, 8); "
        "print([s.at(i).row for i in (*range(5), *range(995, 1005), 123456)])"
    )
    stream = PromptStream(1000, 7, True, 8)
    here = [stream.at(ordinal).row for ordinal in (*range(5), *range(995, 1005), 123456)]
    there = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "3"}, capture_output=True, check=True
    )
    assert there.stdout.decode().strip() == str(here)
    assert here == GOLDEN_1000


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    stream = PromptStream(50, 0, True, 1)
    first, second = rows(stream, 100)[:50], rows(stream, 100)[50:]
    assert first != second
    assert first != rows(PromptStream(50, 1, True, 1), 50)
    assert rows(PromptStream(50, 0, False, 8), 60) == [*range(50), *range(10)]


def test_length_and_bounds() -> None:
    assert PromptStream(5, 0, True, 2).length is None
    stream = PromptStream(5, 0, True, 2, epochs=3)
    assert stream.length == 15
    assert stream.at(14).epoch == 2
    for outside in (-1, 15):
        with pytest.raises(IndexError, match=f"ordinal {outside} is outside of the prompt stream"):
            stream.at(outside)


@pytest.mark.parametrize(
    ("num_rows", "groups", "epochs", "message"),
    [
        (7, 8, None, r"algorithm\.groups_per_step is 8, but data\.source has only 7 rows.*lower .* to 7"),
        (0, 1, None, r"data\.source has 0 rows"),
        (3, 0, None, r"algorithm\.groups_per_step is 0"),
        (3, 1, 0, r"data\.epochs is 0"),
    ],
)
def test_numbers_that_cannot_work_are_refused(num_rows: int, groups: int, epochs: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptStream(num_rows, 0, True, groups, epochs)
