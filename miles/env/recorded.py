"""Rows that hold their answers: which columns they need, and where the prompt ends and the answer begins.

Answers (`algorithm.name = "sft"`): `messages`, or a prompt with `completion`. Pairs (`"reward_model"`): `chosen` and
`rejected`, with a prompt or as whole conversations, and an optional `margin`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Messages = tuple[Mapping[str, Any], ...]
Text = str | Messages
FORMS = {
    "answers": "`messages`, or {prompt!r} and `completion`",
    "pairs": "`chosen` and `rejected`, with or without {prompt!r}",
}


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer, each a text or chat messages. The answer's assistant messages are what is learnt."""

    prompt: Text
    answer: Text


def exchanges(row: Row, data: str, prompt_column: str) -> list[Exchange]:
    """The answers of a row: one, or the chosen and the rejected one. Raises ValueError with half a sentence about the row."""
    if data == "answers":
        return [_answer(row, prompt_column)]
    _need(row, ("chosen", "rejected"), data, prompt_column)
    margin_of(row)
    chosen, rejected = (_text(row[column], column) for column in ("chosen", "rejected"))
    if row.get(prompt_column) is not None:
        prompt = _text(row[prompt_column], prompt_column)
        pair = [Exchange(prompt, chosen), Exchange(prompt, rejected)]
    elif isinstance(chosen, tuple) and isinstance(rejected, tuple):
        common = _common(chosen, rejected)
        pair = [_divided(chosen, common), _divided(rejected, common)]
    elif isinstance(chosen, str) and isinstance(rejected, str):
        pair = [Exchange("", chosen), Exchange("", rejected)]
    else:
        raise ValueError("has a text on one side and messages on the other; give both in the same form")
    if pair[0] == pair[1]:
        raise ValueError("has a chosen answer that equals the rejected one, which teaches nothing; remove the row")
    for exchange, column in zip(pair, ("chosen", "rejected"), strict=True):
        _check_answer(exchange.answer, column)
    return pair


def margin_of(row: Row) -> float:
    """By how much the chosen answer should lead; 0 where the row does not say. Raises ValueError."""
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < math.inf:
        raise ValueError(f"has margin = {margin!r}, which must be a number of at least 0")
    return float(margin)


def prompt_key(row: Row, data: str, prompt_column: str) -> Any:
    """What two rows with the same question have in common, for the held-out split."""
    exchange = exchanges(row, data, prompt_column)[0]
    return exchange.prompt or exchange.answer


def _answer(row: Row, prompt_column: str) -> Exchange:
    if row.get("messages") is not None:
        messages = _text(row["messages"], "messages")
        if isinstance(messages, str):
            raise ValueError("has a text under 'messages', which must be a list of chat messages")
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
        if first is None:
            raise ValueError("has no assistant message under 'messages', so there is nothing to learn")
        exchange = _divided(messages, first)
        _check_answer(exchange.answer, "messages")
        return exchange
    _need(row, (prompt_column, "completion"), "answers", prompt_column)
    exchange = Exchange(_text(row[prompt_column], prompt_column), _text(row["completion"], "completion"))
    _check_answer(exchange.answer, "completion")
    return exchange


def _need(row: Row, columns: Sequence[str], data: str, prompt_column: str) -> None:
    if missing := [column for column in columns if row.get(column) is None]:
        there = ", ".join(map(repr, row)) or "no column"
        raise ValueError(
            f"has no column {missing[0]!r}: it needs {FORMS[data].format(prompt=prompt_column)}, and has {there}"
        )


def _text(value: Any, column: str) -> Text:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        raise ValueError(f"must have text or a list of chat messages under {column!r}, got {value!r:.80}")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"has {message!r:.80} under {column!r}, which is no chat message (message {place})")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"has a message whose content is no text under {column!r} (message {place})")
    return tuple(value)


def _common(chosen: Messages, rejected: Messages) -> int:
    """How many messages both begin with; each keeps one of its own."""
    pairs = list(zip(chosen[:-1], rejected[:-1], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _divided(messages: Messages, place: int) -> Exchange:
    return Exchange(messages[:place], messages[place:])


def _check_answer(answer: Text, column: str) -> None:
    if isinstance(answer, str):
        if not answer.strip():
            raise ValueError(f"has an empty answer under {column!r}; remove the row or give it an answer")
        return
    replies = [message for message in answer if message["role"] == "assistant"]
    if not replies:
        raise ValueError(f"has no assistant message under {column!r}, so there is nothing to learn")
    if any(not (reply.get("content") or "").strip() and not reply.get("tool_calls") for reply in replies):
        raise ValueError(f"has an empty assistant message under {column!r}; remove the row or give it an answer")
