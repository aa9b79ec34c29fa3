"""The report's samples: what the model answered before and after, and one prompt through the training. All text is hostile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from miles.observe.metrics import CORRECT_REWARD
from miles.observe.rows import Row, is_eval, value_of, version_of
from miles.observe.text import number, one_line, printable, question

DISTINCT_ANSWERS = 6
FOLLOWED_PROMPTS = 3
FOLLOWED_STEPS = 12
HELD_OUT_PROMPTS = 4
NEWEST_GROUPS = 6
TEXT_LIMIT = 4000


@dataclass(frozen=True)
class Answer:
    """One distinct answer of a group, and how many of its samples gave it."""

    text: str
    reward: float | None
    tokens: int | None
    cut: bool
    count: int = 1


def samples_html(rows: Sequence[Row]) -> str:
    """The section's content; a sentence where nothing was written yet."""
    groups = [row for row in rows if isinstance(row.get("samples"), list)]
    training = [row for row in groups if not is_eval(row)]
    dropped = [row for row in training if row.get("reason") is not None]
    trained = [row for row in training if row.get("reason") is None]
    parts = [
        _part(
            "Held-out prompts, before and after",
            "Prompts that training never sees, answered by sampling.",
            _timelines(
                [row for row in groups if is_eval(row)], HELD_OUT_PROMPTS, lambda row: f"version {version_of(row)}", 1
            ),
        ),
        _part(
            "One prompt through the training",
            "The same training prompt each time it came up. Equal answers stand once, with their number.",
            _timelines(trained, FOLLOWED_PROMPTS, lambda row: f"step {version_of(row)}", 2),
        ),
        _part("Newest groups", "", [_group(row) for row in trained[-NEWEST_GROUPS:][::-1]]),
        _part(
            "Dropped groups", "Finished, but not trained on.", [_group(row) for row in dropped[-NEWEST_GROUPS:][::-1]]
        ),
    ]
    return "".join(parts) or '<p class="empty">No sample has been written yet.</p>'


def _part(title: str, hint: str, blocks: Sequence[str]) -> str:
    if not blocks:
        return ""
    said = f'<p class="hint">{escape(hint)}</p>' if hint else ""
    return f'<h3 class="part">{escape(title)}</h3>{said}<div class="cards">{"".join(blocks)}</div>'


def _timelines(rows: Sequence[Row], prompts: int, place: Callable[[Row], str], at_least: int) -> list[str]:
    """A card for each of the data rows that were seen most often, at least `at_least` times."""
    seen: dict[Any, list[Row]] = {}
    for row in rows:
        seen.setdefault(str(row.get("row")), []).append(row)
    ranked = sorted(seen.values(), key=lambda group: -len(group))[:prompts]
    return [_timeline(group, place) for group in ranked if len(group) >= at_least]


def _timeline(rows: Sequence[Row], place: Callable[[Row], str]) -> str:
    shown = _spread(rows, FOLLOWED_STEPS)
    entries = "".join(
        f'<li><div class="place">{escape(place(row))}{_mean(row)}</div>{_answers(answers_of(row), DISTINCT_ANSWERS)}</li>'
        for row in shown
    )
    return f'<article class="card">{_prompt(rows[0])}<ol class="timeline">{entries}</ol></article>'


def _group(row: Row) -> str:
    reason = row.get("reason")
    why = f'<span class="tag warn">{escape(printable(str(reason)))}</span>' if reason is not None else ""
    place = f'<div class="place">step {version_of(row)}{_mean(row)}{why}</div>'
    return f'<article class="card">{_prompt(row)}{place}{_answers(answers_of(row), DISTINCT_ANSWERS)}</article>'


def answers_of(row: Row) -> list[Answer]:
    """The distinct answers of a group, the most frequent first."""
    samples: Iterable[Mapping[str, Any]] = (s for s in row["samples"] if isinstance(s, Mapping))
    counted: Counter[tuple[str, float | None, bool]] = Counter()
    tokens: dict[tuple[str, float | None, bool], float | None] = {}
    for sample in samples:
        key = (str(sample.get("text", "")), value_of(sample, "reward"), sample.get("stop_reason") == "length")
        counted[key] += 1
        tokens.setdefault(key, value_of(sample, "tokens"))
    return [
        Answer(text, reward, None if (n := tokens[text, reward, cut]) is None else int(n), cut, count)
        for (text, reward, cut), count in counted.most_common()
    ]


def _answers(answers: Sequence[Answer], limit: int) -> str:
    more = sum(answer.count for answer in answers[limit:])
    rest = f'<li class="more">and {more} more</li>' if more else ""
    return f'<ul class="answers">{"".join(map(_answer, answers[:limit]))}{rest}</ul>'


def _answer(answer: Answer) -> str:
    times = f'<span class="times">{answer.count}×</span>' if answer.count > 1 else '<span class="times"></span>'
    cut = '<span class="tag">cut</span>' if answer.cut else ""
    text = _text(answer.text) if answer.text.strip() else '<span class="blank">(empty)</span>'
    tokens = f' title="{answer.tokens} tokens"' if answer.tokens is not None else ""
    return f"<li{tokens}>{times}{_pill(answer.reward)}<bdi>{text}</bdi>{cut}</li>"


def _pill(reward: float | None) -> str:
    if reward is None:
        return '<span class="pill none" title="could not be scored">–</span>'
    return f'<span class="pill {"good" if reward >= CORRECT_REWARD else "bad"}">{escape(number(reward))}</span>'


def _mean(row: Row) -> str:
    samples = [sample for sample in row["samples"] if isinstance(sample, Mapping)]
    rewards = [reward for sample in samples if (reward := value_of(sample, "reward")) is not None]
    return f'<span class="mean">mean {escape(number(sum(rewards) / len(rewards)))}</span>' if rewards else ""


def _prompt(row: Row) -> str:
    prompt = str(row.get("prompt", ""))
    asked = escape(one_line(question(prompt), 160))
    return f'<details class="prompt"><summary><bdi>{asked or "(no prompt text)"}</bdi></summary><pre>{_text(prompt)}</pre></details>'


def _text(text: str) -> str:
    shown = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + f"… ({len(text) - TEXT_LIMIT:,} characters more)"
    return escape(printable(shown))


def _spread(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows, evenly chosen, the first and the last among them."""
    if len(rows) <= count:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]
