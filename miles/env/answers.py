"""Recorded answers as token ids, with a mask that is True on exactly what the model would have sampled.

A prompt is encoded as it will be when the model samples, and its answer apart from it, so that both meet at the same
place in training and in use. The end token of each answer is trained; what a template puts after it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.config import schema
from miles.env.data import Dataset
from miles.env.recorded import Exchange, exchanges, margin_of
from miles.env.template import Message, Renderer, lengths_of, without_long
from miles.errors import DataError
from miles.types import Sample, Segment

Tokens = tuple[list[int], list[bool]]  # ids, and which of them are trained
SCORED = 0  # id of the place after a sequence that its score belongs to; no model reads it


class Answers:
    """Turns rows of answers or pairs into samples. Safe to share between threads. Raises DataError."""

    def __init__(
        self, renderer: Renderer, section: schema.Data, form: str, end_ids: Sequence[int], *, scorer: bool = False
    ) -> None:
        """end_ids: the tokens that end an answer; scorer: the sequence as a whole is scored, none of its tokens is learnt."""
        self._renderer = renderer
        self._codec = renderer.codec
        self._column = section.prompt_column
        self._form = form
        self._scorer = scorer
        eos = renderer.codec.eos_id
        self._ends = frozenset(end_ids) | ({eos} if eos is not None else set())

    def samples(self, row: Mapping[str, Any], version: int = 0) -> list[Sample]:
        """The row's answer, or the chosen and then the rejected one (rewards 1 and 0). `version` stands on trained tokens."""
        found = self._exchanges(row)
        parts = [[self.whole(e)] if self._scorer else self._trained(e) for e in found]
        if len(parts) == 2 and parts[0] == parts[1]:
            raise DataError(
                "the chosen and the rejected answer become the same tokens, which teaches nothing; remove the row"
            )
        extras = {"margin": margin_of(row)} if self._form == "pairs" else {}
        return [
            Sample(
                tuple(_segment(*(_scored(ids) if self._scorer else (ids, mask)), version) for ids, mask in segments),
                "stop",
                _read(exchange.answer),
                reward=1.0 - place,
                extras=extras,
            )
            for place, (exchange, segments) in enumerate(zip(found, parts, strict=True))
        ]

    def prompt_text(self, row: Mapping[str, Any]) -> str:
        """The prompt as the model sees it."""
        prompt = self._exchanges(row)[0].prompt
        return "" if prompt == "" else self._renderer.rendered(prompt).text

    def length(self, row: Mapping[str, Any]) -> int:
        """Tokens of the longest sequence of the row that a model reads."""
        return max(len(s.token_ids) - self._scorer for sample in self.samples(row) for s in sample.segments)

    def last_tokens(self) -> set[int]:
        """The tokens that whole sequences close with: none of them can be a scorer's padding."""
        example = Exchange(({"role": "user", "content": "a"},), "b")
        last = {self.whole(example)[0][-1]} if self._renderer.has_template else set()
        return last | self._ends

    def shown(self, row: Mapping[str, Any]) -> str:
        """The row as the model sees it; what is trained stands between two marks."""
        return "\n".join(self._marked(segment) for sample in self.samples(row) for segment in sample.segments)

    def whole(self, exchange: Exchange) -> Tokens:
        """Prompt and answer as one sequence, as a scorer reads it; nothing in it is trained."""
        messages, answer = self._joined(exchange)
        if messages is None:
            ids = self._ended(self._codec.encode_whole(f"{exchange.prompt}{exchange.answer}"))
        else:
            ids = list(self._renderer.chat((*messages, *answer), open_turn=False).ids)
        return ids, [False] * len(ids)

    def _exchanges(self, row: Mapping[str, Any]) -> list[Exchange]:
        try:
            return exchanges(row, self._form, self._column)
        except ValueError as error:
            raise DataError(f"it {error}") from error

    def _messages(self, prompt: Any) -> tuple[Message, ...] | None:
        """None: plain text, as also a text without a prompt is."""
        return None if prompt == "" else self._renderer.messages(prompt)

    def _joined(self, exchange: Exchange) -> tuple[tuple[Message, ...] | None, tuple[Message, ...]]:
        messages, answer = self._messages(exchange.prompt), exchange.answer
        if messages is None:
            if not isinstance(answer, str):
                raise DataError("its prompt is plain text and its answer chat messages: give both in the same form")
            return None, ()
        if isinstance(exchange.prompt, str):
            self._renderer.rendered(exchange.prompt)  # refuses what is rendered already
        return messages, ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer

    def _trained(self, exchange: Exchange) -> list[Tokens]:
        """Each assistant message of the answer trained, in one sequence as long as the template only appends.

        Where it renders what came before in another way (it removes old thoughts), a new sequence begins.
        """
        messages, answer = self._joined(exchange)
        if messages is None:
            prompt = self._codec.encode_whole(str(exchange.prompt))
            reply = self._ended(self._codec.encode(str(exchange.answer)))
            return [(prompt + reply, [False] * len(prompt) + [True] * len(reply))]
        segments: list[Tokens] = []
        history, seen = messages, None
        for place, message in enumerate(answer):
            if message["role"] == "assistant":
                before = self._renderer.chat(history).text
                after = self._renderer.chat((*history, message), open_turn=False).text
                if seen is None or not before.startswith(seen):
                    segments.append(([], []))
                    seen = None
                self._extend(segments[-1], seen, before, after, last=place == len(answer) - 1)
                seen = after
            history = (*history, message)
        return segments

    def _extend(self, segment: Tokens, seen: str | None, before: str, after: str, last: bool) -> None:
        """Append what was told since `seen`, and then the reply that stands between `before` and `after`."""
        if not after.startswith(before):
            raise DataError(
                f"the chat template of {self._codec.name} renders an answer in another way than it opens the model's turn, so "
                "what the model would have to sample is not known; give prompt and completion as text, rendered, with "
                "data.chat_template = false"
            )
        told = self._codec.encode_whole(before) if seen is None else self._codec.encode(before[len(seen) :])
        reply = self._codec.encode(after[len(before) :])
        ends = [place for place, token in enumerate(reply) if token in self._ends]
        trained = ends[-1] + 1 if ends else len(reply)
        if not ends and last:
            reply = self._ended(reply)
            trained = len(reply)
        segment[0].extend(told + reply)
        segment[1].extend([False] * len(told) + [True] * trained + [False] * (len(reply) - trained))

    def _ended(self, ids: list[int]) -> list[int]:
        """With one end token at the end, where the tokenizer has one."""
        eos = self._codec.eos_id
        return ids if eos is None or (ids and ids[-1] in self._ends) else [*ids, eos]

    def _marked(self, segment: Segment) -> str:
        ids, mask = list(segment.token_ids), list(segment.loss_mask)
        if self._scorer:
            return self._codec.decode(ids[:-1])
        out, start = "", 0
        for place in range(1, len(ids) + 1):
            if place == len(ids) or mask[place] != mask[start]:
                text = self._codec.decode(ids[start:place])
                out += f"[[{text}]]" if mask[start] else text
                start = place
        return out


def fit_answers(
    data: Dataset, answers: Answers, section: schema.Data, *, context: int | None
) -> tuple[Dataset, str | None]:
    """The rows that fit, and what to tell the user about the others; every row is rendered once. Raises DataError."""
    limits = [limit for limit in (section.max_row_tokens, context) if limit is not None]
    lengths = lengths_of(data, answers.length)
    return without_long(
        data, lengths, min(limits, default=None), section, "rows", "shorten them, raise data.max_row_tokens"
    )


def _scored(ids: list[int]) -> Tokens:
    """A sequence with the one place its score belongs to: after its last token, where the next one would stand."""
    return [*ids, SCORED], [*([False] * len(ids)), True]


def _segment(ids: Sequence[int], mask: Sequence[bool], version: int) -> Segment:
    """Recorded tokens have no behavior policy: its log-probabilities are 0."""
    return Segment(tuple(ids), tuple(mask), (0.0,) * len(ids), tuple(version if trained else -1 for trained in mask))


def _read(answer: str | Sequence[Message]) -> str:
    if isinstance(answer, str):
        return answer
    return "\n".join(str(message.get("content") or "") for message in answer if message["role"] == "assistant")
