"""Where a process stands among the ranks of a run, as a launcher has written it into the environment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miles.config.schema import Recipe
from miles.errors import ConfigError

STORE = "MILES_STORE"
"""A file that the ranks of one machine meet through; absent where they meet at MASTER_ADDR and MASTER_PORT."""


@dataclass(frozen=True)
class Place:
    """One of `size` ranks. `local`: its number on its machine, which has `local_size` of them."""

    rank: int
    size: int
    local: int
    local_size: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place | None:
        """From the variables that torchrun sets; None where no launcher has. Raises ConfigError."""
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return None
        rank, size = (_number(environ, name, environ[name]) for name in ("RANK", "WORLD_SIZE"))
        local = _number(environ, "LOCAL_RANK", environ.get("LOCAL_RANK", "0"))
        return cls(rank, size, local, _number(environ, "LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE", str(size))))

    @property
    def name(self) -> str:
        """What its log file is called by."""
        return f"learner-{self.rank}"


@dataclass(frozen=True)
class Machines:
    """How the ranks of a run are spread: `count` machines with `per_machine` ranks each, of which this one is `number`."""

    count: int
    number: int
    per_machine: int

    @classmethod
    def of(cls, recipe: Recipe, environ: Mapping[str, str]) -> Machines:
        """One machine, unless NNODES (with NODE_RANK, MASTER_ADDR, MASTER_PORT) says otherwise. Raises ConfigError."""
        size = world_size(recipe)
        count = _number(environ, "NNODES", environ.get("NNODES", "1"))
        number = _number(environ, "NODE_RANK", environ.get("NODE_RANK", "0"))
        if count < 1 or size % count:
            raise ConfigError(
                f"NNODES = {count} machines cannot share {mesh(recipe)} evenly: set NNODES to a divisor of {size}, or "
                "change parallel.shard or parallel.replicate"
            )
        if not number < count:
            raise ConfigError(f"NODE_RANK = {number}, but NNODES = {count}: the machines are numbered from 0")
        if count > 1 and (missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]):
            raise ConfigError(
                f"NNODES = {count}, but {missing[0]} is not set: give every machine the address and a free port of machine 0"
            )
        return cls(count, number, size // count)


def world_size(recipe: Recipe) -> int:
    """Ranks of a run."""
    return recipe.parallel.shard * recipe.parallel.replicate


def mesh(recipe: Recipe) -> str:
    parallel = recipe.parallel
    return f"{world_size(recipe)} ranks (parallel.shard = {parallel.shard} x parallel.replicate = {parallel.replicate})"


def check_place(place: Place, recipe: Recipe) -> None:
    """Raises ConfigError where another number of ranks was started than the recipe is for."""
    if place.size != world_size(recipe):
        raise ConfigError(
            f"{place.size} ranks were started (WORLD_SIZE), but the recipe is for {mesh(recipe)}: start as many, or set "
            "parallel.shard and parallel.replicate so that their product is the number of ranks"
        )


def _number(environ: Mapping[str, str], name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"the environment variable {name} is {text!r}: it must be a whole number")
    return int(text)
