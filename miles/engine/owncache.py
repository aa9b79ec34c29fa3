"""The slow, exact path: one call at a time through the model's own cache, for families that the fast path refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.engine.policy import evaluating
from miles.engine.requests import Call, Row, take
from miles.engine.sampling import draw
from miles.errors import EngineError

_ROWS = 16  # samples of one call that decode together


def generate_alone(model: Any, call: Call, max_batch: int) -> Iterator[None]:
    """Fill the call's rows; stops after each forward. Raises EngineError.

    Rows stay together until all of them have ended, so every product's shape follows from the call (and `max_batch`,
    where it is below 16), whatever else is under way.
    """
    width = min(_ROWS, max_batch)
    for start in range(0, len(call.rows), width):
        yield from _chunk(model, call.rows[start : start + width])


def _chunk(model: Any, rows: Sequence[Row]) -> Iterator[None]:
    call = rows[0].call
    prompt = torch.tensor([call.ids] * len(rows), device=next(model.parameters()).device)
    logits, cache = _forward(model, prompt, None)
    while True:
        live = [i for i, row in enumerate(rows) if row.stop_reason is None]
        drawn = draw(
            logits,
            [call.temperature] * len(live),
            [rows[i].seed for i in live],
            [len(rows[i].token_ids) for i in live],
            live,
        )
        for error in take([rows[i] for i in live], drawn).values():
            raise error
        if all(row.stop_reason is not None for row in rows):
            return
        yield
        # An ended row goes on with its last token: nobody looks at it, and the shapes stay.
        tokens = torch.tensor([[row.token_ids[-1]] for row in rows], device=prompt.device)
        logits, cache = _forward(model, tokens, cache)


@torch.inference_mode()
def _forward(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits [n, V] behind the last token, and the model's cache."""
    with evaluating(list(model.modules())):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if getattr(out, "past_key_values", None) is None:
        raise EngineError(
            f"{type(model).__name__} gives back no key-value cache, so it cannot be sampled in process: choose another "
            "model, or another engine.kind"
        )
    return out.logits[:, -1], out.past_key_values
