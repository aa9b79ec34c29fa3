"""Holds the functions of a user's own row to what docs/algorithms.md asks of them, at every call."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from miles.algo.advantage import Advantages
from miles.algo.losses import TokenLoss
from miles.errors import ConfigError, MilesError, in_short, in_words

HOPELESS = (MilesError, MemoryError, torch.OutOfMemoryError)
"""Passed on as they are: they say nothing about the function."""


def held(function: Callable[..., Any], given: Callable[..., Any], kind: str, row: str) -> Callable[..., Any]:
    """`function`, which is the user's `given` with its settings bound, with every failure told as a ConfigError.

    kind: the row's field. A failure is what it raises, or a result that is not what its kind gives.
    """
    name = getattr(given, "__name__", type(given).__name__)

    @functools.wraps(function, updated=())
    def checked(*arguments: Any) -> Any:
        try:
            result = function(*arguments)
        except HOPELESS:
            raise
        except Exception as error:
            raise ConfigError(
                f"algorithm.name = {row}: its {kind} {name} raised {in_words(error)}{_place(error)}: correct it there."
            ) from error
        problem = _CHECKS[kind](result, *arguments)
        if problem is not None:
            raise ConfigError(f"algorithm.name = {row}: its {kind} {name} {problem} (docs/algorithms.md).")
        return result

    return checked


def _credit(result: Any, rewards: Tensor, *_: Any) -> str | None:
    return _tensor("must return one number a sample", result, rewards)


def _advantage(result: Any, table: Any, *_: Any) -> str | None:
    made = result if isinstance(result, Advantages) else Advantages(result)
    problem = _tensor("must return one advantage a trained token", made.advantages, table.behavior_logprobs)
    if problem is None and made.returns is not None:
        problem = _tensor("must give one return a trained token", made.returns, table.behavior_logprobs)
    return problem


def _loss(result: Any, inputs: Tensor, *_: Any) -> str | None:
    made = result if isinstance(result, TokenLoss) else TokenLoss(result)
    problem = _tensor("must return one loss a token, not their mean or sum", made.loss, inputs)
    if problem is None and inputs.requires_grad and not made.loss.requires_grad:
        return "returned a loss without a gradient: make it of its first argument, which carries one"
    if problem is None and not isinstance(made.metrics, Mapping):
        return f"must give its metrics as a mapping of name to tensor, got {in_short(made.metrics)}"
    return problem or next((text for item in made.metrics.items() if (text := _metric(*item, inputs))), None)


def _metric(name: Any, value: Any, inputs: Tensor) -> str | None:
    whole = isinstance(value, Tensor) and value.shape in ((), inputs.shape)
    if whole and isinstance(name, str):
        return None
    return f"must give the metric {in_short(name)} as a tensor with one number a token, got {_seen(value)}"


def _tensor(wanted: str, value: Any, like: Tensor) -> str | None:
    if isinstance(value, Tensor) and value.shape == like.shape and value.is_floating_point():
        return None
    return f"{wanted}, a float tensor of shape {list(like.shape)}; it returned {_seen(value)}"


def _seen(value: Any) -> str:
    if not isinstance(value, Tensor):
        return in_short(value)
    return f"{'' if value.is_floating_point() else f'{value.dtype} of '}shape {list(value.shape)}"


def _place(error: BaseException) -> str:
    """The innermost line of the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


_CHECKS: Mapping[str, Callable[..., str | None]] = {
    "credit": _credit, "advantage": _advantage, "policy_loss": _loss, "value_loss": _loss,
}  # fmt: skip
