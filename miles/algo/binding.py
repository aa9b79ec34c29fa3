"""Turns the functions that a row names into functions of their data alone, with the recipe's settings filled in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from miles.errors import ConfigError, in_short

ARGUMENTS = {
    "credit": ("rewards", "group_ids", "lengths", "baseline_rewards"),
    "advantage": ("table", "credit", "scores"),
    "policy_loss": ("logprobs", "signal"),
    "value_loss": ("values", "signal"),
}
"""What a function of each kind is called with, by place."""


def bind(
    function: str | Callable[..., Any], module: ModuleType, settings: Mapping[str, Any], kind: str, row: str
) -> Callable[..., Any]:
    """`function`, or the function of that name in `module`, with its keyword-only parameters taken from `settings`.

    A parameter whose name is no setting keeps its own default. kind: the row's field, row:
    its name, for messages. Raises ConfigError for an unknown name, for a function that does not take the arguments of
    its kind, and for a parameter that nothing gives a value.
    """
    found = resolve(function, module, kind, row) if isinstance(function, str) else function
    return functools.partial(found, **_keywords(found, settings, kind, row))


def resolve(name: str, module: ModuleType, kind: str, row: str) -> Callable[..., Any]:
    """The public function `name` that `module` defines. Raises ConfigError with the nearest."""
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    }
    if name in functions:
        return functions[name]
    close = get_close_matches(name, functions, n=1)
    hint = f"; the nearest is {close[0]}" if close else ""
    raise ConfigError(f"algorithm.name = {row}: its {kind} {name!r} is no function of {module.__name__}{hint}.")


def own_problems(functions: Mapping[str, Any], settings: Mapping[str, Any], row: str) -> list[str]:
    """One sentence for each function of the user's, by kind, that could not be bound. Executes none of them."""
    found = []
    for kind, function in functions.items():
        if function is None or isinstance(function, str):
            continue
        try:
            _keywords(function, settings, kind, row)
        except ConfigError as error:
            found += error.problems
    return found


def _keywords(function: Any, settings: Mapping[str, Any], kind: str, row: str) -> dict[str, Any]:
    """The settings that the function reads."""
    arguments: dict[str, Any] = {}
    for name, parameter in _parameters(function, kind, row).items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if name in settings:
            arguments[name] = settings[name]
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"algorithm.name = {row}: the parameter {name} of its {kind} has neither a default nor a value in the "
                f"recipe's [algorithm] section: give it a default, or put {name} into the row's defaults."
            )
    return arguments


def _parameters(function: Any, kind: str, row: str) -> Mapping[str, inspect.Parameter]:
    places = ", ".join(ARGUMENTS[kind])
    if not callable(function):
        raise ConfigError(
            f"algorithm.name = {row}: its {kind} is {in_short(function)}, which cannot be called: give a function of "
            f"({places}), or the name of one of ours."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not tell
        return {}
    required = {name: None for name, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        signature.bind(*ARGUMENTS[kind], **required)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"algorithm.name = {row}: its {kind} {name}{signature} cannot be called with ({places}): {error}. Give it these "
            "arguments by place; settings are keyword-only, after a *."
        ) from error
    return signature.parameters
