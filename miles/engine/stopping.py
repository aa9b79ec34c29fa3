"""Says when a completion ends: at an end token, at the token that completes a stop string, or at the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.types import Sampling, StopReason

_MARGIN = 8  # tokens beyond the stop string's bytes that the tail holds: decoders treat a first token differently


class Stopper:
    """The ends of one call: `reason` is asked after each token."""

    def __init__(self, sampling: Sampling, end_token_ids: Sequence[int], tokenizer: Any) -> None:
        self._limit = sampling.max_new_tokens
        self._ends = frozenset(end_token_ids) | frozenset(sampling.stop_token_ids)
        self._stops = sampling.stop
        self._tokenizer = tokenizer
        self._tail = max((len(stop.encode()) for stop in self._stops), default=0) + _MARGIN

    def reason(self, token_ids: Sequence[int]) -> StopReason | None:
        """Why the completion ends with the last of `token_ids`, or None where it goes on. No token is ever added."""
        if token_ids[-1] in self._ends or self._completes_stop_string(token_ids):
            return "stop"
        return "length" if len(token_ids) >= self._limit else None

    def _completes_stop_string(self, token_ids: Sequence[int]) -> bool:
        if not self._stops:
            return False
        # Each token is at least a byte of text, so the string lies within the tail; the whole text then decides.
        tail = self._decode(token_ids[-self._tail :])
        if not any(stop in tail for stop in self._stops):
            return False
        text = self._decode(token_ids)
        return any(stop in text for stop in self._stops)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
