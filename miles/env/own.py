"""Holds an environment of the user's own to what `protocols.Environment` asks of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miles.env.calling import contained
from miles.env.data import fresh
from miles.errors import ConfigError, EpisodeError, MilesError, in_short, in_words
from miles.protocols import Engine, Environment
from miles.types import Sample, Sampling

EPISODES = ("row", "engine", "sampling", "seeds")


class OwnEnvironment:
    """A user's environment; what it raises, and a result that is no sample for each seed, become EpisodeError."""

    def __init__(self, environment: Environment, name: str) -> None:
        """`name`: as the recipe names it."""
        self.environment = environment
        self._name = name

    async def episodes(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        try:
            samples = await contained(self.environment.episodes(fresh(row), engine, sampling, seeds))
        except MilesError:  # the engine's, or one that says what it means
            raise
        except Exception as error:
            raise EpisodeError(f"{self._name}.episodes raised {in_words(error)}") from error
        whole = isinstance(samples, list | tuple) and all(isinstance(sample, Sample) for sample in samples)
        if not whole:
            raise EpisodeError(
                f"{self._name}.episodes must return one miles.types.Sample for each seed, got {in_short(samples)}"
            )
        return list(samples)


def made(factory: Callable[..., Any], name: str, *arguments: Any) -> Environment:
    """The environment that the user's class makes of (renderer, recipe). Raises ConfigError."""
    where = f"rollout.environment: {name}"
    takes(factory, ("renderer", "recipe"), where)
    try:
        environment = factory(*arguments)
    except Exception as error:
        raise ConfigError(f"{where} could not be made: {in_words(error)}; correct its __init__") from error
    takes(environment.episodes, EPISODES, f"{where}: `episodes`")
    if not inspect.iscoroutinefunction(environment.episodes):
        raise ConfigError(f"{where}: `episodes` must be an `async def`, since it waits for the engine")
    return environment


def takes(function: Any, arguments: Sequence[str], where: str) -> None:
    """Raises ConfigError where the user's function or class cannot be called with `arguments` by place."""
    wanted = ", ".join(arguments)
    if not callable(function):
        raise ConfigError(f"{where} is {in_short(function)}, which cannot be called with ({wanted}): name a class")
    try:
        signature = inspect.signature(function)
    except ValueError:  # it does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where}{signature} cannot be called with ({wanted}): {error}; give it these arguments"
        ) from error
