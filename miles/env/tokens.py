"""Text to ids and back with a private copy of the tokenizer, so that no thread ever meets another's settings."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any


class Codec:
    """Encodes without special tokens and without cutting anything; decodes every token that is there.

    A tokenizer's truncation and padding are state of the object, so a shared one may cut a prompt because another
    thread asked for that, or fail because it is in use. The copy has neither and is never changed again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        self._slow = tokenizer
        self._lock = threading.Lock()
        self._fast = _private_copy(tokenizer)
        self.prefix = self._own_prefix(tokenizer)
        known = (getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "pad_token_id", None))
        self.eos_id: int | None = known[0]
        self.end_ids = frozenset(i for i in known if i is not None)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: nothing is added before or after it."""
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=False).ids)
        with self._lock:
            return list(self._slow.encode(text, add_special_tokens=False))

    def encode_whole(self, text: str) -> list[int]:
        """Ids of a whole prompt.

        What the tokenizer puts before a text (BOS) stands there once, even where the text begins
        with it; what it puts after a text (EOS) does not, because the model is to go on."""
        ids = self.encode(text)
        prefix = list(self.prefix)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._fast is not None:
            return self._fast.decode(list(ids), skip_special_tokens=False)
        with self._lock:
            return self._slow.decode(list(ids), skip_special_tokens=False)

    def is_special(self, token: int) -> bool:
        """True for tokens that are marks and no text: decoding may skip them."""
        if self._fast is not None:
            return not self._fast.decode([token], skip_special_tokens=True) and bool(self.decode([token]))
        return token in getattr(self._slow, "all_special_ids", ())

    def without_end(self, ids: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
        """The ids before the end tokens and padding that they close with."""
        last = len(ids)
        while last and ids[last - 1] in end_ids:
            last -= 1
        return tuple(ids[:last])

    def _own_prefix(self, tokenizer: Any) -> tuple[int, ...]:
        """What the tokenizer itself adds before a text."""
        plain = self.encode("a")
        if self._fast is not None:
            whole = list(self._fast.encode("a", add_special_tokens=True).ids)
        else:
            whole = list(tokenizer.encode("a", add_special_tokens=True))
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start])
        return ()


def _private_copy(tokenizer: Any) -> Any | None:
    """A copy of the Rust tokenizer inside; None where there is none (tokenizers written in Python)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    copy = type(backend).from_str(backend.to_str())
    copy.encode_special_tokens = backend.encode_special_tokens
    copy.no_truncation()
    copy.no_padding()
    return copy
