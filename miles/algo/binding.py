"""Turns the functions that a row names into functions of their data alone, with the recipe's settings filled in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from miles.errors import ConfigError


def bind(
    function: str | Callable[..., Any], module: ModuleType, settings: Mapping[str, Any], kind: str, row: str
) -> Callable[..., Any]:
    """`function`, or the function of that name in `module`, with its keyword-only parameters taken from `settings`.

    A parameter whose name is no setting keeps its own default. kind: the row's field, row:
    its name, for messages. Raises ConfigError for an unknown name, and for a parameter that nothing gives a value.
    """
    found = resolve(function, module, kind, row) if isinstance(function, str) else function
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(found).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if name in settings:
            arguments[name] = settings[name]
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"algorithm.name = {row}: the parameter {name} of its {kind} has neither a default nor a value in the "
                f"recipe's [algorithm] section: give it a default, or put {name} into the row's defaults."
            )
    return functools.partial(found, **arguments)


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
