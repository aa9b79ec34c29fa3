"""Writes docs/recipe.md anew from the schema."""

from __future__ import annotations

from pathlib import Path

from miles.config.reference import recipe_reference

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"

if __name__ == "__main__":
    PAGE.write_text(recipe_reference(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
