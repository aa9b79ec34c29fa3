"""Turns rows into prompt ids, through the chat template exactly once, and continues a conversation turn by turn.

Model text is never tokenised again: the ids that were sampled stay as they are, and only what stands between the
model's answer and its next turn is encoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.config import schema
from miles.env.data import Dataset
from miles.env.tokens import Codec
from miles.errors import DataError
from miles.types import Completion

Message = Mapping[str, Any]
LISTED = 10  # rows that an error names


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model sees it."""

    ids: tuple[int, ...]
    text: str
    messages: tuple[Message, ...] | None  # None: plain text without a template


@dataclass(frozen=True)
class NextTurn:
    """The prompt of the next turn. `observed` was appended to the ids seen so far; None: it does not extend them."""

    prompt: Rendered
    observed: tuple[int, ...] | None


class Renderer:
    """Renders the rows of a data set for one tokenizer. Safe to share between threads and tasks. Raises DataError."""

    def __init__(self, tokenizer: Any, section: schema.Data, *, system_prompt: str | None = None) -> None:
        """`system_prompt`: the task's own, used where `data.system_prompt` is None and there is a template."""
        self.codec = Codec(tokenizer)
        self._tokenizer = tokenizer
        self._section = section
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self._system = section.system_prompt
        if section.system_prompt is not None and not self.has_template:
            raise DataError(
                f"data.system_prompt needs a chat template, and {self.codec.name} has none: put the text into the prompts"
                " and leave data.system_prompt out"
            )
        if section.system_prompt is None and self.has_template and section.chat_template:
            self._system = system_prompt

    def prompt(self, row: Mapping[str, Any]) -> Rendered:
        """The row's prompt with the model's turn opened."""
        return self.rendered(row[self._section.prompt_column])

    def rendered(self, prompt: str | Sequence[Message]) -> Rendered:
        """A prompt, text or messages, with the model's turn opened. Raises DataError, also for text that is rendered already."""
        messages = self.messages(prompt)
        if messages is None:
            text = str(prompt)
            return Rendered(tuple(self.codec.encode_whole(text)), text, None)
        rendered = self.chat(messages)
        if isinstance(prompt, str) and self._is_rendered(prompt, rendered):
            raise DataError(
                f"the prompt {prompt!r:.80} is already rendered (it begins with a special token of the chat template); give"
                " the bare text, or set data.chat_template = false"
            )
        return rendered

    def messages(self, prompt: str | Sequence[Message]) -> tuple[Message, ...] | None:
        """The prompt as messages for the template, the system prompt before them; None: it stays plain text."""
        if isinstance(prompt, str):
            if not (self.has_template and self._section.chat_template):
                return None
            messages: tuple[Message, ...] = ({"role": "user", "content": prompt},)
        else:
            messages = tuple(prompt)
        if self._system is not None and not (messages and messages[0]["role"] == "system"):
            messages = ({"role": "system", "content": self._system}, *messages)
        return messages

    def text(self, row: Mapping[str, Any]) -> str:
        return self.prompt(row).text

    def answer(self, completion: Completion, stop_token_ids: Sequence[int] = ()) -> str:
        """What a reward or an environment reads: the sampled tokens, without the end tokens they close with."""
        return self.codec.decode(self._content(completion, stop_token_ids))

    def next_turn(
        self, seen: Rendered, completion: Completion, messages: Sequence[Message], stop_token_ids: Sequence[int] = ()
    ) -> NextTurn:
        """The prompt after the model answered `seen` with `completion` and was told `messages`, all of them at once.

        Where the template renders the conversation so far in another way than the model saw it (it removes old
        thoughts, or trims), or would have ended the answer with another token, the next turn begins with a new
        rendering. Plain text, which has no template, goes on with each message on a line of its own.
        """
        content = self._content(completion, stop_token_ids)
        end = tuple(completion.token_ids[len(content) :])
        shown = seen.ids + tuple(completion.token_ids)
        reply = self.codec.decode(content)
        if seen.messages is None:
            told = "".join(f"\n{message['content']}\n" for message in messages)
            observed = tuple(self.codec.encode(told))
            return NextTurn(Rendered(shown + observed, seen.text + reply + told, None), observed)
        whole = self.chat((*seen.messages, {"role": "assistant", "content": reply}, *messages))
        before = seen.text + reply
        if whole.text.startswith(before):
            tail = tuple(self.codec.encode(whole.text[len(before) :]))
            if tail[: len(end)] == end:
                observed = tail[len(end) :]
                return NextTurn(Rendered(shown + observed, whole.text, whole.messages), observed)
        return NextTurn(whole, None)

    def _content(self, completion: Completion, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        if completion.stop_reason != "stop":
            return tuple(completion.token_ids)
        return self.codec.without_end(completion.token_ids, self.codec.end_ids | set(stop_token_ids))

    def chat(self, messages: tuple[Message, ...], *, open_turn: bool = True) -> Rendered:
        """The messages through the template; open_turn: the model's turn comes next. Raises DataError."""
        if not self.has_template:
            raise DataError(
                f"a prompt is a list of messages, and {self.codec.name} has no chat template: use a chat model, or give text"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=open_turn
            )
        except Exception as error:  # templates raise what they like, most often for a role they do not know
            roles = ", ".join(str(message["role"]) for message in messages)
            raise DataError(
                f"the chat template of {self.codec.name} refuses messages with the roles {roles}: {error}"
            ) from error
        return Rendered(tuple(self.codec.encode_whole(text)), text, messages)

    def _is_rendered(self, prompt: str, rendered: Rendered) -> bool:
        """True where the text begins with one of the special tokens that the rendering begins with."""
        leading = itertools.takewhile(self.codec.is_special, rendered.ids)
        return any(prompt.lstrip().startswith(self.codec.decode([token])) for token in leading)


def fit_prompts(
    data: Dataset, renderer: Renderer, section: schema.Data, *, context: int | None, max_new_tokens: int
) -> tuple[Dataset, str | None]:
    """The rows whose prompts leave room for an answer, and what to tell the user about those that do not.

    The limit is `data.max_prompt_tokens`, at most context - max_new_tokens. Raises DataError for a row that cannot be
    rendered, and one that lists the long rows under `data.overlong_prompts = "error"`, and when no row is left. No prompt is ever cut.
    """
    limit = _limit(section, context, max_new_tokens)
    lengths = lengths_of(data, lambda row: len(renderer.prompt(row).ids))
    ways_out = f"shorten them, raise data.max_prompt_tokens, lower rollout.max_new_tokens ({max_new_tokens})"
    return without_long(data, lengths, limit, section, "prompts", ways_out)


def without_long(
    data: Dataset, lengths: Sequence[int], limit: int | None, section: schema.Data, what: str, ways_out: str
) -> tuple[Dataset, str | None]:
    """The rows of at most `limit` tokens, and what to tell about the others. Raises DataError as `fit_prompts` does."""
    if limit is None:
        return data, None
    long = [index for index, length in enumerate(lengths) if length > limit]
    if not long:
        return data, None
    named = ", ".join(f"row {index} ({lengths[index]} tokens)" for index in long[:LISTED])
    more = f" and {len(long) - LISTED} more" if len(long) > LISTED else ""
    message = f"{len(long)} of {len(data)} {what} of {data.source} are longer than {limit} tokens: {named}{more}"
    if section.overlong_prompts == "error" or len(long) == len(data):
        raise DataError(f'{message}; {ways_out}, or leave them out with data.overlong_prompts = "drop"')
    dropped = set(long)
    return data.only(i for i in range(len(data)) if i not in dropped), f"{message}; left out"


def lengths_of(data: Dataset, length: Callable[[Mapping[str, Any]], int]) -> list[int]:
    """The length of each row in tokens. Raises the DataError of a row that cannot be rendered, with its place."""
    lengths = []
    for index, row in enumerate(data):
        try:
            lengths.append(length(row))
        except DataError as error:
            raise DataError(f"row {index} of {data.source} (counted from 0): {error}") from error
    return lengths


def preview(data: Dataset, renderer: Renderer, n: int = 3) -> list[str]:
    """The first n prompts exactly as the model will see them, decoded from their ids."""
    return [renderer.codec.decode(renderer.prompt(row).ids) for row in data[:n]]


def _limit(section: schema.Data, context: int | None, max_new_tokens: int) -> int | None:
    room = None if context is None else context - max_new_tokens
    if room is not None and room < 1:
        raise DataError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in the model's context of {context} tokens: lower it"
        )
    limits = [limit for limit in (section.max_prompt_tokens, room) if limit is not None]
    return min(limits, default=None)
