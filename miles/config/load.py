"""Puts the layers of a recipe on top of each other, and says everything that is wrong with them at once.

Later wins: defaults, the algorithm row's defaults, recipe files in order, MILES__SECTION__KEY, --section.key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from miles.config import tree
from miles.config.names import is_text
from miles.config.rules import rule_problems
from miles.config.schema import Recipe
from miles.config.text import parse_value
from miles.config.toml import NONE, toml_value
from miles.errors import BadInput

ENV_PREFIX = "MILES__"
COMMAND_LINE = "command line"


class RowFacts(Protocol):
    """What loading needs of an algorithm's row."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Keys of the recipe's [algorithm] section, nested or dotted below it."""
        ...


@dataclass(frozen=True)
class Loaded:
    """A recipe and what is wrong with it. Keys in `refused` hold their defaults, so that the rest can still be judged."""

    recipe: Recipe
    problems: list[str]  # one sentence each
    origins: Mapping[str, str]  # dotted key -> the layer that set it; keys that nobody set are absent
    refused: frozenset[str]


@dataclass(frozen=True)
class Setting:
    """One key as one layer sets it."""

    key: str
    value: Any
    origin: str


def load(
    paths: Sequence[Path],
    overrides: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    rows: Callable[[str], RowFacts] | None = None,
    given: Iterable[str] = (),
    overrides_from: str = COMMAND_LINE,
) -> Loaded:
    """All layers as one recipe, with every problem that schema and rules find.

    `overrides` maps dotted keys to values; None empties a key that may be absent. `rows` finds the algorithm's row by
    name and raises BadInput where there is none. `given` names keys whose value comes as a Python object beside the
    recipe (rows of data, a reward function, ...).
    """
    problems: list[str] = []
    contents = [(str(path), _content(Path(path), problems)) for path in paths]
    settings = [
        setting for path, content in contents if content is not None for setting in _flatten(content, path, problems)
    ]
    settings += _env_layer(env, problems)
    settings += _override_layer(overrides, overrides_from, problems)
    merged = {setting.key: setting for setting in settings}
    if rows is not None:
        merged = _row_layer(merged, rows, problems) | merged

    recipe, wrong = _validate(merged)
    problems += wrong.values()
    # What a file that cannot be read would have set is not known, so nothing is said about it.
    refused = frozenset(tree.fields() if any(content is None for _, content in contents) else wrong)
    origins = {key: setting.origin for key, setting in merged.items()}
    problems += without(refused, (placed(text, origins) for text in rule_problems(recipe, frozenset(given))))
    return Loaded(recipe, problems, origins, refused)


def without(refused: Iterable[str], texts: Iterable[str]) -> list[str]:
    """The texts that name no refused key: what they say about it would be about its default."""
    refused = list(refused)
    return [text for text in texts if not any(tree.mentions(text, key) for key in refused)]


def _content(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    """What a recipe file holds; None, and a problem, where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        problems.append(f"{path} does not exist: give the path of a recipe (.toml).")
    except IsADirectoryError:
        problems.append(f"{path} is a folder: give the path of a recipe (.toml) in it.")
    except UnicodeDecodeError as error:
        problems.append(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8.")
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{path} is not valid TOML: {error}.")
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}.")
    return None


def _env_layer(env: Mapping[str, str], problems: list[str]) -> list[Setting]:
    found = []
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            found += _flatten({key: parse_value(key, text)}, f"environment {name}", problems)
    return found


def _flatten(content: Mapping[str, Any], origin: str, problems: list[str], prefix: str = "") -> list[Setting]:
    """Known keys as settings; a problem for each unknown one."""
    found: list[Setting] = []
    for name, value in content.items():
        key = f"{prefix}{name}"
        if key in tree.sections():
            if isinstance(value, Mapping):
                found += _flatten(value, origin, problems, f"{key}.")
            else:
                example = next(known for known in tree.fields() if known.startswith(f"{key}."))
                problems.append(
                    f"{key} = {_shown(value)} ({origin}): {key} is a section; set its keys, such as {example}."
                )
        elif key in tree.fields():
            found.append(Setting(key, _convert(key, value), origin))
        else:
            problems.append(_unknown(key, value, origin))
    return found


