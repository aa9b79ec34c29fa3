"""docs/recipe.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from miles.config import tree
from miles.config.reference import recipe_reference

PAGE = Path(__file__).parents[2] / "docs" / "recipe.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == recipe_reference(), "run `make docs`"


def test_every_key_has_a_row_with_its_default() -> None:
    page = recipe_reference()
    assert page.count("\n| `") == len(tree.fields())
    assert "| `temperature` | a number > 0 | `1.0` |" in page
    assert '| `clip_norm` | a number > 0, or "none" | `1.0` |' in page
