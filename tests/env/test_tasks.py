from __future__ import annotations

import itertools
import random
import statistics

import pytest

from miles.env.tasks import TASKS, GuessNumber, find, first_digit, large_digits
from miles.errors import DataError


@pytest.mark.parametrize("name", sorted(TASKS))
def test_rows_are_a_pure_function_of_the_seed(name):
    task = find(f"task:{name}")
    assert task.rows(3) == task.rows(3)
    assert all(row["prompt"] for row in task.rows(3).train)
    assert (task.reward is None) == (task.dialogue is not None)


def test_addition_splits_the_hundred_sums():
    rows = find("task:addition").rows(0)
    assert (len(rows.train), len(rows.held_out)) == (80, 20)
    whole = {row["prompt"]: row["answer"] for row in (*rows.train, *rows.held_out)}
    assert whole == {f"{a} + {b} =": a + b for a, b in itertools.product(range(10), repeat=2)}
    assert rows.held_out != find("task:addition").rows(1).held_out


def test_arithmetic_problems_are_different_and_right():
    rows = find("task:arithmetic").rows(0)
    assert (len(rows.train), len(rows.held_out)) == (2000, 200)
    whole = [*rows.train, *rows.held_out]
    assert len({row["prompt"] for row in whole}) == 2200
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for row in whole:
        a, operator, b, _ = row["prompt"].split()
        assert operators[operator](int(a), int(b)) == row["answer"]


def test_echo_digit_rewards_the_first_character_alone():
    rows = find("task:echo_digit").rows(0).train
    assert {(row["prompt"], row["answer"]) for row in rows} == {(f"{d} =", d) for d in range(10)}
    assert len(rows) >= 16  # a step of 16 prompts needs as many rows
    assert first_digit([""] * 5, ["5", "51", " 5", "15", ""], answer=[5] * 5) == [1, 1, 0, 0, 0]


def test_large_digits_weighs_the_first_characters_most():
    rewards = large_digits([""] * 6, ["9999", "9", "0999", "xxxx", "", "99990"])
    assert rewards == pytest.approx([1, 8 / 15, 7 / 15, 0, 0, 1])


def test_a_critic_could_explain_two_thirds_of_large_digits():
    # For independent characters the best value of a prefix is its mean over all continuations.
    draw = random.Random(0)
    texts = ["".join(draw.choice("0123456789abcdefghijklmnopqrstuv") for _ in range(4)) for _ in range(4000)]
    rewards = large_digits(texts, texts)
    total = statistics.pvariance(rewards)
    assert total > 1e-3
    by_character = statistics.fmean(d / 9 for d in range(10)) * 10 / 32
    left = []
    for t in range(4):
        rest = by_character * sum(2.0**-i for i in range(t, 4)) / 1.875
        values = [known + rest for known in large_digits(texts, [text[:t] for text in texts])]
        left.append(statistics.pvariance([r - v for r, v in zip(rewards, values, strict=True)]))
    assert 1 - statistics.fmean(left) / total == pytest.approx(0.67, abs=0.02)


def test_guess_number_rows_cover_every_secret_of_every_three():
    rows = find("task:guess_number").rows(0)
    assert (len(rows.train), len(rows.held_out)) == (288, 72)
    assert not {r["prompt"] for r in rows.train} & {r["prompt"] for r in rows.held_out}
    assert len({(r["prompt"], r["secret"]) for r in (*rows.train, *rows.held_out)}) == 360


def play(secret: int, *guesses: str) -> tuple[list[str | None], float]:
    game = GuessNumber({"secret": secret}, seed=0)
    return [game.respond(guess) for guess in guesses], game.reward()


def test_guess_number_gives_hints_and_rewards_the_last_guess():
    assert play(4, "4") == ([None], 1)
    assert play(4, "I say 3", "4") == (["higher", None], 1)
    assert play(4, "7", "3") == (["lower", "higher"], 0)
    assert play(4, "what?", "4.0") == (["?", None], 1)


def test_unknown_tasks_are_named_and_other_sources_are_none():
    with pytest.raises(DataError, match="there is no task 'adition'; the nearest is 'addition'"):
        find("task:adition")
    assert find("rows.jsonl") is None
