"""Turns text from a command line or an environment variable into the value of a key."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from miles.config import tree
from miles.config.toml import NONE
from miles.errors import ConfigError


def parse_value(key: str, text: str) -> Any:
    """The value that `text` gives `key`: TOML where it is TOML, else the bare text.

    A key that takes texts gets the text as it stands, or without its quotes. `none` empties a key that may be absent.
    What does not fit the key is returned as it is: the schema says what is wrong with it.
    """
    if key not in tree.fields():
        return text
    if text == NONE and tree.optional(key):
        return None
    value = _toml(text)
    return value if isinstance(value, str) or not tree.takes_text(key) else text


def split_overrides(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Takes `--section.key VALUE` and `--section.key=VALUE` out of a command line -> (overrides, the other arguments).

    Dashes in a key stand for underscores; the last of several values for one key wins. Raises ConfigError for keys
    without a value.
    """
    overrides: dict[str, Any] = {}
    rest: list[str] = []
    problems: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        option, has_value, text = argument.partition("=")
        if not option.startswith("--") or "." not in option:
            rest.append(argument)
            continue
        key = option[2:].replace("-", "_")
        if not has_value and (not queue or queue[0].startswith("--")):
            wanted = f": {tree.expected(key)}" if key in tree.fields() else ""
            problems.append(f"{option} (command line) needs a value{wanted}.")
            continue
        overrides[key] = parse_value(key, text if has_value else queue.pop(0))
    if problems:
        raise ConfigError(problems)
    return overrides, rest


def _toml(text: str) -> Any:
    """The TOML value of `text`, or `text` itself where it is none."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text
