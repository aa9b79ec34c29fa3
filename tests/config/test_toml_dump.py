"""A resolved recipe as TOML loads back to an equal recipe, whatever its values and whatever the row's defaults."""

from __future__ import annotations

import tomllib
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miles.config import tree
from miles.config.load import load
from miles.config.schema import Recipe
from miles.config.toml import dump_toml, toml_value

ROW = SimpleNamespace(defaults={"beta": 0.5, "lam": 0.9, "dual_clip": 3.0, "correction": {"low": 0.1}})


def values(annotation: Any, metadata: typing.Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    """Valid values of a key's type."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return values(args[0], args[1:])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*(values(arg) for arg in args))
    if args:
        return st.one_of(*(values(arg) for arg in args))
    if annotation is type(None):
        return st.none()
    if annotation is bool:
        return st.booleans()
    if annotation is str:
        return st.text(max_size=20)
    limits = [m for item in metadata for m in getattr(item, "metadata", [item])]
    if annotation is int:
        return st.integers(min_value=1, max_value=min([2**40, *(m.le for m in limits if hasattr(m, "le"))]))
    assert annotation is float
    bounded = any(hasattr(limit, "le") or hasattr(limit, "lt") for limit in limits)
    greater_than_one = any(getattr(limit, "gt", 0) == 1 for limit in limits)
    low, high = (1.5, 1e300) if greater_than_one else (0.0, 0.99) if bounded else (1e-300, 1e300)
    return st.floats(low, high)


RECIPES = st.fixed_dictionaries({key: values(info.annotation, info.metadata) for key, info in tree.fields().items()})


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(flat=RECIPES)
def test_what_is_written_loads_back_equal(tmp_path: Path, flat: dict[str, Any]) -> None:
    recipe = load([], flat, env={}).recipe
    for key, value in flat.items():
        assert tree.get(recipe, key) == value, key
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(recipe, {"algorithm.steps": "here"}), encoding="utf-8")

    again = load([path], {}, env={}, rows=lambda name: ROW)
    assert again.refused == frozenset()
    assert again.recipe == recipe


def test_absent_values_are_left_out_unless_a_default_would_come_back() -> None:
    recipe = load([], {"learner.clip_norm": None}, env={}).recipe
    content = tomllib.loads(dump_toml(recipe))
    assert "system_prompt" not in content["data"]
    assert content["learner"]["clip_norm"] == "none"
    assert content["algorithm"]["beta"] == "none"


def test_every_section_and_key_that_has_a_value_is_written() -> None:
    content = tomllib.loads(dump_toml(Recipe()))
    assert content["algorithm"]["correction"]["cap"] == 2.0
    assert set(content) == {section for section in tree.sections() if "." not in section}


def test_comments_stand_at_the_end_of_their_lines() -> None:
    line = next(line for line in dump_toml(Recipe(), {"run.seed": "command line"}).splitlines() if "seed" in line)
    assert line.split("#") == ["seed = 0" + " " * 34, " command line"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, '"none"'),
        (True, "true"),
        (1e-05, "1e-05"),
        ('a"b\\\n\x00', '"a\\"b\\\\\\n\\U00000000"'),
        (("a", 1), '["a", 1]'),
        ({"a": [1]}, '{"a" = [1]}'),
    ],
)
def test_single_values(value: Any, text: str) -> None:
    assert toml_value(value) == text
    assert value is None or tomllib.loads(f"v = {text}")["v"] == (list(value) if isinstance(value, tuple) else value)
