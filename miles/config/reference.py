"""Writes the reference of all recipe keys, `docs/recipe.md`, from the schema."""

from __future__ import annotations

from miles.config import tree
from miles.config.toml import toml_value

INTRODUCTION = """\
# The recipe

<!-- Written by scripts/recipe_docs.py from miles/config/schema.py: change the schema, then run `make docs`. -->

A recipe is a TOML file. `miles check RECIPE` prints what it resolves to and everything that is wrong with it, without
loading a model.

```toml
[model]
name = "smollm2-135m-instruct-q4"

[data]
source = "task:addition"

[algorithm]
name = "grpo"
steps = 16
```

**Layers.** Later ones win, key by key: the defaults below; the defaults of the algorithm's row; recipe files, in the order
they are named; environment variables such as `MILES__ALGORITHM__STEPS=6`; the command line, such as `--algorithm.steps 6`
or `--algorithm.steps=6`. A key that does not exist is an error.

**Values.** On the command line and in the environment a value is read as TOML (`6`, `1e-5`, `true`, `["a", "b"]`), and any
other text stands for itself. A key that may be absent shows `"none"` among its values: that text empties it, also in a file
where leaving the key out would bring a default back (in a file not for keys that take a text: there it is a text).

**Paths** are relative to the folder that `miles` is started in. `path/to/file.py:NAME` names a function or class of your own.

**The batch.** A step trains `algorithm.groups_per_step` prompts x `rollout.group_size` samples, in `learner.epochs` x
`learner.minibatches` updates. `learner.tokens_per_microbatch` is memory, never meaning.
"""


def recipe_reference() -> str:
    """The page as Markdown: a table of keys for each section."""
    return INTRODUCTION + "".join(_section(section) for section in tree.sections())


def _section(section: str) -> str:
    rows = [_row(key) for key in tree.fields() if key.rpartition(".")[0] == section]
    table = "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])
    return f"\n## [{section}]\n\n{table}\n"


def _row(key: str) -> str:
    info = tree.fields()[key]
    default = toml_value(list(info.default) if isinstance(info.default, tuple) else info.default)
    cells = (f"`{key.rpartition('.')[2]}`", tree.expected(key), f"`{default}`", info.description or "")
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
