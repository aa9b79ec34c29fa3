"""What the engine knows of one `generate` call while it is under way, and the checks it passes before."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.engine.sampling import Draw
from miles.engine.stopping import Stopper
from miles.errors import EngineError
from miles.types import Completion, Sampling, StopReason, VersionSpan


@dataclass(eq=False, slots=True)
class Row:
    """One sample on its way."""

    call: Call
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: StopReason | None = None
    slot: int = -1  # its place among the rows that decode; -1: none

    def take(self, token_id: int, logprob: float) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.stop_reason = self.call.stopper.reason(self.token_ids)


@dataclass(eq=False, slots=True)
class Call:
    """One call of `generate`: a prompt and its n samples."""

    ids: tuple[int, ...]
    sampling: Sampling
    version: int  # of the weights when the call came
    stopper: Stopper
    future: asyncio.Future[list[Completion]]
    rows: list[Row] = field(default_factory=list)
    prompt: Any = None  # the batch's record of the prompt; None: it has not been run yet

    @property
    def temperature(self) -> float:
        return self.sampling.temperature

    def waiting(self) -> list[Row]:
        """Samples that have their first token and wait for a place to decode."""
        return [row for row in self.rows if row.token_ids and row.stop_reason is None and row.slot < 0]

    def finish(self) -> None:
        """Hand the completions over."""
        if not self.future.done():
            self.future.set_result([_completion(row, self.version) for row in self.rows])


def take(rows: Sequence[Row], draw: Draw) -> dict[Call, EngineError]:
    """Give each row what was drawn for it; the calls that must fail, and why."""
    failed: dict[Call, EngineError] = {}
    for row, token_id, logprob, finite in zip(rows, draw.token_ids, draw.logprobs, draw.finite, strict=True):
        if not finite:
            failed[row.call] = EngineError(
                f"the model's logits are not finite at token {len(row.token_ids)} of a completion (prompt of "
                f"{len(row.call.ids)} tokens, version {row.call.version}): its weights hold NaN or infinity, or its "
                "activations overflow; nothing was sampled. Lower the learning rate, or go back to a checkpoint"
            )
            continue
        try:
            row.take(token_id, logprob)
        except Exception as error:  # the caller's tokenizer: the caller's error, and nobody else's
            failed[row.call] = wrapped(error)
    return failed


def wrapped(error: Exception) -> EngineError:
    """The error as an EngineError; its own kind stays as the cause."""
    if isinstance(error, EngineError):
        return error
    outer = EngineError(f"the engine could not go on: {type(error).__name__}: {error}")
    outer.__cause__ = error
    return outer


def _completion(row: Row, version: int) -> Completion:
    assert row.stop_reason is not None
    span = VersionSpan(version, 0, len(row.token_ids))
    return Completion(tuple(row.token_ids), tuple(row.logprobs), (span,), row.stop_reason)


def check_request(
    ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], context: int | None, vocabulary: int
) -> None:
    """Raise EngineError, naming the value and the limit, for a call that cannot give n whole completions."""
    if not ids:
        raise EngineError("the prompt is empty: a completion needs at least one token before it")
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise EngineError(f"the prompt holds token id {wrong[0]}; the model's ids run from 0 to {vocabulary - 1}")
    if sampling.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens must be >= 1, got {sampling.max_new_tokens}")
    if context is not None and len(ids) + sampling.max_new_tokens > context:
        raise EngineError(
            f"a prompt of {len(ids)} tokens and {sampling.max_new_tokens} new tokens do not fit the model's context of "
            f"{context}: shorten the prompt to {max(0, context - sampling.max_new_tokens)} tokens, or lower "
            "rollout.max_new_tokens"
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise EngineError(f"temperature must be a finite number >= 0, got {sampling.temperature}")
    if n < 1 or len(seeds) != n:
        raise EngineError(f"generate needs one seed for each of its n >= 1 samples, got n = {n} and {len(seeds)} seeds")
    out_of_range = [seed for seed in seeds if not 0 <= seed < 2**64]
    if out_of_range:
        raise EngineError(f"a seed must lie in [0, 2**64), got {out_of_range[0]}")
    if "" in sampling.stop:
        raise EngineError("a stop string must not be empty: every completion would end at its first token")
