from __future__ import annotations

import importlib.util

import pytest

from miles.env.verifiers import LIBRARY, last_boxed, last_number
from miles.errors import RewardError


def score(name: str, texts: list[str], answer: object = None) -> list[float | None]:
    return LIBRARY[name]([""] * len(texts), texts, answer=[answer] * len(texts))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("7-5", "5"),
        ("x = -5.", "-5"),
        ("it costs $1,234", "1234"),
        ("5, 6", "6"),
        ("3.5", "3.5"),
        ("8.0", "8"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, number):
    found = last_number(text)
    assert (found is None) if number is None else str(found.normalize()) == number


def test_exact_number_compares_the_last_number():
    assert score("exact_number", ["7", "4 + 3 = 7.", "8", "seven", "7.5", "7 or 8", "-7"], 7) == [1, 1, 0, 0, 0, 0, 0]
    assert score("exact_number", ["18"], "so 9 * 2 = 18\n#### 18") == [1]
    assert score("exact_number", ["18"], "no number") == [None]
    assert score("exact_number", ["9" * 5000, "9" * 4999 + "8"], "9" * 5000) == [1, 0]


def test_exact_match_pays_no_part_of_the_answer():
    texts = ["", "d", "not a dog but a cat", "Dog.", "dog", "  DOG ", "<answer></answer>", "<answer>dog</answer>"]
    assert score("exact_match", texts, "dog") == [0, 0, 0, 1, 1, 1, 0, 1]
    assert score("exact_match", ["<answer>dog</answer><answer>cat</answer>"], "dog") == [0]
    assert score("exact_match", ["", "."], "") == [None, None]


def test_boxed_reads_the_last_closed_box():
    assert last_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1") is None
    texts = [r"so \boxed{ \frac{1}{2} }", r"\boxed{2}", "\\frac{1}{2}", r"\boxed{}"]
    assert score("boxed", texts, r"\frac{1}{2}") == [1, 0, 0, 0]
    assert score("boxed", [r"\boxed{4}"], r"thus \boxed{4}") == [1]
    assert score("contains_boxed", [r"\boxed{4}", r"\boxed{}", r"\boxed{1}\boxed{2}", "4"]) == [1, 0, 0, 0]


def test_three_answers_and_an_unparsable_one_in_the_middle_keep_their_places():
    assert score("exact_number", ["5", r"\sqrt", "5"], 5) == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think></think>a", 0),
        ("<think></think><answer>a</answer>", 0),
        ("<think>x</think><answer> </answer>", 0),
        ("<think>x</think><answer>a</answer><answer>b</answer>", 0),
        ("<think>x</think><think>y</think><answer>a</answer>", 0),
        ("use <think>x</think><answer>a</answer>", 0),
        ("<think>x</think><answer>a</answer> more", 0),
        ("<think>x</answer></think><answer>a</answer>", 0),
        ("<think>\nx\n</think>\n<answer>\na\n</answer>\n", 1),
    ],
)
def test_think_format(text, reward):
    assert score("think_format", [text]) == [reward]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is not None, reason="math-verify is installed")
def test_math_without_the_extra_says_how_to_install_it():
    with pytest.raises(RewardError, match=r"math-verify.*miles-rl\[math\]"):
        score("math", ["1"], "1")


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")
def test_math_knows_equal_mathematics():
    assert score("math", [r"$\frac{2}{4}$", "0.5", r"\sqrt", "", "$0.4$"], r"\frac{1}{2}") == [1, 1, 0, 0, 0]
    assert score("math", [r"\sqrt"], "") == [None]
