"""Environments: one answer to a prompt, or a dialogue in which something answers the model between its turns."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from miles.algo.userfile import load_object
from miles.config import schema
from miles.env.calling import Caller, TimedOut, all_or_none
from miles.env.data import fresh, message_problem
from miles.env.own import OwnEnvironment, made, takes
from miles.env.reward import ENVIRONMENT
from miles.env.tasks import Task
from miles.env.template import Message, Rendered, Renderer
from miles.env.trajectory import checked, extended, first_segment, turn_seed
from miles.errors import ConfigError, EpisodeError, in_short, in_words
from miles.protocols import Engine, Environment
from miles.types import Completion, Sample, Sampling, Segment

log = logging.getLogger(__name__)

Row = Mapping[str, Any]


@runtime_checkable
class Dialogue(Protocol):
    """What a user writes: one object for each trajectory, made with (row, seed), so it may keep state.

    Two methods are optional: `reward() -> float | None`, called once at the end, and `close()`, always called.
    Plain methods run in threads; `async def` works too.
    """

    def respond(self, answer: str) -> str | Sequence[Message] | None:
        """What the model is told after `answer`: a user message, or chat messages; None ends the trajectory."""
        ...


class SingleTurn:
    """One answer to each prompt; reward functions score it."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def episodes(self, row: Row, engine: Engine, sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        prompt = self._renderer.prompt(row)
        completions = checked(await engine.generate(prompt.ids, len(seeds), sampling, seeds), len(seeds))
        return [
            Sample(
                segments=(first_segment(prompt.ids, completion),),
                stop_reason=completion.stop_reason,
                text=self._renderer.answer(completion, sampling.stop_token_ids),
            )
            for completion in completions
        ]


class MultiTurn:
    """Up to `max_turns` answers, with a dialogue between them.

    A trajectory ends when the dialogue responds None, after `max_turns` answers, with an answer cut by the token limit,
    or when the context has no room for another answer; the last two count as truncated. The dialogue hears every
    answer, the last one too. Sampled tokens are trained, the dialogue's are not.
    The reward reads the model's own text alone.
    """

    def __init__(
        self,
        dialogue: Callable[[Row, int], Dialogue],
        renderer: Renderer,
        *,
        max_turns: int = 8,
        context: int | None = None,
        timeout_s: float | None = 60.0,
        workers: int = 64,
    ) -> None:
        """`context`: the model's longest sequence. `timeout_s`, `workers`: of calls into the dialogue."""
        self._dialogue = dialogue
        self._renderer = renderer
        self._max_turns = max_turns
        self._context = context
        self._caller = Caller(workers, timeout_s)

    async def episodes(self, row: Row, engine: Engine, sampling: Sampling, seeds: Sequence[int]) -> list[Sample]:
        prompt = self._renderer.prompt(row)
        first = checked(await engine.generate(prompt.ids, len(seeds), sampling, seeds), len(seeds))
        runs = zip(first, seeds, strict=True)
        return await all_or_none([self._run(row, engine, sampling, prompt, answer, seed) for answer, seed in runs])

    async def _run(
        self, row: Row, engine: Engine, sampling: Sampling, prompt: Rendered, answer: Completion, seed: int
    ) -> Sample:
        dialogue = await self._call("__init__", self._dialogue, fresh(row), seed)
        try:
            segments, texts, truncated = await self._turns(dialogue, engine, sampling, prompt, answer, seed)
            parts = {}
            if hasattr(dialogue, "reward"):
                parts[ENVIRONMENT] = await self._call("reward", dialogue.reward)
        finally:
            await self._close(dialogue)
        return Sample(tuple(segments), "length" if truncated else "stop", "\n".join(texts), reward_parts=parts)

    async def _close(self, dialogue: Dialogue) -> None:
        """Of two errors the first one counts: one in here is told beside it."""
        first = sys.exc_info()[1]
        try:
            if (close := getattr(dialogue, "close", None)) is not None:
                await self._call("close", close)
        except EpisodeError as error:
            if first is None:
                raise
            log.warning("%s, after another failure", error)

    async def _turns(
        self, dialogue: Dialogue, engine: Engine, sampling: Sampling, prompt: Rendered, answer: Completion, seed: int
    ) -> tuple[list[Segment], list[str], bool]:
        segments = [first_segment(prompt.ids, answer)]
        texts: list[str] = []
        while True:
            texts.append(self._renderer.answer(answer, sampling.stop_token_ids))
            response = await self._call("respond", dialogue.respond, texts[-1])
            if answer.stop_reason == "length":
                return segments, texts, True
            if response is None or len(texts) == self._max_turns:
                return segments, texts, False
            turn = self._renderer.next_turn(prompt, answer, self._messages(response), sampling.stop_token_ids)
            prompt = turn.prompt
            if self._context is not None and len(prompt.ids) + sampling.max_new_tokens > self._context:
                return segments, texts, True
            seeds = [turn_seed(seed, len(texts))]
            answer = checked(await engine.generate(prompt.ids, 1, sampling, seeds), 1)[0]
            if turn.observed is None:
                segments.append(first_segment(prompt.ids, answer))
            else:
                segments[-1] = extended(segments[-1], turn.observed, answer)

    async def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self._caller.call(function, *args)
        except TimedOut as error:
            raise EpisodeError(
                f"{self._name}.{what} took longer than {self._caller.timeout_s:g} s (reward.timeout_s)"
            ) from error
        except Exception as error:
            raise EpisodeError(f"{self._name}.{what} raised {in_words(error)}") from error

    def _messages(self, response: Any) -> Sequence[Message]:
        if isinstance(response, str):
            response = [{"role": "user", "content": response}]
        if not isinstance(response, list | tuple) or not response:
            raise EpisodeError(
                f"{self._name}.respond must return text, a list of chat messages or None, got {in_short(response)}"
            )
        if problem := next((text for message in response if (text := message_problem(message))), None):
            raise EpisodeError(f"{self._name}.respond gave {in_short(response)}: it {problem}")
        return response

    @property
    def _name(self) -> str:
        return getattr(self._dialogue, "__name__", type(self._dialogue).__name__)


def build_environment(
    recipe: schema.Recipe, renderer: Renderer, *, task: Task | None = None, context: int | None = None
) -> tuple[Environment, bool]:
    """The recipe's environment, else the task's, else one turn; and whether it gives a reward of its own.

    `rollout.environment` names a Dialogue class (made once for each trajectory), or a class with `episodes`, which is
    made once with (renderer, recipe) and gives rewards of its own when its attribute `scores` is true.
    Raises ConfigError.
    """
    rollout = recipe.rollout
    multi_turn = functools.partial(MultiTurn, renderer=renderer, context=context, timeout_s=recipe.reward.timeout_s)
    if rollout.environment is not None:
        chosen = load_object(rollout.environment, "rollout.environment")
        if hasattr(chosen, "episodes"):
            environment = made(chosen, rollout.environment, renderer, recipe)
            return OwnEnvironment(environment, rollout.environment), bool(getattr(chosen, "scores", False))
        if not hasattr(chosen, "respond"):
            raise ConfigError(
                f"rollout.environment: {rollout.environment} has neither `respond` (a dialogue) nor `episodes` (an environment)"
            )
        takes(chosen, ("row", "seed"), f"rollout.environment: {rollout.environment}")
        return multi_turn(chosen, max_turns=rollout.max_turns), hasattr(chosen, "reward")
    if task is not None and task.dialogue is not None:
        turns = min(task.max_turns, rollout.max_turns)
        return multi_turn(task.dialogue, max_turns=turns), hasattr(task.dialogue, "reward")
    return SingleTurn(renderer), False