def _convert(key: str, value: Any) -> Any:
    """TOML has neither None nor tuples."""
    if value == NONE and isinstance(value, str) and tree.optional(key) and not tree.takes_text(key):
        return None
    return tuple(value) if isinstance(value, list) else value


def _override_layer(overrides: Mapping[str, Any], origin: str, problems: list[str]) -> list[Setting]:
    """Text for a key that takes no text is read as on a command line."""
    values = {
        key: parse_value(key, value)
        if isinstance(value, str) and key in tree.fields() and not tree.takes_text(key)
        else value
        for key, value in overrides.items()
    }
    return _flatten(values, origin, problems)


def _row_layer(
    merged: Mapping[str, Setting], rows: Callable[[str], RowFacts], problems: list[str]
) -> dict[str, Setting]:
    """The defaults of the row that the other layers name."""
    setting = merged.get(
        "algorithm.name", Setting("algorithm.name", tree.fields()["algorithm.name"].default, "default")
    )
    if not isinstance(setting.value, str):
        return {}
    try:
        row = rows(setting.value)
    except BadInput as error:
        problems.append(f"{error} ({setting.origin})")
        return {}
    defaults = _flatten(row.defaults, f"row {setting.value}", problems, "algorithm.")
    return {default.key: default for default in defaults}


def _unknown(key: str, value: Any, origin: str) -> str:
    if isinstance(value, Mapping):
        close = tree.nearest_section(key)
        hint = f"the nearest is [{close}]" if close else f"there are {', '.join(tree.sections())}"
        return f"[{key}] ({origin}) is not a section of the recipe: {hint}."
    if close := tree.nearest(key):
        return f"{key} = {_shown(value)} ({origin}) is not a key of the recipe: the nearest is {close}."
    section = key.rpartition(".")[0]
    names = [known.rpartition(".")[2] for known in tree.fields() if known.rpartition(".")[0] == section]
    hint = f"[{section}] has {', '.join(names)}" if names else f"the sections are {', '.join(tree.sections())}"
    return f"{key} = {_shown(value)} ({origin}) is not a key of the recipe: {hint}."


def _validate(merged: Mapping[str, Setting]) -> tuple[Recipe, dict[str, str]]:
    """The recipe without the keys that the schema refuses, and a problem for each of those."""
    wrong = {
        key: f"{key} = {setting.value!a} ({setting.origin}) holds half a character: write it as UTF-8."
        for key, setting in merged.items()
        if not all(is_text(part) for part in _texts(setting.value))
    }
    while True:
        kept = {key: setting.value for key, setting in merged.items() if key not in wrong}
        try:
            return Recipe.model_validate(_nested(kept), strict=True), wrong
        except ValidationError as error:
            for detail in error.errors(include_url=False, include_context=False):
                key = _key_of(detail["loc"])
                setting = merged[key]
                wanted = tree.expected(key) + _as_list(key, setting.value)
                wrong[key] = f"{key} = {_shown(setting.value)} ({setting.origin}) must be {wanted}."


def _texts(value: Any) -> list[str]:
    return [part for part in (value if isinstance(value, tuple) else [value]) if isinstance(part, str)]


def _as_list(key: str, value: Any) -> str:
    """How to write one value for a key that takes several."""
    one = isinstance(value, str | int | float) and tree.takes_list(key)
    return f": put it in brackets, {toml_value([value])}" if one else ""


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return nested


def _key_of(location: tuple[int | str, ...]) -> str:
    """The dotted key of a pydantic error, whose location may lead further into the value."""
    parts = [str(part) for part in location]
    return next(key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in tree.fields())


def placed(text: str, origins: Mapping[str, str]) -> str:
    """A sentence about several keys, with the layers that set them."""
    named = {key: origin for key, origin in origins.items() if tree.mentions(text, key)}
    if len(set(named.values())) <= 1:
        places = list(named.values())[:1]
    else:
        places = [f"{key}: {origin}" for key, origin in named.items()]
    return f"{text} ({'; '.join(places)})" if places else text


def _shown(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= 60 else text[:57] + "..."
