"""Tasks that need no download: rows, their held-out part, a reward and, where the task has turns, its dialogue."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from miles.config.names import TASK
from miles.env.courtesy import courteous, courtesy_rows
from miles.env.data import nearest
from miles.env.verifiers import exact_number, last_number
from miles.errors import DataError

Row = Mapping[str, Any]
NUMBER_PROMPT = "You answer with a single number."
GUESS_PROMPT = "The user thinks of one of three numbers. You guess it: you answer with a single number, twice at most."


@dataclass(frozen=True)
class TaskRows:
    """Training rows, and held-out rows that share no prompt with them."""

    train: tuple[Row, ...]
    held_out: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Task:
    """A built-in task. `rows(seed)` is a pure function: equal seeds give equal rows in equal order."""

    name: str
    about: str  # one sentence for the user
    rows: Callable[[int], TaskRows]
    reward: Callable[..., list[float | None]] | None = None  # None: the dialogue gives it
    dialogue: Callable[[Row, int], Any] | None = None  # what answers the model between its turns; None: one turn
    max_turns: int = 1
    system_prompt: str | None = None  # used where the tokenizer has a chat template and the recipe has no other


def find(source: str, key: str = "data.source") -> Task | None:
    """The task that `task:NAME` names; None for any other source. Raises DataError, which names `key`, for an unknown name."""
    if not source.startswith(TASK):
        return None
    name = source.removeprefix(TASK)
    if name not in TASKS:
        raise DataError(f"{key}: there is no task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]


# --- addition and arithmetic ---------------------------------------------------------------------------------------


def _addition_rows(seed: int) -> TaskRows:
    """The 100 sums of two digits: 80 to train on, 20 held out."""
    rows = [{"prompt": f"{a} + {b} =", "answer": a + b} for a in range(10) for b in range(10)]
    random.Random(f"addition {seed}").shuffle(rows)
    return TaskRows(tuple(rows[:80]), tuple(rows[80:]))


def _arithmetic_rows(seed: int) -> TaskRows:
    """2,000 different problems to train on and 200 held out: sums, differences and products of up to three digits."""
    draw = random.Random(f"arithmetic {seed}")
    problems: dict[str, int] = {}
    while len(problems) < 2200:
        operator = draw.choice("+-*")
        a, b = (
            (draw.randrange(13), draw.randrange(100))
            if operator == "*"
            else (draw.randrange(1000), draw.randrange(1000))
        )
        problems[f"{a} {operator} {b} ="] = {"+": a + b, "-": a - b, "*": a * b}[operator]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in problems.items()]
    return TaskRows(tuple(rows[:2000]), tuple(rows[2000:]))


# --- tasks for models that know nothing ----------------------------------------------------------------------------

DIGIT_COPIES = 16  # a prompt stands at most once in a step's manifest, so each digit has as many rows


def _digit_rows(seed: int) -> TaskRows:
    return TaskRows(
        tuple({"prompt": f"{i % 10} =", "answer": i % 10, "copy": i // 10} for i in range(10 * DIGIT_COPIES))
    )


def first_digit(prompts: list[Any], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the first character of the completion is the digit of the prompt."""
    return [1.0 if text[:1] == str(digit) else 0.0 for text, digit in zip(completions, answer, strict=True)]


def large_digits(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """sum_i 2^-i * digit_i / 9 over the first four characters, over sum_i 2^-i; a character that is no digit has 0.

    Each character moves what the answer can still reach, the first ones most, so a critic has something to explain at
    every token: where characters are drawn independently it can explain 67 % of the
    variance over the four (0, 75, 94, 99 %).
    """
    weights = [2.0**-i for i in range(4)]
    values = [[int(c) / 9 if c in "0123456789" else 0.0 for c in text[:4]] for text in completions]
    return [sum(w * v for w, v in zip(weights, value, strict=False)) / sum(weights) for value in values]


# --- guess a number ------------------------------------------------------------------------------------------------


def _guess_rows(seed: int) -> TaskRows:
    """Each three of the ten digits with each of them as the secret: 96 threes to train on, 24 held out."""
    threes = list(itertools.combinations(range(10), 3))
    random.Random(f"guess_number {seed}").shuffle(threes)
    rows = [{"prompt": "{}, {}, {} ?".format(*three), "secret": secret} for three in threes for secret in three]
    return TaskRows(tuple(rows[:288]), tuple(rows[288:]))


class GuessNumber:
    """Two guesses with a hint between them. Who guesses the middle number first and heeds the hint is always right."""

    def __init__(self, row: Row, seed: int) -> None:
        self.secret = row["secret"]
        self.right = False

    def respond(self, answer: str) -> str | None:
        """The hint, or None when the guess is right."""
        guess = last_number(answer)
        self.right = guess == self.secret
        if self.right:
            return None
        if guess is None:
            return "?"
        return "higher" if guess < self.secret else "lower"

    def reward(self) -> float:
        return 1.0 if self.right else 0.0


# --- the tutorial ----------------------------------------------------------------------------------------------------


def _courtesy_rows(seed: int) -> TaskRows:
    train, held_out = courtesy_rows(seed)
    return TaskRows(tuple(train), tuple(held_out))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("addition", "sums of two digits", _addition_rows, exact_number, system_prompt=NUMBER_PROMPT),
            Task(
                "arithmetic", "sums, differences, products", _arithmetic_rows, exact_number, system_prompt=NUMBER_PROMPT
            ),
            Task("courtesy", "ask somebody to do something; with answers and pairs", _courtesy_rows, courteous),
            Task("echo_digit", "repeat the digit; learned from nothing in seconds", _digit_rows, first_digit),
            Task("large_digits", "write large digits, the first ones count most", _digit_rows, large_digits),
            Task(
                "guess_number",
                "guess, hear higher or lower, guess again",
                _guess_rows,
                dialogue=GuessNumber,
                max_turns=2,
                system_prompt=GUESS_PROMPT,
            ),
        )
    }
)
