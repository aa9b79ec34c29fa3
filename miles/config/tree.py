"""The recipe's keys as a flat list of dotted names, and what each expects, in words."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from miles.config.schema import Recipe

NOUNS = {int: ("an integer", "integers"), float: ("a number", "numbers"), str: ("a text", "texts")}
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

OTHER_WORDS = {
    "lr": "learner.learning_rate",
    "critic_lr": "learner.critic_learning_rate",
    "dtype": "learner.param_dtype",
    "max_grad_norm": "learner.clip_norm",
    "num_iterations": "learner.epochs",
    "kl_coef": "algorithm.beta",
    "batch_size": "algorithm.groups_per_step",
    "max_steps": "algorithm.steps",
    "n": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "max_tokens": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
}
"""What other tools call a key -> its name here; only for the hint at a misspelt key."""


@cache
def sections() -> Mapping[str, type[BaseModel]]:
    """Dotted name of each table of the recipe -> its class, in the order of the schema."""
    return dict(_walk_sections(Recipe, ""))


@cache
def fields() -> Mapping[str, FieldInfo]:
    """Dotted name of each key of the recipe -> its declaration, in the order of the schema."""
    return {
        f"{section}.{name}": info
        for section, model in sections().items()
        for name, info in model.model_fields.items()
        if not _is_section(info.annotation)
    }


def optional(key: str) -> bool:
    """True where the key's value may be absent (None)."""
    return type(None) in get_args(fields()[key].annotation)


def takes_text(key: str) -> bool:
    """True where any text is a valid value of the key."""
    annotation = fields()[key].annotation
    return annotation is str or (str in get_args(annotation) and get_origin(annotation) is not tuple)


def takes_list(key: str) -> bool:
    """True where the key's value is a list of any length."""
    annotation = fields()[key].annotation
    return get_origin(annotation) is tuple and get_args(annotation)[-1] is Ellipsis


def get(recipe: BaseModel, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return value


def expected(key: str) -> str:
    """What the key's value must be, in words: `an integer >= 1, or none`."""
    info = fields()[key]
    members = [member for member in _members(info.annotation) if member is not type(None)]
    text = " or ".join(_words(member, info.metadata) for member in members)
    return f'{text}, or "none"' if optional(key) else text


def nearest(key: str) -> str | None:
    """The valid key that a misspelt dotted name most likely means, or None where nothing is close."""
    section, _, name = key.rpartition(".")
    if name in OTHER_WORDS:
        return OTHER_WORDS[name]
    same_name = [valid for valid in fields() if valid.rpartition(".")[2] == name]
    if same_name:
        return max(same_name, key=lambda valid: SequenceMatcher(None, key, valid).ratio())
    in_section = {valid.rpartition(".")[2]: valid for valid in fields() if valid.rpartition(".")[0] == section}
    anywhere = {valid.rpartition(".")[2]: valid for valid in fields()}
    for candidates, cutoff in ((in_section, 0.6), (anywhere, 0.75)):
        if close := get_close_matches(name, candidates, n=1, cutoff=cutoff):
            return candidates[close[0]]
    return None


def nearest_section(name: str) -> str | None:
    """The section that a misspelt name most likely means, or None where nothing is close."""
    close = get_close_matches(name, sections(), n=1, cutoff=0.6)
    return close[0] if close else None


def mentions(text: str, key: str) -> bool:
    """True where `text` names the key, and not a longer one that begins or ends like it."""
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", text) is not None


def _walk_sections(model: type[BaseModel], prefix: str) -> Iterable[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        if _is_section(info.annotation):
            inner = typing.cast(type[BaseModel], info.annotation)
            yield prefix + name, inner
            yield from _walk_sections(inner, f"{prefix}{name}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _words(args[0], args[1:])
    if origin is Literal:
        shown = [f'"{value}"' if isinstance(value, str) else str(value) for value in args]
        return shown[0] if len(shown) == 1 else "one of " + ", ".join(shown)
    if origin is tuple:
        many = _many(args[0])
        return f"a list of {many}" if args[-1] is Ellipsis else f"a list of {len(args)} {many}"
    if annotation is bool:
        return "true or false"
    return NOUNS[annotation][0] + _bounds(metadata)


def _many(annotation: Any) -> str:
    if get_origin(annotation) is typing.Annotated:
        base, *metadata = get_args(annotation)
        return NOUNS[base][1] + _bounds(metadata)
    return NOUNS[annotation][1]


def _bounds(metadata: Iterable[Any]) -> str:
    flat = [m for item in metadata for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = [
        f"{sign} {getattr(m, name):g}"
        for m in flat
        for name, sign in BOUNDS.items()
        if getattr(m, name, None) is not None
    ]
    return " " + " and ".join(limits) if limits else ""
