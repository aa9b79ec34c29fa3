"""Writes a recipe as TOML that loads back to an equal recipe, and single values as TOML text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.config import tree
from miles.config.schema import Recipe

ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
NONE = "none"
"""What stands for an absent value where leaving the key out would bring a default back."""


def dump_toml(recipe: Recipe, comments: Mapping[str, str] | None = None) -> str:
    """The whole tree as TOML text; `comments` (dotted key -> text) stand at the end of their lines.

    An absent value is left out, or written as "none" where the default, or the algorithm's row, may hold another one.
    """
    comments = comments or {}
    tables = []
    for section in tree.sections():
        lines = [
            _line(key, tree.get(recipe, key), comments.get(key))
            for key in tree.fields()
            if key.rpartition(".")[0] == section and not _may_be_left_out(recipe, key)
        ]
        tables.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(tables) + "\n"


def toml_value(value: Any) -> str:
    """One value as TOML text; texts become basic strings, None becomes "none"."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, int | float) else str(value)


def _may_be_left_out(recipe: Recipe, key: str) -> bool:
    if tree.get(recipe, key) is not None:
        return False
    return tree.fields()[key].default is None and not key.startswith("algorithm.")


def _line(key: str, value: Any, comment: str | None) -> str:
    line = f"{key.rpartition('.')[2]} = {toml_value(value)}"
    return f"{line:<40}  # {comment}" if comment else line
