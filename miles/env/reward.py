"""Scores samples with the recipe's reward functions; anything but a number or None per sample is an error."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles.algo.userfile import load_object
from miles.config import schema
from miles.config.names import split_reference
from miles.env.calling import Caller, TimedOut, all_or_none
from miles.env.data import Dataset, fresh, nearest
from miles.env.tasks import Task
from miles.env.verifiers import LIBRARY
from miles.errors import ConfigError, DataError, RewardError, in_short, in_words
from miles.types import Sample

ENVIRONMENT = "environment"  # the part that an environment gives; its weight is 1
MODEL = "reward_model"  # the part that the reward model of `reward.model` gives
SOLUTION_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
GIVEN = ("prompts", "completions")
LARGEST = 1e30  # rewards become float32 and are summed


@dataclass(frozen=True)
class RewardFunction:
    """One reward function, and how it wants to be called."""

    name: str
    function: Callable[..., Any]
    weight: float
    per_sample: bool  # (data_source, solution_str, ground_truth, extra_info) once for each sample
    by_name: bool  # prompts and completions by name, else as the first two arguments
    accepts: frozenset[str] | None  # columns it takes; None: any
    requires: tuple[str, ...]  # columns it cannot do without
    unbounded: bool = False  # a score, of which 1 is nothing special


@dataclass(frozen=True)
class Parts:
    """What one function gave one sample: its main number, and the further numbers of a dict."""

    score: float | None
    others: Mapping[str, float | None]


class Rewards:
    """The weighted sum of reward functions and of what the environment gave. Raises RewardError."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float = 60.0,
        workers: int = 8,
        prompt_column: str = "prompt",
        source: str = "the data",
        environment_scores: bool = False,
        more_later: bool = False,
    ) -> None:
        """more_later: the learner adds a score of its own, so a reward without any part is 0 until then."""
        self.functions = tuple(functions)
        self._caller = Caller(workers, timeout_s)
        self._prompt_column = prompt_column
        self._source = source
        self._environment_scores = environment_scores
        self._more_later = more_later

    @property
    def full(self) -> float | None:
        """The reward of a sample whose every part is 1: what counts as solved in pass@k. None: a score without a bound."""
        if self._more_later or any(f.unbounded for f in self.functions):
            return None
        return sum(f.weight for f in self.functions if f.weight > 0) + (1.0 if self._environment_scores else 0.0)

    def check_columns(self, data: Dataset) -> None:
        """Raises DataError when a row lacks a column that a function cannot do without."""
        for function in self.functions:
            for index, row in enumerate(data):
                missing = [name for name in function.requires if not _has(row, name, function.per_sample)]
                if self._prompt_column in function.requires and not function.per_sample:
                    raise DataError(
                        f"reward function {function.name} needs the column {self._prompt_column!r}, which is the prompt here"
                        " (data.prompt_column): it is given as `prompts`; take that, or name another column"
                    )
                if missing:
                    raise DataError(
                        f"reward function {function.name} needs the column {missing[0]!r}, which row {index} of"
                        f" {data.source} (counted from 0) does not have{nearest(missing[0], [str(c) for c in row])}"
                    )

    async def score(self, index: int, row: Mapping[str, Any], samples: Sequence[Sample]) -> list[Sample]:
        """The samples with `reward` (None when any part is) and `reward_parts` set; row `index` is for messages."""
        columns = await all_or_none([self._run(function, index, row, samples) for function in self.functions])
        return [self._combine(index, sample, [column[i] for column in columns]) for i, sample in enumerate(samples)]

    def _combine(self, index: int, sample: Sample, given: Sequence[Parts]) -> Sample:
        parts: dict[str, float | None] = dict(sample.reward_parts)
        weighted: list[tuple[float, float | None]] = []
        if ENVIRONMENT in parts:
            parts[ENVIRONMENT] = self._number(ENVIRONMENT, index, parts[ENVIRONMENT])
            weighted.append((1.0, parts[ENVIRONMENT]))
        for function, part in zip(self.functions, given, strict=True):
            weighted.append((function.weight, part.score))
            parts[function.name] = part.score
            parts.update({f"{function.name}/{key}": value for key, value in part.others.items()})
        if not weighted and not self._more_later:
            raise RewardError(
                f"nothing scores row {index} of {self._source}: no reward function is set and the environment gave none;"
                " set reward.functions"
            )
        scores = [w * s for w, s in weighted if s is not None]
        if any(not abs(score) <= LARGEST for score in scores):
            raise RewardError(
                f"row {index} of {self._source}: a reward times its weight is above {LARGEST:g} in size: {scores}; lower"
                " reward.weights"
            )
        reward = math.fsum(scores) if len(scores) == len(weighted) else None
        return replace(sample, reward=reward, reward_parts=parts)

    async def _run(
        self, function: RewardFunction, index: int, row: Mapping[str, Any], samples: Sequence[Sample]
    ) -> list[Parts]:
        if function.per_sample:
            calls = [self._call(function, index, **self._solution(function, fresh(row), sample)) for sample in samples]
            return [self._parts(function.name, index, value) for value in await all_or_none(calls)]
        row = fresh(row)
        prompts = [row.get(self._prompt_column)] * len(samples)
        completions = [sample.text for sample in samples]
        columns = {
            name: [value] * len(samples)
            for name, value in row.items()
            if name not in (*GIVEN, self._prompt_column) and (function.accepts is None or name in function.accepts)
        }
        if function.by_name:
            named = {"prompts": prompts, "completions": completions}
            if function.accepts is not None:
                named = {name: value for name, value in named.items() if name in function.accepts}
            result = await self._call(function, index, **named, **columns)
        else:
            result = await self._call(function, index, prompts, completions, **columns)
        return self._checked(function.name, index, result, len(samples))

    def _solution(self, function: RewardFunction, row: Mapping[str, Any], sample: Sample) -> dict[str, Any]:
        named = {name: _column(row, name, self._source) for name in SOLUTION_ARGUMENTS}
        named["solution_str"] = sample.text
        if function.accepts is None:
            return named
        return {name: value for name, value in {**row, **named}.items() if name in function.accepts}

    async def _call(self, function: RewardFunction, index: int, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._caller.call(function.function, *args, **kwargs)
        except TimedOut as error:
            limit = self._caller.timeout_s
            raise RewardError(
                f"reward function {function.name} took longer than {limit:g} s on row {index} of {self._source};"
                " make it faster or raise reward.timeout_s"
            ) from error
        except Exception as error:
            raise RewardError(
                f"reward function {function.name} raised {in_words(error)}, on row {index} of"
                f" {self._source}; correct it, or let it return None for what cannot be scored"
            ) from error

    def _checked(self, name: str, index: int, result: Any, count: int) -> list[Parts]:
        if hasattr(result, "tolist"):  # an array or a tensor
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            raise self._broken(name, index, result, "must return a list with one number or None for each completion")
        if len(result) != count:
            raise self._broken(name, index, result, f"returned {len(result)} rewards for {count} completions")
        return [self._parts(name, index, value) for value in result]

    def _parts(self, name: str, index: int, value: Any) -> Parts:
        if not isinstance(value, Mapping):
            return Parts(self._number(name, index, value), {})
        if "score" not in value:
            raise self._broken(name, index, value, "returned a dict without the key 'score'")
        others = {str(key): self._number(name, index, other) for key, other in value.items() if _is_part(key, other)}
        return Parts(self._number(name, index, value["score"]), others)

    def _number(self, name: str, index: int, value: Any) -> float | None:
        if value is None:
            return None
        if hasattr(value, "item") and not getattr(value, "ndim", 0):
            value = value.item()  # a number of an array library
        if not isinstance(value, (int, float)):
            raise self._broken(name, index, value, "must return numbers or None")
        if value != value or abs(value) > LARGEST:
            what = f"returned a number that is not finite, or above {LARGEST:g} in size; None says `cannot be scored`"
            raise self._broken(name, index, value, what)
        return float(value)

    def _broken(self, name: str, index: int, value: Any, what: str) -> RewardError:
        return RewardError(
            f"reward function {name} {what}; on row {index} of {self._source} it returned {in_short(value)}"
        )


def build_rewards(
    section: schema.Reward,
    *,
    task: Task | None = None,
    functions: Sequence[Callable[..., Any] | str] | Callable[..., Any] | str | None = None,
    model: Callable[..., Any] | None = None,
    environment_scores: bool = False,
    more_later: bool = False,
    prompt_column: str = "prompt",
    source: str = "the data",
) -> Rewards:
    """Rewards from Python (`functions`), else `reward.functions`, else the task's own. Raises ConfigError.

    `model`: the reward model of `reward.model`, beside the functions or in place of the task's; `more_later`: the learner is
    going to score with it. `environment_scores`: the environment gives a part of its own, so no function is needed.
    """
    modelled = model is not None or more_later
    chosen: Sequence[Callable[..., Any] | str] = section.functions
    if functions is not None:
        chosen = functions if isinstance(functions, list | tuple) else [functions]
    elif not chosen and not modelled and task is not None and task.reward is not None:
        chosen = [task.reward]
    if not chosen and not modelled and not environment_scores:
        raise ConfigError(
            "reward.functions is empty and neither a task nor an environment brings a reward: name a function of"
            f" {', '.join(LIBRARY)} or path/to/file.py:function"
        )
    weights = section.weights or (1.0,) * len(chosen)
    if len(weights) != len(chosen):
        raise ConfigError(
            f"reward.weights has {len(weights)} numbers for {len(chosen)} reward functions: give one each"
        )
    built: list[RewardFunction] = []
    for item, weight in zip(chosen, weights, strict=True):
        built.append(_inspected(_resolved(item), weight, {f.name for f in built} | {ENVIRONMENT, MODEL}))
    if model is not None:
        built.append(
            RewardFunction(MODEL, model, section.model_weight, False, True, frozenset(GIVEN), (), unbounded=True)
        )
    return Rewards(
        built,
        timeout_s=section.timeout_s,
        workers=section.workers,
        prompt_column=prompt_column,
        source=source,
        environment_scores=environment_scores,
        more_later=more_later,
    )


def _resolved(item: Callable[..., Any] | str) -> Callable[..., Any]:
    if isinstance(item, str):
        if split_reference(item) is not None:
            item = load_object(item, "reward.functions")
        elif item in LIBRARY:
            return LIBRARY[item]
        else:
            raise ConfigError(
                f"reward.functions: there is no reward {item!r}{nearest(item, LIBRARY)}"
                " (a function of your own is path/to/file.py:function)"
            )
    if not callable(item):
        raise ConfigError(f"reward.functions: {item!r:.80} cannot be called; give a function")
    return item


def _inspected(function: Callable[..., Any], weight: float, taken: set[str]) -> RewardFunction:
    name = unique_name(function_name(function), taken)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return RewardFunction(name, function, weight, per_sample=False, by_name=False, accepts=None, requires=())
    kinds = inspect.Parameter
    named = [p for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    names = [p.name for p in named]
    any_name = any(p.kind is kinds.VAR_KEYWORD for p in parameters)
    per_sample = "solution_str" in names
    by_name = "completions" in names
    places = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if (
        not per_sample
        and not by_name
        and len(places) < 2
        and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
    ):
        raise ConfigError(
            f"reward function {name}{inspect.signature(function)} has neither signature that rewards may have:"
            " (prompts, completions, **columns) -> list, or (data_source, solution_str, ground_truth, extra_info=None)"
        )
    first_two = set() if per_sample or by_name else {p.name for p in places[:2]}
    requires = tuple(
        p.name for p in named if p.default is kinds.empty and p.name not in (*GIVEN, *first_two, "solution_str")
    )
    accepts = None if any_name else frozenset(names) - first_two
    if per_sample and "extra_info" in requires:
        requires = tuple(name for name in requires if name != "extra_info")  # None where a row has none
    return RewardFunction(name, function, weight, per_sample, by_name, accepts, requires)


def function_name(function: Callable[..., Any]) -> str:
    """What metrics call a reward: the function's name, also behind `partial`; a callable object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name


def unique_name(name: str, taken: set[str]) -> str:
    """The name, or with _2, _3, ... where it is taken."""
    return name if name not in taken else next(n for i in range(2, 10**6) if (n := f"{name}_{i}") not in taken)


def _column(row: Mapping[str, Any], name: str, source: str) -> Any:
    """A column; for the solution signature also the places where such data sets keep its arguments."""
    if row.get(name) is not None:
        return row[name]
    if name == "data_source":
        return source
    nested = row.get("reward_model")
    if name == "ground_truth" and isinstance(nested, Mapping):
        return nested.get("ground_truth")
    return None


def _has(row: Mapping[str, Any], name: str, per_sample: bool) -> bool:
    return _column(row, name, "the data") is not None if per_sample else name in row


def _is_part(key: Any, value: Any) -> bool:
    """The further numbers of a dict result become parts; texts and other notes stay with the function."""
    return key != "score" and (value is None or isinstance(value, (int, float)) or hasattr(value, "item"))
