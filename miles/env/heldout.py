"""Chooses the rows of the held-out evaluation and takes them, by content, out of the training rows."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles.config import schema
from miles.env.data import Dataset, canonical, load_rows
from miles.env.recorded import prompt_key
from miles.env.tasks import Task, find
from miles.errors import DataError


@dataclass(frozen=True)
class Split:
    """Training and held-out rows without a prompt in common, and what to tell the user about how they came to be."""

    train: Dataset
    held_out: Dataset  # may be empty: no evaluation
    message: str


def split_held_out(
    evaluation: schema.Eval,
    data: schema.Data,
    train: Dataset,
    *,
    task: Task | None = None,
    seed: int = 0,
    whole_rows: bool = False,
) -> Split:
    """Held-out rows from `eval.source`, else the task's own, else `eval.rows` taken out of the training rows.

    A row overlaps with another when their prompts are equal; with `whole_rows` (environments whose prompt may be the
    same everywhere) when all their columns are. The result depends on contents and seed alone, so a resumed run finds
    the same rows. Raises DataError when no training row is left.
    """
    empty = train.only(())
    if evaluation.rows == 0:
        return Split(train, empty, "no held-out evaluation: eval.rows is 0")
    if evaluation.source is None and task is None:
        return _take_out(evaluation.rows, train, seed, whole_rows)
    held_out = _given(evaluation, data, task, seed, train.form)
    if not held_out.rows:
        return Split(train, empty, f"no held-out evaluation: {train.source} has no held-out rows of its own")
    keys = {_key(row, held_out, whole_rows) for row in held_out}
    kept = [i for i, row in enumerate(train) if _key(row, train, whole_rows) not in keys]
    if not kept:
        raise DataError(
            f"every row of {train.source} is also a held-out row of {held_out.source}: nothing is left to train on;"
            " give eval.source other rows, or set eval.rows = 0"
        )
    removed = len(train) - len(kept)
    message = f"{len(held_out)} held-out rows from {held_out.source}"
    if removed:
        message += f"; {removed} rows of {train.source} are among them and are left out of training"
    return Split(train.only(kept), held_out, message)


def _given(evaluation: schema.Eval, data: schema.Data, task: Task | None, seed: int, form: str) -> Dataset:
    if evaluation.source is not None:
        task = find(evaluation.source, "eval.source")
        if task is None:
            changes = {
                "source": evaluation.source,
                "split": evaluation.split or data.split,
                "max_rows": evaluation.rows,
            }
            return load_rows(data.model_copy(update=changes), key="eval.source", form=form)
    assert task is not None  # the caller takes rows out of the training data otherwise
    return Dataset(tuple(task.rows(seed).held_out[: evaluation.rows]), f"task:{task.name}", form=form)


def _take_out(rows: int, train: Dataset, seed: int, whole_rows: bool) -> Split:
    """A fifth of the distinct prompts at most, chosen by a hash of seed and content."""
    by_key: dict[str, list[int]] = {}
    for index, row in enumerate(train):
        by_key.setdefault(_key(row, train, whole_rows), []).append(index)
    count = min(rows, len(by_key) // 5)
    if count == 0:
        message = f"no held-out evaluation: {train.source} has {len(by_key)} distinct prompts, fewer than 5"
        return Split(train, train.only(()), f"{message}; eval.source can name other rows")
    chosen = sorted(by_key, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode(errors="surrogatepass")).digest())[
        :count
    ]
    removed = {index for key in chosen for index in by_key[key]}
    kept = [index for index in range(len(train)) if index not in removed]
    held_out = train.only(sorted(by_key[key][0] for key in chosen))
    message = f"{count} held-out rows taken out of {train.source}, which leaves {len(kept)} to train on"
    if count < rows:
        message += f" (eval.rows asks for {rows}; a fifth of the distinct prompts is the most)"
    return Split(train.only(kept), held_out, message)


def _key(row: Mapping[str, Any], data: Dataset, whole_rows: bool) -> str:
    if whole_rows:
        return canonical(row)
    column = data.prompt_column
    prompt = row[column] if data.form == "prompts" else prompt_key(row, data.form, column)
    # A text prompt is the same question as a single user message with that text.
    if not isinstance(prompt, str) and len(prompt) == 1 and prompt[0].get("role") == "user":
        prompt = prompt[0].get("content")
    return canonical(prompt.strip() if isinstance(prompt, str) else list(prompt))
