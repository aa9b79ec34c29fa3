"""Rewards that need no model: numbers, exact answers, boxed results, mathematics, and the shape of an answer.

Each has the signature of a user's own, `reward(prompts, completions, **columns) -> list[float | None]`, gives 1.0 or
0.0 to each completion and reads the right answer from the column `answer`. None: that cannot be read.
"""

from __future__ import annotations

import importlib
import re
import string
from collections.abc import Callable, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from miles.errors import RewardError

# A minus belongs to the number unless it stands between two operands ("7-5"); commas only between threes of digits.
NUMBER = re.compile(r"(?<![\w.)\]])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
THINK_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact_number(prompts: list[Any], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the last number of the completion equals the last number of `answer` (a number, or text with one)."""
    return [_equal(last_number(text), last_number(gold)) for text, gold in zip(completions, answer, strict=True)]


def exact_match(prompts: list[Any], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the whole answer is `answer`, apart from case, outer punctuation and white space.

    The whole answer is what one pair of <answer> tags holds, else the whole completion.
    """
    return [_equal(_plain(tagged(text)), _plain(str(gold))) for text, gold in zip(completions, answer, strict=True)]


def boxed(prompts: list[Any], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where the last \\boxed{...} of the completion holds `answer` (or its last box), character by character."""
    golds = [last_boxed(str(gold)) or str(gold) for gold in answer]
    pairs = zip(completions, golds, strict=True)
    return [_equal(_squeezed(last_boxed(text)), _squeezed(gold)) for text, gold in pairs]


def contains_boxed(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the completion has exactly one \\boxed{...} and something is in it."""
    return [1.0 if text.count("\\boxed{") == 1 and _squeezed(last_boxed(text)) else 0.0 for text in completions]


def math(prompts: list[Any], completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
    """1.0 where completion and `answer` are the same mathematics, judged by math-verify (extra `math`)."""
    try:
        verifier = importlib.import_module("math_verify")
    except ImportError as error:
        raise RewardError(
            "the reward `math` needs math-verify; install it with: pip install 'miles-rl[math]'"
        ) from error
    return [_same_mathematics(verifier, text, str(gold)) for text, gold in zip(completions, answer, strict=True)]


def think_format(prompts: list[Any], completions: list[str], **columns: Any) -> list[float | None]:
    """1.0 where the completion is one <think> block and then one <answer> block, both with text, and nothing else."""
    return [1.0 if _is_think_answer(text) else 0.0 for text in completions]


LIBRARY: Mapping[str, Callable[..., list[float | None]]] = MappingProxyType(
    {f.__name__: f for f in (exact_number, exact_match, boxed, contains_boxed, math, think_format)}
)


def last_number(value: Any) -> Decimal | None:
    """The last number in a text, or the number itself; None where there is none. Decimal: no digits are lost."""
    found = NUMBER.findall(str(value))
    return Decimal(found[-1].replace(",", "")) if found else None


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces counted; None where no box is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def tagged(text: str) -> str:
    """What the one pair of <answer> tags holds; the text where there is none; nothing where there are several."""
    found = ANSWER_TAG.findall(text)
    if not found:
        return text
    return found[0] if len(found) == 1 else ""


def _equal(given: Any, gold: Any) -> float | None:
    if gold is None or gold == "":
        return None
    return 1.0 if given == gold else 0.0


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(string.punctuation + " ")


def _squeezed(text: str | None) -> str | None:
    return None if text is None else "".join(text.split())


def _is_think_answer(text: str) -> bool:
    match = THINK_ANSWER.fullmatch(text)
    return (
        match is not None and all(text.count(tag) == 1 for tag in TAGS) and all(part.strip() for part in match.groups())
    )


def _same_mathematics(verifier: Any, text: str, gold: str) -> float | None:
    # Its own time limits use signals, which only the main thread may set; reward.timeout_s bounds the call instead.
    right = verifier.parse(gold, parsing_timeout=None) or verifier.parse(f"${gold}$", parsing_timeout=None)
    if not right:
        return None
    given = verifier.parse(text, parsing_timeout=None)
    return 1.0 if given and verifier.verify(right, given, timeout_seconds=None) else 0.0
