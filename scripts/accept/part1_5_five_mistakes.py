"""`miles check` on a recipe with five mistakes prints five messages and exits 2 in under a second."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from common import MILES, check, finish, run

RECIPE = """
[model]
name = "no/such/folder"
[data]
source = "missing.jsonl"
[algorithm]
name = "grpo"
steps = "many"
[rollout]
group_sise = 8
group_size = 1
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "wrong.toml"
        recipe.write_text(RECIPE)
        run([*MILES, "check", str(recipe)], expect=2)  # byte-compiles
        started = time.perf_counter()
        done = run([*MILES, "check", str(recipe)], expect=2)
        seconds = time.perf_counter() - started
    print(done.stderr)
    for word in ("no/such/folder", "missing.jsonl", "algorithm.steps", "group_size", "rollout.group_size"):
        check(f"names {word}", word in done.stderr, word in done.stderr)
    messages = [line for line in done.stderr.splitlines() if line.startswith("  - ")]
    check("messages (5)", len(messages), len(messages) == 5)
    check("seconds (< 1)", round(seconds, 2), seconds < 1)
    finish()


if __name__ == "__main__":
    main()
